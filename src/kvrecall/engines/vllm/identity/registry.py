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
    """Identifies adapters by their content."""

    def is_known(self, lora_request: Any) -> bool:
        """Whether ``identity`` is known by now; does not wait."""

    def identity(self, lora_request: Any) -> str | None:
        """Of the adapter's content; None if it cannot be known."""


class NamespaceRegistry:
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
        self._warned = False

    def is_settled(self, request: Any) -> bool:
        """Whether it is known by now whose blocks a request's are. Does not wait."""
        if self._base is None:
            self._base = self._next_base()
        known = self._base is not None and (
            request.lora_request is None or self._adapters.is_known(request.lora_request)
        )
        if not known and not self._warned:
            self._warned = True
            logger.warning(
                "kvrecall: requests are computed without the pool until the fingerprint of the "
                "weights is known; only the first start with them takes that long"
            )
        return known

    def of(self, request: Any) -> Namespace | None:
        """Namespace of a request's blocks, with its adapter's content; None: not pooled. For a
        request that ``is_settled``."""
        assert self._base is not None
        namespace = self._base
        if request.lora_request is not None:
            identity = self._adapters.identity(request.lora_request)
            if identity is None:
                return None
            namespace = namespace.derive(adapter=identity)
            if namespace.digest in self._distrusted:
                namespace = namespace.derive(epoch=self._epoch)
        if namespace.digest not in self._registered:
            self._register(namespace)
        return None if namespace.digest in self._refused else namespace

    def turn_private(self) -> None:
        """From now on blocks have a namespace that no other engine has had or will have."""
        self._is_private = True
        self._epoch = secrets.token_hex(16)
        self._base = None

    def distrust(self, namespace: Namespace) -> set[bytes]:
        """Gives that namespace up: an adapter's blocks turn private, or those of the engine and all
        adapters. Returns the digests of all that are given up."""
        if self._base is not None and namespace.digest != self._base.digest:
            self._distrusted.add(namespace.digest)
            return {namespace.digest}
        self.turn_private()
        return set(self._registered)

    def _next_base(self) -> Namespace | None:
        namespace = self._make_base()
        if namespace is None or not self._is_private:
            return namespace
        return namespace.derive(epoch=self._epoch)

    def _register(self, namespace: Namespace) -> None:
        self._registered.add(namespace.digest)
        try:
            self._pool.register(namespace, self._block_bytes)
        except ConfigError as error:  # of a service that was not there when the engine began
            logger.error("kvrecall: NOTHING IS POOLED: the pool refuses blocks: %s", error)
            self._refused.add(namespace.digest)
