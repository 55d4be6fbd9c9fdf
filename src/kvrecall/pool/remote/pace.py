"""How much to hand to a store in one call."""

from __future__ import annotations

_FIRST = 8 << 20  # bytes, before the store's speed is known
_LEAST, _MOST = 256 << 10, 64 << 20
_LATENCIES = 4  # a call shall last so many times what the store takes to answer at all
_FORGET = 1.2  # how fast a latency that was short once is forgotten


class Pace:
    """Bytes of blocks for one call: what the store moves in ``turn_s`` seconds.

    So blocks arrive one after the other instead of all at the end: who waits for them sees that
    they come. A distant store gets more at once, so that its distance is paid for a few times
    only, and none gets more than it moves in ``limit_s``. Owner: one lane; its threads may call
    it at the same time.
    """

    def __init__(self, turn_s: float, limit_s: float) -> None:
        self._turn_s = turn_s
        self._limit_s = limit_s
        self._latency_s: float | None = None
        self.nbytes = _FIRST

    def answered(self, seconds: float) -> None:
        """The store took ``seconds`` for a question, which moves no blocks."""
        known = self._latency_s
        self._latency_s = seconds if known is None else min(seconds, _FORGET * known)

    def moved(self, nbytes: int, seconds: float) -> None:
        """A call moved ``nbytes`` of blocks; ``seconds`` from handing it over to its end."""
        if nbytes:
            turn_s = max(self._turn_s, _LATENCIES * (self._latency_s or 0.0))
            fitting = int(nbytes / max(seconds, 1e-6) * min(turn_s, self._limit_s))
            self.nbytes = max(_LEAST, min(_MOST, 2 * self.nbytes, fitting))
