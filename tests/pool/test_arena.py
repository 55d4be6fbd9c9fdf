from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from kvrecall.errors import ConfigError, TierError
from kvrecall.pool import arena as module
from kvrecall.pool.arena import Arena, available_memory
from kvrecall.pool.base import ArenaHandle

MIB = 1 << 20


def test_another_process_sees_the_same_bytes() -> None:
    arena = Arena.create(2 * MIB)
    arena.view(4096, 5)[:] = b"hello"
    handle = arena.handle()
    code = (
        "from kvrecall.pool.arena import Arena, ArenaHandle\n"
        f"arena = Arena.attach(ArenaHandle({handle.pid}, {handle.fd}, {handle.nbytes}))\n"
        "assert bytes(arena.view(4096, 5)) == b'hello'\n"
        "arena.view(8192, 5)[:] = b'world'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert bytes(arena.view(8192, 5)) == b"world"
    arena.close()


def test_array_shares_the_memory() -> None:
    arena = Arena.create(MIB)
    array = arena.array()
    assert array.shape == (MIB,)
    array[10] = 77
    assert arena.memory[10] == 77
    arena.close()
    assert array[10] == 77  # stays valid while somebody holds it
    arena.close()


def test_has_no_name_and_leaves_nothing() -> None:
    arena = Arena.create(MIB)
    link = Path(f"/proc/self/fd/{arena.handle().fd}")
    assert str(link.readlink()).startswith("/memfd:"), "a file that somebody must delete"
    inode = link.stat().st_ino
    arena.close()
    assert not link.exists() or link.stat().st_ino != inode


def test_nobody_can_shrink_it() -> None:
    arena = Arena.create(MIB)
    fd = os.open(f"/proc/self/fd/{arena.handle().fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    arena.close()


def test_pages_come_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEP", MIB)
    arena = Arena.create(16 * MIB)
    assert arena.ready_bytes >= MIB
    arena.wait_ready()
    assert arena.ready_bytes == 16 * MIB
    arena.close()


def test_closing_while_pages_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEP", MIB)
    before = set(threading.enumerate())
    Arena.create(256 * MIB).close()
    assert set(threading.enumerate()) <= before


def resident(arena: Arena) -> int:
    return os.fstat(arena.handle().fd).st_blocks * 512


def test_what_it_may_grow_to_takes_no_memory_until_it_does() -> None:
    arena = Arena.create(2 * MIB, most_bytes=16 * MIB)
    arena.wait_ready()
    assert (arena.nbytes, arena.ready_bytes) == (16 * MIB, 2 * MIB)
    assert resident(arena) < 5 * MIB  # whole huge pages
    other = Arena.attach(arena.handle())
    other.wait_ready()
    assert resident(arena) < 5 * MIB
    arena.grow(12 * MIB)
    arena.wait_ready()
    assert arena.ready_bytes == 12 * MIB
    arena.array()[12 * MIB - 1] = 7
    assert other.array()[12 * MIB - 1] == 7
    arena.grow(4 * MIB)
    assert arena.goal_bytes == 12 * MIB
    arena.grow(64 * MIB)
    arena.wait_ready()
    assert arena.ready_bytes == arena.nbytes
    arena.close()
    other.close()


def test_growth_the_machine_has_no_memory_for_is_refused() -> None:
    arena = Arena.create(MIB, most_bytes=available_memory() * 2)
    with pytest.raises(ConfigError, match=r"GiB of memory .* left; grow by less"):
        arena.grow(arena.nbytes)
    assert arena.ready_bytes == arena.goal_bytes == MIB
    arena.close()


def test_more_than_the_machine_has_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match=r"host_size: .* GiB is more than the .* GiB") as caught:
        Arena.create(available_memory() * 2)
    assert "\n" not in str(caught.value)


def test_limit_of_the_container_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 100 kB\nMemAvailable:    50000 kB\n",
        "/proc/self/cgroup": "0::/pod/box\n",
        "/sys/fs/cgroup/pod/box/memory.max": "max\n",
        "/sys/fs/cgroup/pod/memory.max": "30000000\n",
        "/sys/fs/cgroup/pod/memory.current": "10000000\n",
        "/sys/fs/cgroup/pod/memory.stat": "shmem 9\ninactive_file 2000000\nactive_file 1000000\n",
    }

    def read_text(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert available_memory() == 23_000_000, "files in the page cache can be dropped"


def test_attaching_to_what_is_gone() -> None:
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    with pytest.raises(TierError, match="cannot map the arena of process"):
        Arena.attach(ArenaHandle(int(child.stdout), 3, MIB))
    arena = Arena.create(MIB)
    wrong = ArenaHandle(os.getpid(), arena.handle().fd, 2 * MIB)
    with pytest.raises(TierError, match="no longer has an arena of 2097152 bytes"):
        Arena.attach(wrong)
    arena.close()


def test_memory_comes_from_the_numa_nodes_that_are_preferred() -> None:
    """Also what other processes touch first: the kernel keeps the policy with the memory."""
    arena = Arena.create(2 * MIB)
    if not arena.prefer([0]):
        pytest.skip("this kernel or container has no memory policies")
    (line,) = (
        line
        for line in Path("/proc/self/numa_maps").read_text().splitlines()
        if int(line.split()[0], 16) == np.frombuffer(arena.memory, np.uint8).ctypes.data
    )
    assert "prefer:0" in line or "prefer=" in line
    assert arena.node() == 0
    assert not arena.prefer([63]), "there is no such node"
    assert not arena.prefer([64])
    assert not arena.prefer([])
    arena.close()
