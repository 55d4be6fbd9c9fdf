"""Memory beside the arena in which a wrapper of a store keeps values in the form of the store."""

from __future__ import annotations

import logging
import mmap
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvrecall.pool.remote.store import Object

_LOG = logging.getLogger(__name__)
_SECTIONS = 2  # of each direction: calls that have values in hand at once; others wait
SECTION_BYTES = 66 << 20
"""The most that ``BatchSize`` allows a call, with headers and tags."""
_ALIGNMENT = 64


class Sections:
    """A memory file in sections, of which each call has one at a time. Its pages are allocated as
    they are used. Thread-safe.

    Values do not arrive in the sections that they leave from: whatever a call that failed may still
    write hits only bytes that are verified after they were copied out.
    """

    def __init__(self, what: str, section_bytes: int = SECTION_BYTES) -> None:
        """``what``: the name of the memory and, for the log, what is done to values."""
        self._what = what
        self._section_bytes = section_bytes
        self._told = False
        nbytes = 2 * _SECTIONS * section_bytes
        self.fd = os.memfd_create(f"kvrecall-{what}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self.memory = memoryview(mmap.mmap(self.fd, nbytes))
        self._leaving: queue.LifoQueue[memoryview] = queue.LifoQueue()  # the last is in caches
        self._arriving: queue.LifoQueue[memoryview] = queue.LifoQueue()
        for begin in range(0, nbytes, section_bytes):
            free = self._leaving if begin < nbytes // 2 else self._arriving
            free.put(self.memory[begin : begin + section_bytes])

    def close(self) -> None:
        """Idempotent. Calls in flight keep their section."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @contextmanager
    def _one(self, leaving: bool) -> Iterator[memoryview]:
        """Waits for a free section."""
        free = self._leaving if leaving else self._arriving
        section = free.get()
        try:
            yield section
        finally:
            free.put(section)

    def answers(
        self,
        objects: Sequence[Object],
        more: int,
        call: Callable[[Sequence[Object], memoryview], list[int]],
        leaving: bool,
    ) -> list[int]:
        """The answers of ``call``, which puts (``leaving``) or gets, for as many objects at a time
        as fit a section together, with that section; -1 for one that fits none. Each takes its size
        and ``more``, and begins at a multiple of ``_ALIGNMENT``."""
        answers: list[int] = []
        at = 0
        while at < len(objects):
            end, size = at, 0
            while end < len(objects):
                size += _aligned(objects[end].nbytes + more)
                if size > self._section_bytes:
                    break
                end += 1
            if end == at:
                self._tell(objects[at].nbytes)
                answers.append(-1)
                at += 1
                continue
            with self._one(leaving) as section:
                answers += call(objects[at:end], section)
            at = end
        return answers

    def _tell(self, nbytes: int) -> None:
        if not self._told:
            self._told = True
            _LOG.error(
                "remote tier: blocks of %d bytes are too large to be stored with %s; at most %d",
                nbytes,
                self._what,
                self._section_bytes,
            )


def first_found(
    objects: Sequence[Object], ways: Sequence[Callable[[Sequence[Object]], list[int]]]
) -> list[int]:
    """Gets values in the first way, then in each other one those still missing (-1)."""
    found = [-1] * len(objects)
    for get in ways:
        missing = [place for place, size in enumerate(found) if size < 0]
        if missing:
            sizes = get([objects[place] for place in missing])
            for place, size in zip(missing, sizes, strict=True):
                found[place] = size
    return found


def one_after_the_other(sizes: Sequence[int], section: memoryview) -> Iterator[memoryview]:
    """Pieces of ``section`` of these sizes."""
    begin = 0
    for nbytes in sizes:
        yield section[begin : begin + nbytes]
        begin += _aligned(nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
