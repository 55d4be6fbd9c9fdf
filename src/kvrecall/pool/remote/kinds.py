"""The kinds of stores, by name, and how a store is made from its settings."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import cast

from kvrecall.errors import ConfigError
from kvrecall.pool.remote.store import Store

KINDS = {
    "mooncake": "kvrecall.pool.remote.mooncake:make_store",
    "objects": "kvrecall.pool.remote.objects:make_store",
}
"""``module:function`` of each kind. A function takes the options of ``remote`` but ``kind``, and
returns the store without waiting for anything; ConfigError if an option is wrong."""


def make_store(kind: str, options: Mapping[str, object]) -> Store:
    """The store of a kind, or of ``package.module:Factory``. Raises ConfigError."""
    path = KINDS.get(kind, kind)
    module_name, colon, factory_name = path.partition(":")
    if not (colon and module_name and factory_name):
        known = ", ".join(KINDS)
        raise ConfigError(f"remote: kind is {kind!r}; allowed: {known}, or package.module:Factory")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"remote: kind {kind!r}: cannot import {module_name}: {error}") from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        raise ConfigError(f"remote: kind {kind!r}: {module_name} has no {factory_name}")
    try:
        return cast(Callable[[Mapping[str, object]], Store], factory)(options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"remote: kind {kind!r} does not take these options: {error}") from error
