"""A store beyond the host, as a peer of the simulated machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrecall.pool.remote.store import Object
from kvrecall_lab.faults.machine import Machine

TROUBLES = ("throttles", "late", "loses", "truncates", "misdirects", "lies", "deaf", "mute")


@dataclass(slots=True)
class Peer:
    """What other hosts see, too: it outlives the machine."""

    values: dict[str, bytes]
    trouble: str = ""
    share: float = 0.5  # of calls, or values, that have the trouble


class SimulatedStore:
    """See ``Store``. ``late``: answers after the tier's deadline, and still writes what was asked
    for; ``truncates``: a value is cut off, and called whole; ``lies``: what is not there is, and
    nothing is brought. Of the link, ``deaf``: puts do not reach it, and it is read; ``mute``: it
    does what is asked, and its answers do not arrive."""

    exposed = ""

    def __init__(self, machine: Machine, peer: Peer) -> None:
        self._machine, self._peer = machine, peer
        self.faults = 0

    def _has(self, trouble: str) -> bool:
        peer = self._peer
        hits = peer.trouble == trouble and self._machine.chance.random() < peer.share
        self.faults += hits
        return hits

    def _call(self) -> None:
        self._machine.sleep(self._machine.chance.random() * 0.02)
        if self._has("late"):
            self._machine.sleep(30.0)
        if self._has("throttles"):
            raise OSError("503 Slow Down")

    def _answer(self, answer: list[bool]) -> list[bool]:
        if self._has("mute"):
            self._machine.sleep(self._machine.chance.choice((0.1, 10.0)))
            raise TimeoutError("no answer")
        return [one or self._has("lies") for one in answer]

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._call()
        return self._answer([name in self._peer.values for name in names])

    def put(self, objects: Sequence[Object]) -> list[bool]:
        self._call()
        if self._has("deaf"):
            raise ConnectionResetError("reset by peer")
        for item in objects:
            value = b"".join(item.parts)
            if self._has("truncates"):
                value = value[: self._machine.chance.randrange(len(value))]
            if not self._has("loses"):
                self._peer.values.setdefault(item.name, value)
        return self._answer([True] * len(objects))

    def get(self, objects: Sequence[Object]) -> list[bool]:
        self._call()
        return self._answer([self._get(item) for item in objects])

    def _get(self, item: Object) -> bool:
        values = self._peer.values
        if self._has("loses"):
            values.pop(item.name, None)
        name = item.name
        if values and self._has("misdirects"):
            name = self._machine.chance.choice(sorted(values))
        value = values.get(name)
        if value is None or (len(value) != item.nbytes and self._peer.trouble != "truncates"):
            return False
        for part in item.parts:
            piece, value = value[: len(part)], value[len(part) :]
            part[: len(piece)] = piece
        return True

    def remove(self, names: Sequence[str]) -> None:
        self._call()
        for name in names:
            self._peer.values.pop(name, None)

    def close(self) -> None:
        pass
