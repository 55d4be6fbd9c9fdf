"""Which engine requests run under the name a client gave, so that stopInfer finds them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from kvrecall.engines.base import GenerateRequest, Generator, Update


class RequestNames:
    """Names and the ids of the requests that run under them; several may share a name."""

    def __init__(self) -> None:
        self._running: dict[str, set[str]] = {}

    def running(self, name: str) -> tuple[str, ...]:
        """The requests that run under ``name``."""
        return tuple(self._running.get(name, ()))

    def begin(self, name: str, request_id: str) -> None:
        self._running.setdefault(name, set()).add(request_id)

    def end(self, name: str, request_id: str) -> None:
        ids = self._running[name]
        ids.remove(request_id)
        if not ids:
            del self._running[name]


@dataclass(frozen=True, slots=True)
class Named:
    """A generator whose requests run under ``name``; under none if it is None."""

    generator: Generator
    names: RequestNames
    name: str | None

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        """See Generator.generate."""
        updates = self.generator.generate(request)
        if self.name is not None:
            self.names.begin(self.name, request.request_id)
        try:
            async for update in updates:
                yield update
        finally:
            await updates.aclose()
            if self.name is not None:
                self.names.end(self.name, request.request_id)
