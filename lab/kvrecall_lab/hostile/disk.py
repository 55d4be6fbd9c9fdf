"""Attacks on a disk tier's folder: what is in it, whose it is, and who else opens it."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvrecall.block import SHARED, BlockKey, Tenant
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.errors import TierError
from kvrecall.pool.disk import DiskTier, index
from kvrecall.pool.pool import Pool
from kvrecall.pool.tier import Get, Outcome, Put
from kvrecall.testing import chain, content, namespace
from kvrecall.testing.pool_contract import Engine
from kvrecall_lab.hostile.attack import Breach, Crashed, GotIn, NotHere, Stalled, attack
from kvrecall_lab.hostile.listeners import said_by

_MIB = 1 << 20
_BYTES = 4000
_SLOT = 4096
_NAMESPACE = namespace()
_OTHER = namespace("other")
_OLD = [*chain(_NAMESPACE, 60), *chain(_OTHER, 20)]
_NEW = chain(_NAMESPACE, 40, "new")
_TENANT = Tenant("00112233445566ff")
_WAIT_S = 10.0
_FLIPPING_S = 25.0
_FILES = (
    "closed/index.sqlite",
    "log/index.sqlite",
    "log/index.sqlite-wal",
    "closed/slab-000000.kv",
)
_SCHEMA = "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = replace(sql, {}, {})"
_WRONG = (  # what single bits did, which chance may not find in time
    "UPDATE blocks SET tenant = CAST(tenant AS TEXT)",
    "UPDATE blocks SET tenant = NULL, used = NULL WHERE depth = 3",
    "UPDATE blocks SET hash = 7, parent = 7.5",
    "UPDATE blocks SET depth = x'00', used = 'now', pinned = 'yes', nbytes = -1",
    "UPDATE blocks SET namespace = namespace + 1",
    "UPDATE blocks SET address = address + (1 << 62)",
    "UPDATE namespaces SET parts = '{'",
    "UPDATE namespaces SET parts = CAST(x'8080' AS TEXT), block_bytes = 'many'",
    "UPDATE meta SET value = 'zz' WHERE name = 'pool_id'",
    "DELETE FROM meta",
    "PRAGMA user_version = 7777",
    "PRAGMA application_id = 7",
    _SCHEMA.format("'parent BLOB'", "'parenu BLOB'"),
    _SCHEMA.format("'TABLE meta'", "'TABLE mtea'"),
)
_TYPED = (("STRICT,", "/*type,*/"), ("STRICT", "/*type*/"))
_LARGE = index._LARGE


@contextlib.contextmanager
def _tier(folder: Path) -> Iterator[DiskTier]:
    tier = DiskTier(DiskConfig(folder, 16 * _MIB, readers=1))
    try:
        for space in (_NAMESPACE, _OTHER):
            tier.register(space, _BYTES)
        yield tier
    finally:
        tier.close()


def _put(tier: DiskTier, keys: list[BlockKey]) -> int:
    """Returns how many are stored."""
    puts = []
    for place, key in enumerate(keys):
        data = memoryview(mmap.mmap(-1, _SLOT))
        data[:_BYTES] = content(key, _BYTES)
        parent = keys[place - 1] if place else None
        tenant = _TENANT if place % 2 else SHARED
        puts.append(Put(key, parent, place, data, _BYTES, tenant=tenant))
    tier.submit_put(puts)
    return list(_ended(tier, len(keys)).values()).count(Outcome.STORED)


def _get(tier: DiskTier, keys: list[BlockKey]) -> set[BlockKey]:
    """Returns those that were loaded. Raises GotIn if one has wrong bytes."""
    slots = {key: memoryview(mmap.mmap(-1, _SLOT)) for key in keys}
    tier.submit_get([Get(key, slot) for key, slot in slots.items()])
    ended = _ended(tier, len(keys))
    loaded = {key for key, outcome in ended.items() if outcome is Outcome.LOADED}
    for key in loaded:
        if bytes(slots[key][:_BYTES]) != content(key, _BYTES):
            raise GotIn("a block was recalled with wrong bytes")
    return loaded


def _ended(tier: DiskTier, count: int) -> dict[BlockKey, Outcome]:
    done: dict[BlockKey, Outcome] = {}
    until = time.monotonic() + _WAIT_S
    while len(done) < count:
        if time.monotonic() > until:
            raise Stalled(f"{count - len(done)} of {count} operations never ended")
        done |= {item.key: item.outcome for item in tier.poll(0.05)}
    return done


def _filled(folder: Path) -> None:
    with _tier(folder) as tier:
        _put(tier, _OLD)
        tier.catalog.pin(_OLD[:3])
        tier.wait_pins_durable(_WAIT_S)
        _get(tier, _OLD)


def _damage(
    folder: Path, change: Callable[[bytearray, random.Random], None], seconds: float, seed: int = 4
) -> str:
    """Damages the index, its log or a slab, time and again; the tier must go on."""
    deaths: list[str] = []
    threading.excepthook = lambda args: deaths.append(repr(args.exc_value))
    closed, killed = folder / "closed", folder / "killed"
    _filled(closed)
    shutil.copytree(closed, killed)
    with _tier(killed) as tier:  # what kill -9 would leave: rows in the log
        _put(tier, _NEW[:20])
        shutil.copytree(killed, folder / "log")
    rng, lost, times = random.Random(seed), 0, 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        times += 1
        name = _FILES[times % len(_FILES)]
        index._LARGE = (0, _LARGE)[times % 2]  # a large one is not checked page by page
        trial = Path(tempfile.mkdtemp(dir=folder))
        shutil.rmtree(trial)
        shutil.copytree(folder / Path(name).parent, trial)
        path = trial / Path(name).name
        if times <= len(_WRONG):
            _forge(trial / "index.sqlite", _WRONG[times - 1])
        else:
            data = bytearray(path.read_bytes())
            change(data, rng)
            path.write_bytes(data)
        try:
            with _tier(trial) as tier:
                lost += len(_OLD) - len(_get(tier, _OLD))
                more = [key for key in _OLD + _NEW if not tier.contains(key)]
                if _put(tier, more) < len(more):
                    raise Crashed("blocks are not stored any more")
                if _get(tier, _OLD + _NEW) != {*_OLD, *_NEW}:
                    raise Crashed("stored blocks are not found")
            with _tier(trial) as tier:
                if _get(tier, _OLD + _NEW) != {*_OLD, *_NEW}:
                    raise Crashed("blocks are gone after a restart")
            if deaths:
                raise Crashed(f"a thread died of {deaths[0]}")
        except Breach as breach:
            raise type(breach)(f"change {times} of {name}: {breach}") from breach
        except Exception as error:
            raise Crashed(f"change {times} of {name}: {error!r}") from error
        shutil.rmtree(trial)
    return f"{times} damaged folders cost {lost / times:.1f} of {len(_OLD)} blocks each, no more"


def _forge(path: Path, script: str) -> None:
    """Executes the script, meanwhile with columns that take values of any type."""
    loosen = "".join(_SCHEMA.format(f"'{a}'", f"'{b}'") + ";" for a, b in _TYPED)
    restore = "".join(_SCHEMA.format(f"'{b}'", f"'{a}'") + ";" for a, b in _TYPED)
    for one in (loosen, script, restore):
        with contextlib.closing(sqlite3.connect(path)) as database:
            try:
                database.executescript(one)
            except sqlite3.DatabaseError:
                if one is not restore:
                    raise


@attack()
def one_flipped_bit(folder: Path) -> str:
    """A medium flips one bit of the index, its log or a slab; or what a flip made is in rows."""

    def flip(data: bytearray, rng: random.Random) -> None:
        most = rng.choice((64, len(data)))
        data[rng.randrange(most)] ^= 1 << rng.randrange(8)

    return _damage(folder, flip, _FLIPPING_S)


@attack()
def torn_index(folder: Path) -> str:
    """Runs of an index's bytes are zeros, noise, another part of it, or cut off."""

    def tear(data: bytearray, rng: random.Random) -> None:
        begin = rng.randrange(len(data))
        end = min(len(data), begin + rng.choice((1, 2, 8, 100, 4096, 1 << 20)))
        match rng.randrange(4):
            case 0:
                data[begin:end] = bytes(end - begin)
            case 1:
                data[begin:end] = rng.randbytes(end - begin)
            case 2:
                other = rng.randrange(len(data))
                data[begin:end] = data[other : other + end - begin].ljust(end - begin, b"\0")
            case _:
                del data[begin:]

    return _damage(folder, tear, _FLIPPING_S)


@attack()
def folder_of_others(folder: Path) -> str:
    """disk_path is another user's, writable for others, or a link; its files are links."""
    yours = folder / "yours"
    _filled(yours)

    def refused(what: str, path: Path) -> None:
        try:
            with _tier(path):
                raise GotIn(f"a tier was opened on {what}")
        except TierError:
            pass

    for mode in (0o770, 0o702, 0o777):
        yours.chmod(mode)
        refused(f"a folder of mode {mode:o}", yours)
    yours.chmod(0o700)
    (folder / "link").symlink_to(yours)
    refused("a symbolic link", folder / "link")
    secret = folder / "secret"
    for name in ("index.sqlite", "index.sqlite-wal", "lock", "slab-000009.kv"):
        for make in (os.symlink, os.link):
            trap = folder / f"{make.__name__}-{name}"
            trap.mkdir(0o700)
            secret.write_bytes(b"mine" * 5000)
            make(secret, trap / name)
            refused(f"a folder in which {name} is a {make.__name__}", trap)
            if secret.read_bytes() != b"mine" * 5000:
                raise GotIn(f"a file outside the folder was changed through {name}")
    if os.geteuid() == 0:
        os.chown(yours, 65534, 65534)
        refused("another user's folder", yours)
        os.chown(yours, 0, 0)
    with _tier(yours) as tier:
        if _get(tier, _OLD) != set(_OLD):
            raise Crashed("the owner's folder is not usable any more")
    return "each was refused before anything in it was read or changed"


@attack()
def removed_lock(folder: Path) -> str:
    """A cleaner removes the lock file of a folder in use, and a second tier opens it."""
    place = folder / "tier"
    with _tier(place) as tier:
        _put(tier, _OLD)
        (place / "lock").unlink()
        with contextlib.suppress(TierError), _tier(place):
            raise GotIn("two tiers have one folder open")
        if _get(tier, _OLD) != set(_OLD):
            raise Crashed("the first tier lost its blocks")
    with _tier(place) as tier:
        if _get(tier, _OLD) != set(_OLD):
            raise Crashed("the folder cannot be opened again")
    return "the folder itself is locked"


_SMALL = "size=40m,nr_inodes=12"  # of a file system in memory
_STATES = {
    "full": "dd if=/dev/zero of=medium/rest bs=64k 2>/dev/null",
    "without inodes": "touch $(seq -f medium/%g 20) 2>/dev/null",
    "read-only": "mount -o remount,ro medium",
}
_SERVE = "from kvrecall_lab.hostile.disk import serve; serve()"


@attack()
def medium_that_fails(folder: Path) -> str:
    """At the start the file system of disk_path is full, has no inodes, or is read-only."""
    python = f'"{sys.executable}" -c "{_SERVE}"'
    for first in (":", python):
        for state, change in _STATES.items():
            (folder / "medium").mkdir(exist_ok=True)
            # Of its own, which is gone with the process.
            mount = f"mount -t tmpfs -o {_SMALL} none medium || exit 77"
            steps = f"{mount}; {first} || exit 78; {change}; {python}"
            alone = 'unshare -rm true || exit 77; exec unshare -rm sh -c "$0"'
            done = said_by("sh", "-c", alone, steps, cwd=folder)
            if done.returncode == 77:
                raise NotHere("a file system of one's own")
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:]
                raise Crashed(f"a pool does not serve on a file system that is {state}: {last}")
    return f"a pool serves, and says so, on file systems that are {', '.join(_STATES)}"


def serve() -> None:
    """Opens a pool on ``medium/tier`` and uses it as an engine does."""
    disk = DiskConfig(Path("medium/tier").absolute(), 16 * _MIB)
    with Pool.open(PoolConfig(4 * _MIB, disk)) as pool:
        pool.register(_NAMESPACE, _BYTES)
        engine = Engine(pool, _BYTES)
        engine.save(_OLD[:20])
        pool.flush(_OLD[:20], 2.0)
        assert len(engine.recall(_OLD[:20])) == 20
        assert [tier.name for tier in pool.stats().tiers] == ["host", "disk"]
        engine.close()


@attack()
def limits_of_the_process(folder: Path) -> str:
    """ulimit -v or -f is too small for the arena: one line that names setting and limit."""
    seen = []
    for limit, size in (("-v 4000000", 8), ("-f 100000", 1)):
        program = (
            "from kvrecall.config import PoolConfig; from kvrecall.pool.pool import Pool;"
            "from kvrecall.errors import ConfigError\n"
            f"try: Pool.open(PoolConfig({size} << 30))\n"
            "except ConfigError as error: print(error)\n"
        )
        limited = f'ulimit {limit}; exec "{sys.executable}" -c "$0"'
        done = said_by("sh", "-c", limited, program, cwd=folder)
        said = done.stdout.strip()
        if done.returncode or "\n" in said or "host_size" not in said:
            raise Crashed(f"under ulimit {limit}: {said} {done.stderr[-200:]}")
        if f"ulimit {limit[:2]}" in said or "memory this machine" in said:
            seen.append(limit)
    return f"a line that names host_size, under ulimit {' and '.join(seen)}"
