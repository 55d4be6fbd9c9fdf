"""Wheel and sdist: their contents, and that the wheel works without this repository, vLLM and other
packages that kvrecall does not require."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.commands import ran

pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kvrecall"
BUILD = "import sys, hatchling.build as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"
NOT_ASKED_FOR = (
    "vllm torch transformers fastapi starlette uvicorn cryptography obstore faiss "
    "mooncake sglang triton hypothesis pytest"
).split()


def build(kind: str, source: Path, into: Path) -> Path:
    """Builds ``kind`` of the project in ``source``, without a network."""
    done = ran(sys.executable, "-c", BUILD, kind, into, cwd=source)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone, as an index or a distribution would."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.unpack_archive(sdist, folder)  # tarfile's ``filter`` came with Python 3.11.4
    (source,) = folder.iterdir()
    return build("wheel", source, folder)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, and one before it on the path that hides packages kvrecall does not
    require."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    pip += ["--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(pip, check=True)
    for name in NOT_ASKED_FOR:
        (folder / "absent").mkdir(exist_ok=True)
        said = f"raise ModuleNotFoundError('no {name} here', name='{name}')\n"
        (folder / "absent" / f"{name}.py").write_text(said)
    return folder


def run(installed: Path, *words: str, status: int = 0) -> str:
    """What a command of the installed wheel prints; run outside of the repository."""
    path = os.pathsep.join(str(installed / name) for name in ("absent", "site"))
    environment = {"PATH": os.environ["PATH"], "HOME": str(installed), "COLUMNS": "200"}
    environment |= {"PYTHONPATH": path, "XDG_RUNTIME_DIR": str(installed)}
    done = ran(sys.executable, *words, cwd=installed, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def kvrecall(installed: Path, *words: str, status: int = 0) -> str:
    return run(installed, str(installed / "site" / "bin" / "kvrecall"), *words, status=status)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == sources
    assert "kvrecall/py.typed" in found
    assert "kvrecall/server/dashboard/static/index.html" in found


def test_the_sdist_is_the_repository(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "Makefile",
        "scripts/setup",
        "archive/log.md",
    ):
        assert name in names
    assert not {name for name in names if name.startswith((".venv", "var/", ".git/"))}
    assert sdist.stat().st_size < 16 << 20


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "kvrecall"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Author"] == "kvrecall contributors"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {"vllm", "kv-cache"} <= set(metadata["Keywords"].split(","))
    urls = dict(each.split(", ", 1) for each in metadata.get_all("Project-URL", []))
    assert urls["Homepage"].startswith("https://")
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    needed = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert not [each for each in needed if each.startswith(("vllm", "torch", "fastapi"))]


def test_it_is_the_installed_one_and_says_its_version(installed: Path, metadata: Message) -> None:
    said = run(installed, "-c", "import kvrecall; print(kvrecall.__file__, kvrecall.__version__)")
    file, version = said.split()
    assert Path(file).is_relative_to(installed)
    assert version == metadata["Version"]
    assert version in kvrecall(installed, "--version")


def test_commands_that_need_no_engine(installed: Path) -> None:
    assert "simulate" in kvrecall(installed, "--help")
    trace = installed / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1, 2]}\n' * 2)
    words = ["simulate", str(trace), "--capacity-blocks", "100"]
    words += ["--policy", "all", "--json"]
    told = json.loads(kvrecall(installed, *words).strip().splitlines()[-1])
    assert "lru" in json.dumps(told)
    commands = ("plan", "pool", "bench", "demo", "router", "serve", "config", "doctor")
    each = f"for each in {commands}: cli.app([each, '--help'], standalone_mode=False)"
    said = run(installed, "-c", f"from kvrecall import cli\n{each}")
    for command in commands:
        assert re.search(rf"Usage: \S+ {command} ", said), command


@pytest.mark.skipif(not find_spec("vllm"), reason="its metadata is not there either")
def test_the_doctor_says_what_cannot_be_imported(installed: Path) -> None:
    said = kvrecall(installed, "doctor", "--host-size", "8MiB", "--json", status=1)
    findings = json.loads(said.splitlines()[0])["findings"]
    found = {each["check"]: each["found"] for each in findings if each["state"] == "broken"}
    assert "no torch here" in found["torch"]
    assert "no vllm here" in found["vllm"]


def test_the_pool(installed: Path) -> None:
    """A service of the installed wheel, asked by its administration."""
    script = """
import subprocess, sys, time, json
socket = sys.argv[2] + "/pool.sock"
def command(*words):
    return [sys.executable, sys.argv[1], "pool", *words, "--socket", socket]
service = subprocess.Popen(command("serve", "--host-size", "8MiB"))
try:
    while True:
        asked = subprocess.run(command("stat", "--json"), capture_output=True, text=True)
        if asked.returncode == 0:
            break
        assert service.poll() is None
        time.sleep(0.1)
    print(asked.stdout)
finally:
    service.terminate()
print("ended", service.wait(60))
"""
    program = str(installed / "site" / "bin" / "kvrecall")
    said = run(installed, "-c", script, program, str(installed))
    assert '"host"' in said
    assert "ended 0" in said


def test_what_needs_vllm_says_so_in_a_line(installed: Path) -> None:
    (installed / "model").mkdir()
    (installed / "model" / "config.json").write_text("{}")
    said = kvrecall(installed, "serve", str(installed / "model"), status=1)
    assert "serving needs vLLM" in said
    assert "Traceback" not in said


@pytest.mark.long
def test_it_builds_as_the_index_takes_it_and_installs_into_empty_environments(
    sdist: Path, tmp_path: Path
) -> None:
    """With the network. Extras that bring an engine are resolved and not installed."""

    def made(name: str, *packages: str) -> Path:
        subprocess.run([sys.executable, "-m", "venv", tmp_path / name], check=True)
        python = tmp_path / name / "bin" / "python"
        if packages:
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        return python

    shutil.unpack_archive(sdist, tmp_path / "unpacked")
    (source,) = (tmp_path / "unpacked").iterdir()
    tools = made("tools", "build", "twine")
    subprocess.run([tools, "-m", "build", "-o", tmp_path / "dist", source], check=True)
    files = sorted((tmp_path / "dist").iterdir())
    subprocess.run([tools, "-m", "twine", "check", "--strict", *files], check=True)
    (wheel,) = (file for file in files if file.suffix == ".whl")
    empty = made("empty")
    for extra in ("cpu", "cuda", "mooncake", "mooncake-cuda"):
        words = ["install", "-q", "--dry-run", f"{wheel}[{extra}]"]
        subprocess.run([empty, "-m", "pip", *words], check=True)
    for extra in ("", "encryption", "compression", "objects", "router", "traces", "index"):
        python = made(f"with-{extra}", f"{wheel}[{extra}]" if extra else str(wheel))
        subprocess.run([python, "-m", "pip", "check"], check=True)
        subprocess.run([python.with_name("kvrecall"), "--version"], check=True)


@pytest.mark.engine
@pytest.mark.longest
def test_the_demo_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Without the repository and its model: it writes one of random weights."""
    pytest.importorskip("vllm")
    program = installed / "site" / "bin" / "kvrecall"
    words = (program, "demo", "--characters", "4000", "--json")
    environment = {**os.environ, "PYTHONPATH": str(installed / "site")}
    done = ran(sys.executable, *words, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert (told["ok"], told["tokens_equal"], told["model"]) == (True, True, "random-qwen3")
    assert min(told[f"{tier}_hit_tokens"] for tier in ("device", "host", "disk")) > 1000
    assert not list(tmp_path.iterdir())
