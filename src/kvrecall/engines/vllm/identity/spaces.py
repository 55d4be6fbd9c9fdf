"""Which namespace the blocks of each request belong to."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from kvrecall.block import Namespace
from kvrecall.errors import ConfigError
from kvrecall.pool.base import PoolClient

logger = logging.getLogger("vllm.kvrecall")


class AdapterIdentity(Protocol):
    """Tells adapters apart by their content."""

    def is_known(self, lora_request: Any) -> bool:
        """Whether ``identity`` can be told by now; does not wait."""

    def identity(self, lora_request: Any) -> str | None:
        """Of the adapter's content; None if it cannot be known."""


class Spaces:
    """The engine's namespace and those its adapters make of it, each registered with the pool once.

    ``base`` is called at the first request and no earlier: the engine's hash seed is not settled
    before. It returns None until the fingerprint of the weights is known.
    """

    def __init__(
        self,
        pool: PoolClient,
        block_bytes: int,
        base: Callable[[], Namespace | None],
        adapters: AdapterIdentity,
    ) -> None:
        self._pool = pool
        self._block_bytes = block_bytes
        self._make_base = base
        self._adapters = adapters
        self._base: Namespace | None = None
        self._is_private = False
        self._distrusted: set[bytes] = set()  # of adapters, before their epoch
        self._epoch = secrets.token_hex(16)
        self._registered: set[bytes] = set()
        self._refused: set[bytes] = set()  # namespaces that the pool cannot hold
        self._told = False

    def is_settled(self, request: Any) -> bool:
        """Whether it is known by now whose blocks a request's are. Does not wait."""
        if self._base is None:
            self._base = self._next_base()
        known = self._base is not None and (
            request.lora_request is None or self._adapters.is_known(request.lora_request)
        )
        if not known and not self._told:
            self._told = True
            logger.warning(
                "kvrecall: requests are computed without the pool until the fingerprint of the "
                "weights is known; only the first start with them takes that long"
            )
        return known

    def of(self, request: Any) -> Namespace | None:
        """Namespace of a request's blocks, with its adapter's content; None: not pooled. For a
        request that ``is_settled``."""
        assert self._base is not None
        space = self._base
        if request.lora_request is not None:
            identity = self._adapters.identity(request.lora_request)
            if identity is None:
                return None
            space = space.derive(adapter=identity)
            if space.digest in self._distrusted:
                space = space.derive(epoch=self._epoch)
        if space.digest not in self._registered:
            self._register(space)
        return None if space.digest in self._refused else space

    def turn_private(self) -> None:
        """From now on blocks have a namespace that nobody has had and nobody else will have."""
        self._is_private = True
        self._epoch = secrets.token_hex(16)
        self._base = None

    def distrust(self, space: Namespace) -> set[bytes]:
        """Nothing of that namespace is used any more: an adapter's blocks turn private, or those of
        the engine and all adapters. Returns the digests of the namespaces that are given up."""
        if self._base is not None and space.digest != self._base.digest:
            self._distrusted.add(space.digest)
            return {space.digest}
        self.turn_private()
        return set(self._registered)

    def _next_base(self) -> Namespace | None:
        space = self._make_base()
        if space is None or not self._is_private:
            return space
        return space.derive(epoch=self._epoch)

    def _register(self, space: Namespace) -> None:
        self._registered.add(space.digest)
        try:
            self._pool.register(space, self._block_bytes)
        except ConfigError as error:  # of a service that was not there when the engine began
            logger.error("kvrecall: NOTHING IS POOLED: the pool refuses blocks: %s", error)
            self._refused.add(space.digest)
