"""What is made by name, or by ``package.module:Factory``: remote stores, vector indexes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvrecall.errors import ConfigError


def factory_of(
    setting: str,
    name: str,
    known: Mapping[str, str],
    allowed: Sequence[str] = (),
    extras: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """Imports what makes the thing called ``name``. Raises ConfigError.

    ``known``: the ``module:Factory`` behind each name; ``allowed``: names that the caller knows
    beside them; ``extras``: the optional part of kvrecall that brings what a name needs, for the
    cure in the error.
    """
    module_name, colon, attribute = known.get(name, name).partition(":")
    if not (colon and module_name and attribute):
        names = ", ".join((*allowed, *known))
        raise ConfigError(f"{setting} is {name!r}; allowed: {names}, or package.module:Factory")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        extra = (extras or {}).get(name)
        cure = f" (pip install 'kvrecall[{extra}]')" if extra else ""
        raise ConfigError(
            f"{setting} is {name!r}: cannot import {module_name}: {error}{cure}"
        ) from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigError(f"{setting} is {name!r}: {module_name} has no {attribute}")
    return factory  # type: ignore[no-any-return]
