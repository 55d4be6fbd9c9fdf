"""What is carried to a GPU machine without internet, and the run there, on a CPU."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from kvrecall.testing import wait_until
from kvrecall_lab.gpu import pack
from kvrecall_lab.gpu.fatbin import blank_others, device_code
from kvrecall_lab.gpu.run import RESULTS
from kvrecall_lab.gpu.unpack import CACHE, SITE, unpack

ELF, PTX = 2, 1
Entry = tuple[int, int, bytes]
"""Kind, capability and content of device code."""

LISTS: Sequence[Sequence[Entry]] = (
    (
        (ELF, 80, b"eighty.."),
        (ELF, 90, b"ninety, twenty-four long"),
        (PTX, 90, b"text of ninety.."),
    ),
    ((ELF, 90, b"and more"), (ELF, 120, b"of a later GPU.." * 9)),
)


def container(entries: Sequence[Entry]) -> bytes:
    """One list of device code, as nvcc writes it."""
    body = b"".join(
        struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(content), capability) + content
        for kind, capability, content in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def module(fatbin: bytes) -> bytearray:
    """An ELF file of 64 bits with sections of code, device code and names."""
    names = b"\0.text\0.nv_fatbin\0.shstrtab\0"
    contents = [b"", b"host code, which stays", fatbin, names]
    offsets, made = [], bytearray(64)
    for content in contents:
        made += bytes(-len(made) % 16)
        offsets.append(len(made))
        made += content
    made += bytes(-len(made) % 16)
    table = len(made)
    labels = [0, *(names.index(name) for name in (b".text\0", b".nv_fatbin\0", b".shstrtab\0"))]
    for label, offset, content in zip(labels, offsets, contents, strict=True):
        made += struct.pack("<IIQQQQIIQQ", label, 1, 0, 0, offset, len(content), 0, 0, 1, 0)
    made[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", made, 0x28, table)
    struct.pack_into("<HHH", made, 0x3A, 64, len(contents), 3)
    return made


def test_only_machine_code_of_the_machines_gpu_stays() -> None:
    fatbin = b"".join(container(entries) + bytes(24) for entries in LISTS)
    before = module(fatbin)
    after = bytearray(before)
    assert blank_others(after, 90) == (24 + 8, 8 + 16 + 144)
    entries = [entry for some in LISTS for entry in some]
    found = list(device_code(after))
    assert [(ptx, of) for of, ptx, _ in found] == [(kind == PTX, of) for kind, of, _ in entries]
    for (kind, of, content), (_, _, (begin, end)) in zip(entries, found, strict=True):
        assert after[begin:end] == (content if (kind, of) == (ELF, 90) else bytes(len(content)))
        before[begin:end] = after[begin:end]
    assert before == after, "nothing else was changed"


@pytest.mark.parametrize(
    ("damaged", "said"),
    [
        (bytearray(b"MZ" + bytes(100)), "not an ELF file"),
        (module(container(LISTS[0])[:-8]), "ends at"),
        (
            module(container(LISTS[0]).replace(struct.pack("<Q", 24), struct.pack("<Q", 999))),
            "entry",
        ),
    ],
)
def test_modules_that_are_damaged_are_refused(damaged: bytearray, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        blank_others(damaged, 90)


def test_what_is_packed_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, kit, home = (tmp_path / name for name in ("from", "kit", "home"))
    files = {"a/one.py": b"one = 1\n", "a/two.bin": os.urandom(5000), "b.py": b"b = 2\n" * 900}
    for name, content in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
    kit.mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no site-\*\.tar\.xz"):
        unpack(kit, home)
    monkeypatch.setattr(pack, "_CHUNK_BYTES", 5004)
    pack.archive(site, kit, SITE, lambda _: None)
    pack.archive(site / "a", kit, CACHE, lambda _: None)
    assert sorted(path.name for path in kit.iterdir()) == [
        "cache-0.tar.xz", "cache-1.tar.xz", "site-0.tar.xz", "site-1.tar.xz", "site-2.tar.xz"
    ]  # fmt: skip
    unpack(kit, home)
    for name, content in files.items():
        assert (home / SITE / name).read_bytes() == content
    assert (home / CACHE / "two.bin").read_bytes() == files["a/two.bin"]
    assert list((home / SITE).rglob("*.pyc"))


def test_what_a_package_of_the_kit_requires_is_there(tmp_path: Path) -> None:
    """Without loguru and httptools a loan's servers ended as they started."""
    asked = {
        "vllm": "flashinfer",
        "compressed_tensors": "loguru\nRequires-Dist: torch>=2",
        "loguru": "win32-setctime; sys_platform == 'win32'",
        "depyf": "Astor_X\nRequires-Dist: pytest; extra == 'dev'",
    }
    for name, text in asked.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\nRequires-Dist: {text}\n"
        (folder / "METADATA").write_text(metadata)
    assert pack.missing(tmp_path) == ["astor-x"]
    shutil.rmtree(tmp_path / "loguru-1.0.dist-info")
    assert pack.missing(tmp_path) == ["astor-x", "loguru"]


ODD = """
import os, subprocess, sys, time
from kvrecall.gpu_check.part import Part, report
def leave(here):
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    pid = subprocess.Popen(words, start_new_session=True).pid
    here.say("an engine", pid=pid)
    os._exit(3)
def hang(here):
    time.sleep(600)
def see(here):
    os.makedirs(os.environ["TRITON_CACHE_DIR"], exist_ok=True)
    open(os.environ["TRITON_CACHE_DIR"] + "/kernel", "w").write("compiled")
    return "seen", {}
PARTS = {"leave": Part(leave, 60, 60), "hang": Part(hang, 60, 4), "see": Part(see, 60, 60)}
if __name__ == "__main__":
    report(PARTS, *sys.argv[1:])
"""


def test_each_part_ends_with_all_that_it_started(tmp_path: Path) -> None:
    """In a process of its own, which adopts what its children leave."""
    (tmp_path / "odd.py").write_text(ODD)
    program = (
        "import odd; from pathlib import Path; from kvrecall_lab.gpu.run import run; here = Path();"
        "run([*odd.PARTS], here / 'out', here / 'home', 300, False, 'odd', odd.PARTS);"
        "run(['see'], here / 'out', here / 'home', 21, False, 'odd', odd.PARTS)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / RESULTS).read_text().splitlines()]
    ends = [
        (one["check"], one["state"]) for one in lines if one.get("state", "running") != "running"
    ]
    assert ends == [("leave", "fail"), ("hang", "fail"), ("see", "pass"), ("see", "skip")]
    assert [one["note"] for one in lines if one.get("state") == "fail"] == [
        "the process ended with 3: no message", "did not end within 4 s"
    ]  # fmt: skip
    (pid,) = [one["figures"]["pid"] for one in lines if one.get("note") == "an engine"]
    wait_until(lambda: not psutil.pid_exists(pid))
    assert (tmp_path / "out" / "cache-0.tar.xz").exists()


@pytest.mark.longest
@pytest.mark.engine
def test_all_of_a_run_at_toy_size(tmp_path: Path) -> None:
    parts = "environment chain variants copies first-token decode beyond gaps".split()
    words = ["run", "--out", str(tmp_path / "out"), "--home", str(tmp_path), "--tiny"]
    command = [sys.executable, "-m", "kvrecall_lab.gpu", *words, "--limit", "1500"]
    subprocess.run([*command, "--parts", ",".join(parts)], check=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / RESULTS).read_text().splitlines()]
    found = {one["check"]: one["figures"] for one in lines if one.get("state") == "pass"}
    assert list(found) == parts
    times = found["first-token"]["seconds"]["kvrecall"]
    tiers = {"computed", "device", "host", "disk"}
    assert [set(one) for one in times.values()] == [tiers, tiers | {"together"}]
    off = found["beyond"]["off"].values()
    assert [(one["spread"], one["at_once"]) for one in off] == [(0.05, 2), (0.0, 2)]
    assert set(found["gaps"]["gaps_s"]["kvrecall"]) == {"quiet", "host", "device", "computed"}
