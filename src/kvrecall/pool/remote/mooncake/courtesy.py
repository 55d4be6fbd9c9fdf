"""When a thread that only looks whether a call has ended stands back from the processors.

While a call moves bytes, Mooncake's client looks again and again, without a pause, whether it has
ended. That takes from the threads that move the bytes, here and in other processes, the processor
they need; and a thread that never has a processor does not see the end. So a call begins at
the system's lowest priority, is raised to the ordinary one when it takes longer than such calls
take, and the next ones begin at that until there is reason to think that processors are free.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_PATIENCE = 1.5  # times what a call is expected to take
_GRACE_S = 0.01
_FORGET = 1.1  # how fast a speed that was seen once is forgotten
_FIRST_REST, _LONGEST_REST = 4, 64  # calls


class Record:
    """What calls of one direction took, and whether the next one may stand back.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._seconds_a_byte: float | None = None
        self._rest = 0
        self._next_rest = _FIRST_REST

    def limit_of(self, nbytes: int) -> float | None:
        """Seconds after which a call of ``nbytes`` that stood back is late; None: it shall not
        stand back."""
        if self._rest or self._seconds_a_byte is None:
            self._rest = max(0, self._rest - 1)
            return None
        return _PATIENCE * nbytes * self._seconds_a_byte + _GRACE_S

    def ended(self, nbytes: int, seconds: float) -> None:
        """A call moved ``nbytes``, at least one, in ``seconds`` and was not late."""
        seen = seconds / nbytes
        known = self._seconds_a_byte
        self._seconds_a_byte = seen if known is None else min(seen, _FORGET * known)

    def in_time(self) -> None:
        """A call that stood back ended before its limit."""
        self._next_rest = _FIRST_REST

    def late(self) -> None:
        """A call that stood back had to be raised: processors are wanted by others."""
        self._rest = self._next_rest
        self._next_rest = min(_LONGEST_REST, 2 * self._next_rest)


@dataclass(slots=True)
class Call:
    """A call under way. ``moved``: whether it moved all that it was to; its maker says so. One that
    did not says nothing of how long calls take."""

    moved: bool = False


class Courtesy:
    """Has the threads of calls stand back, and raises those that are late. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._changed = threading.Condition()  # guards everything below
        self._records: dict[str, Record] = {}
        self._limits: dict[int, float] = {}  # thread that stands back -> when it is late
        if may_rise():
            threading.Thread(target=self._watch, daemon=True).start()
            self._stands_back = True
        else:
            self._stands_back = False

    @contextmanager
    def call(self, way: str, nbytes: int) -> Iterator[Call]:
        """Around a call in direction ``way`` that is to move ``nbytes``, in the thread that makes
        it."""
        call = Call()
        if not self._stands_back:
            yield call
            return
        thread = threading.get_native_id()
        began = self._monotonic()
        low = self._begin(way, nbytes, thread, began)
        try:
            yield call
        finally:
            self._end(way, nbytes if call.moved else 0, thread, began, low)

    def _begin(self, way: str, nbytes: int, thread: int, began: float) -> bool:
        with self._changed:
            record = self._records.setdefault(way, Record())
            limit_s = record.limit_of(nbytes)
            if limit_s is None:
                return False
            _stand(thread, back=True)
            self._limits[thread] = began + limit_s
            self._changed.notify()
            return True

    def _end(self, way: str, nbytes: int, thread: int, began: float, low: bool) -> None:
        seconds = self._monotonic() - began
        with self._changed:
            record = self._records[way]
            if low and self._limits.pop(thread, None) is None:
                record.late()
                return
            if nbytes:
                record.ended(nbytes, seconds)
            if low:
                _stand(thread, back=False)
                record.in_time()

    def _watch(self) -> None:
        """Thread: raises who is late."""
        with self._changed:
            while True:
                now = self._monotonic()
                for thread in [t for t, limit in self._limits.items() if limit <= now]:
                    del self._limits[thread]
                    _stand(thread, back=False)
                nearest = min(self._limits.values(), default=None)
                self._changed.wait(None if nearest is None else nearest - now)


def may_rise() -> bool:
    """Whether this process may give a thread its ordinary priority back (CAP_SYS_NICE)."""
    answers: list[bool] = []

    def attempt() -> None:
        me = threading.get_native_id()
        try:
            _stand(me, back=True)
            _stand(me, back=False)
            answers.append(True)
        except (OSError, AttributeError):
            answers.append(False)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return answers[0]


def _stand(thread: int, back: bool) -> None:
    policy = os.SCHED_IDLE if back else os.SCHED_OTHER
    os.sched_setscheduler(thread, policy, os.sched_param(0))
