"""What of vLLM's is not vLLM's any more in this process."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import kvrecall

_SOURCE = str(Path(kvrecall.__file__).parent)


def _function(value: Any) -> Any:
    """What is called, inside what Python wraps around it."""
    while True:
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, property):
            value = value.fget
        else:
            return value


def _is_ours(value: Any) -> bool:
    """Whether a function or a class is kvrecall's. ``functools.wraps`` hides neither."""
    value = _function(value)
    if isinstance(value, FunctionType):
        return value.__code__.co_filename.startswith(_SOURCE)
    return isinstance(value, type) and value.__module__.split(".")[0] == "kvrecall"


def _patch(value: Any) -> str | None:
    """Not by ``getattr``: what a module holds may make attributes of any name."""
    mark = getattr(_function(value), "__dict__", {}).get("kvrecall_patch")
    return mark if isinstance(mark, str) else None


def replaced() -> dict[str, str | None]:
    """The attributes of vLLM's modules and classes, as far as they are loaded, that are kvrecall's
    or hold something of it, with the patch of the table that did it, if any."""
    found: dict[str, str | None] = {}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.split(".")[0] != "vllm":
            continue
        for place, name, value in _attributes(module):
            patch = _patch(value)
            held = value.values() if isinstance(value, dict) else ()
            held = value if isinstance(value, list | tuple | set) else held
            if patch or _is_ours(value) or any(map(_is_ours, list(held))):
                found[f"{place}.{name}"] = patch
    return found


def _attributes(module: ModuleType) -> Iterator[tuple[str, str, Any]]:
    for name, value in list(vars(module).items()):
        yield module.__name__, name, value
        if isinstance(value, type) and value.__module__ == module.__name__:
            place = f"{module.__name__}:{value.__qualname__}"
            yield from ((place, inner, one) for inner, one in list(vars(value).items()))
