"""A search on one thread, or on several, each of which does all of it for its part of the KV heads.

PyTorch would start its threads for one small operation after the other, and wait for all of them at
the end of each: beside other work for milliseconds, and on an idle machine for as long as it saves.
A thread of our own must first get a core from those threads, which wait busily (docs/log.md).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier

import torch

_BYTES_A_THREAD = 8 << 20
"""Minimum bytes for each thread to read: a millisecond."""


def over_heads(act: Callable[[slice], torch.Tensor], heads: int, nbytes: int) -> torch.Tensor:
    """The results of ``act`` for parts of the heads, in their order, as one tensor. It reads
    ``nbytes`` in all, on a CPU; PyTorch's operations in it are of one thread."""
    allowed = torch.get_num_threads()
    if allowed == 1:
        return act(slice(0, heads))
    count = min(allowed, heads, max(1, nbytes // _BYTES_A_THREAD))
    ends = [heads * at // count for at in range(count + 1)]
    first, *rest = (slice(*each) for each in pairwise(ends))
    others = [_threads(allowed).submit(act, part) for part in rest]
    torch.set_num_threads(1)  # of this thread
    try:
        found = [act(first), *(other.result() for other in others)]
    finally:
        torch.set_num_threads(allowed)
    return found[0] if not rest else torch.cat(found)


@functools.cache
def _threads(allowed: int) -> ThreadPoolExecutor:
    """All of them running, and each with one thread of PyTorch's."""
    cores, count = _cores(), allowed - 1
    begun = Barrier(count)

    def begin() -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(1)
        begun.wait()

    pool = ThreadPoolExecutor(count, "kvrecall-search", initializer=begin)
    for _ in range(count):
        pool.submit(int)
    pool.submit(int).result()
    torch.set_num_threads(allowed)  # for threads to come
    return pool


def _cores() -> set[int]:
    """The cores of this process's OpenMP threads. vLLM binds each to a core, this thread too, and
    a thread inherits the binding of the one that starts it. Empty where threads are not bound."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) > 1:
        return set()
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            bound = os.sched_getaffinity(int(thread))
            cores |= bound if len(bound) == 1 else set()
    return cores
