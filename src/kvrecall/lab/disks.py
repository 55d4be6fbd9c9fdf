"""A disk of a given bandwidth."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvrecall.pool.disk.slabs import FileIo


class ThrottledIo(FileIo):
    """A disk that reads ``bytes_per_s`` (0: as fast as it can), all readers together. After
    ``slow_after`` more bytes it reads ``then_bytes_per_s``. May be changed while in use."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self.then_bytes_per_s = 0.0
        self.slow_after: int | None = None
        self._one = threading.Lock()

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = super().read(fd, buffers, offset)
        with self._one:
            self._take_time(got)
        return got

    def _take_time(self, nbytes: int) -> None:
        if self.slow_after is not None:
            self.slow_after -= nbytes
            if self.slow_after < 0:
                self.bytes_per_s, self.slow_after = self.then_bytes_per_s, None
        left, at = float(nbytes), time.monotonic()
        while self.bytes_per_s and left > 0:
            time.sleep(min(0.01, left / self.bytes_per_s))
            now = time.monotonic()
            left, at = left - (now - at) * self.bytes_per_s, now
