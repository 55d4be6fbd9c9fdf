"""The instances behind the router: which there are, whether they answer, how busy they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvrecall.engines.base import Role


@dataclass(slots=True, eq=False)
class Instance:
    """One server. ``bit`` is its place in the masks of the prefix map.

    ``healthy`` is set by the prober, and cleared by a request that finds it gone.
    """

    url: str
    role: Role
    bit: int
    healthy: bool = False
    inflight: int = field(default=0)

    @property
    def name(self) -> str:
        """Host and port, for headers, metrics and messages."""
        return self.url.partition("://")[2]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a request of this instance."""
        self.inflight += 1
        try:
            yield
        finally:
            self.inflight -= 1


class Fleet:
    """All instances of a router, by role."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self.prefill = tuple(
            Instance(url, Role.PREFILL, 1 << place) for place, url in enumerate(prefill)
        )
        self.decode = tuple(
            Instance(url, Role.DECODE, 1 << place)
            for place, url in enumerate(decode, start=len(prefill))
        )

    @property
    def all(self) -> tuple[Instance, ...]:
        return self.prefill + self.decode

    @property
    def can_serve(self) -> bool:
        """Whether any instance answers; each of them can serve a request alone if it must."""
        return any(instance.healthy for instance in self.all)
