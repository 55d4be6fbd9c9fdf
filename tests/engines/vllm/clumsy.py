"""An engine in which every nicety raises: a prelude of ``driver.py``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

import kvrecall.engines.vllm.connector.connector
import kvrecall.engines.vllm.serving.app  # noqa: F401 - decorates what is below, too
from kvrecall import nicety


def spared() -> Iterator[tuple[str, CellType]]:
    """The name and the function of everything that ``nicety`` decorates in what is imported."""
    gc.unfreeze()  # what is frozen is not among the objects
    for one in gc.get_objects():
        code = one.__code__ if type(one) is FunctionType else None
        if code is not None and (code.co_name, code.co_filename) == ("call", nicety.__file__):
            cells = one.__closure__ or ()
            yield one.__qualname__, cells[code.co_freevars.index("function")]


def raising(function: Callable[..., Any]) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError(f"{function.__qualname__} is clumsy")

    return fails


@contextmanager
def clumsy() -> Iterator[list[str]]:
    """All of them raise, but for the naming of blocks, without which none are pooled; gives their
    names."""
    some = ((name, cell) for name, cell in spared() if not name.endswith("._namespace"))
    found = [(name, cell, cell.cell_contents) for name, cell in some]
    for _, cell, function in found:
        cell.cell_contents = raising(function)
    try:
        yield [name for name, *_ in found]
    finally:
        for _, cell, function in found:
            cell.cell_contents = function


if __name__ == "clumsy":  # as the prelude
    _for_good = clumsy()
    _for_good.__enter__()
