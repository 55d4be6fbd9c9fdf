"""Which namespace the blocks of each request belong to."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any

from kvrecall.block import Namespace
from kvrecall.errors import ConfigError
from kvrecall.pool.base import PoolClient

logger = logging.getLogger("vllm.kvrecall")


class Spaces:
    """The engine's namespace and those its adapters make of it, each registered with the pool once.

    ``base`` is called at the first request and no earlier: the engine's hash seed is not settled
    before. ``adapter_digest``: content of a request's adapter, None if it cannot be known.
    """

    def __init__(
        self,
        pool: PoolClient,
        block_bytes: int,
        base: Callable[[], Namespace],
        adapter_digest: Callable[[Any], str | None],
    ) -> None:
        self._pool = pool
        self._block_bytes = block_bytes
        self._make_base = base
        self._adapter_digest = adapter_digest
        self._base: Namespace | None = None
        self._is_private = False
        self._registered: set[bytes] = set()
        self._refused: set[bytes] = set()  # namespaces that the pool cannot hold

    def of(self, request: Any) -> Namespace | None:
        """Namespace of a request's blocks, with its adapter's content; None: not pooled."""
        if self._base is None:
            self._base = self._next_base()
        space = self._base
        if request.lora_request is not None:
            digest = self._adapter_digest(request.lora_request)
            if digest is None:
                return None
            space = space.derive(adapter=digest)
        if space.digest not in self._registered:
            self._register(space)
        return None if space.digest in self._refused else space

    def turn_private(self) -> None:
        """From now on blocks have a namespace that nobody has had and nobody else will have."""
        self._is_private = True
        self._base = None

    def _next_base(self) -> Namespace:
        space = self._make_base()
        return space.derive(epoch=secrets.token_hex(16)) if self._is_private else space

    def _register(self, space: Namespace) -> None:
        self._registered.add(space.digest)
        try:
            self._pool.register(space, self._block_bytes)
        except ConfigError as error:  # of a service that was not there when the engine began
            logger.error("kvrecall: NOTHING IS POOLED: the pool refuses blocks: %s", error)
            self._refused.add(space.digest)
