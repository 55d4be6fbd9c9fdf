"""The third form of a copy queue, and a connector that uses it: copies are made as late as the
interface allows, so what relies on their being early goes wrong. Host memory stands in for a
device's.

A batch is copied when the queue is drained, or in the ``PATIENCE``-th ``completed`` after it
was submitted. Before that its sources are unread, as on a stream that is behind.
"""

from __future__ import annotations

from collections import deque

import torch

from kvrecall.engines.vllm.connector import copier, worker
from kvrecall.engines.vllm.connector.connector import RecallConnector
from kvrecall.engines.vllm.connector.copier import Batch, CopyQueue, Moved

PATIENCE = 3


class LateQueue(CopyQueue):
    """See the module."""

    in_step = False

    def __init__(self) -> None:
        self._waiting: deque[list[Batch | int]] = deque()
        self._completed: list[Moved] = []

    def submit(self, batch: Batch) -> None:
        self._waiting.append([batch, PATIENCE])

    def completed(self) -> list[Moved]:
        for each in self._waiting:
            each[1] -= 1  # type: ignore[operator]
        while self._waiting and self._waiting[0][1] == 0:
            self._copy()
        completed, self._completed = self._completed, []
        return completed

    def drain(self) -> None:
        while self._waiting:
            self._copy()

    def _copy(self) -> None:
        batch, _ = self._waiting.popleft()
        assert isinstance(batch, Batch)
        batch.copy_here()
        self._completed.append(Moved(batch.nbytes, 0.001))


def make_queue(_: torch.device) -> CopyQueue:
    return LateQueue()


class LateConnector(RecallConnector):
    """The real connector. Importing this module makes copies in the process late."""


if __name__ == "late_copies":  # as vLLM imports it, by the name alone
    copier.make_queue = worker.make_queue = make_queue
