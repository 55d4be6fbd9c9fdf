"""One door for what an engine can do without: estimates, metrics, traces, explanations, log lines.

An exception in one of them ends no engine, no step and no request: it is logged once, and the
caller gets what it would get without.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

_told: set[str] = set()


def nicety(what: str, otherwise: object = None) -> Callable[[F], F]:
    """Decorates a function that may fail without harm, in words a log line can begin with.
    ``otherwise``: its result then; or a function that gives it, with the same arguments."""

    def spared(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:  # noqa: BLE001 - whatever it is, it is logged
                _tell(what, function)
                return otherwise(*args, **kwargs) if callable(otherwise) else otherwise

        return call  # type: ignore[return-value]

    return spared


def niceties(what: str) -> Callable[[C], C]:
    """Decorates a class whose methods are all of this kind; they give None if they fail. Its
    constructor and its properties are not spared."""

    def spared(owner: C) -> C:
        for name, method in list(vars(owner).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(owner, name, nicety(what)(method))
        return owner

    return spared


def _tell(what: str, function: Callable[..., Any]) -> None:
    if what in _told:
        return
    _told.add(what)
    logging.getLogger(function.__module__).exception(
        "kvrecall: %s failed and is left out; requests are served as before, and its further "
        "failures are not logged. This is a bug in kvrecall: please report it",
        what,
    )
