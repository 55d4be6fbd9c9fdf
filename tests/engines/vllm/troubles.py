"""Faults injected into the process of an engine under test: ``driver.py`` calls these by name, with
itself as argument, between two steps."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pool.inside import blocks_of
from pool.inside import shrink as shrink_host

from kvrecall.block import NAMESPACE_BYTES, BlockKey
from kvrecall.engines.vllm.connector.audit import GENERATION_S
from kvrecall.pool.base import Verdict
from kvrecall.pool.disk.slabs import FileIo

_WRITE, _READ = FileIo.write, FileIo.read


def disk_full(host: Any) -> None:
    """Nothing can be written to the disk any more."""

    def write(self: FileIo, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    FileIo.write = write  # type: ignore[method-assign]


def disk_slow(host: Any, seconds: float) -> None:
    """Delays every read."""

    def read(self: FileIo, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(seconds)
        return _READ(self, fd, buffers, offset)

    FileIo.read = read  # type: ignore[method-assign]


def disk_well(host: Any) -> None:
    """Reverts the two above."""
    FileIo.write, FileIo.read = _WRITE, _READ  # type: ignore[method-assign]


def scribble(host: Any) -> None:
    """The KV of every block in the host is another one's: exponents of all values change, and what
    lies behind the KV stays."""
    pool = pool_of(host)
    facts = host.connector()._s._facts.groups[0]
    for block in blocks_of(pool):
        record = pool.arena.array()[block.offset : block.offset + facts.record_bytes]
        record ^= 0x10


def retune(host: Any) -> None:
    """The model's norms are other ones, and no call to the workers told it."""
    model = host.engine().model_executor.driver_worker.worker.get_model()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data[::2] *= 1.5


def age(host: Any) -> None:
    """What the engine saves from now on is of its writer's next generation."""
    host.connector()._s._auditor._since -= GENERATION_S


def clear(host: Any) -> None:
    """As ``kvrecall pool clear``; what was freed is overwritten."""
    with _overwriting(pool_of(host)) as pool:
        pool.clear()


def drop(host: Any) -> None:
    """As ``kvrecall pool drop``, of every block; what was freed is overwritten."""
    with _overwriting(pool_of(host)) as pool:
        pool.drop(list({held.key for held in pool.admin.blocks()}))


def shrink(host: Any) -> None:
    """As ``kvrecall pool resize --host``, to a tenth and back: what is not in use is evicted,
    and overwritten."""
    with _overwriting(pool_of(host)) as pool:
        shrink_host(pool)


@contextmanager
def _overwriting(pool: Any) -> Iterator[Any]:
    """Afterwards all free room of the host is filled and given back."""
    space, nbytes = next((one.key[:NAMESPACE_BYTES], one.nbytes) for one in blocks_of(pool))
    yield pool
    keys = [BlockKey(space + os.urandom(32)) for _ in range(1000)]
    for answer in pool.reserve(keys):
        if answer.verdict is Verdict.RESERVED:
            pool.arena.array()[answer.offset : answer.offset + nbytes] = 0x3C
    pool.abandon(keys)


def damage_memory(host: Any, first: int) -> None:
    """Flips bits of every block in the host from its byte ``first`` on; not of its origin."""
    pool = pool_of(host)
    nbytes = host.connector()._s._facts.groups[0].record_bytes
    for block in blocks_of(pool):
        begin, end = block.offset + first, block.offset + nbytes
        pool.arena.array()[begin:end] ^= 0x55


def hog(host: Any) -> None:
    """Holds every block that is in the host, so that none makes room."""
    pool = pool_of(host)
    host.hogged = [pool.acquire([block.key], 1.0) for block in blocks_of(pool)]


def release(host: Any) -> None:
    """Reverts ``hog``."""
    for ticket in host.hogged:
        pool_of(host).release(ticket)


def die(host: Any) -> None:
    """kill -9 of this process and its workers."""
    os.killpg(0, signal.SIGKILL)


def meet(host: Any, place: str, anew: bool = False) -> None:
    """Tells the test, by a file, that it is here, and waits until the test has taken it away;
    with ``anew``, also until there is another service."""
    before = host.service()
    Path(place).touch()
    while Path(place).exists() or (anew and host.service() in (None, before)):
        time.sleep(0.01)


def pool_of(host: Any) -> Any:
    return host.connector()._pool


def call_workers(host: Any, method: str, **kwargs: Any) -> None:
    """Calls a method of the workers while requests run."""
    host.rpc(method, **kwargs)


def load_adapter(host: Any, lora: list[Any]) -> None:
    """Loads an adapter in place of what its number has while requests run."""
    host.add_lora(lora, load_inplace=True)
