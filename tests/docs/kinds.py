"""How it is known that a documented command works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .stage import Stage


@dataclass(frozen=True, slots=True)
class Runs:
    """Every documented line of it is run as it stands, but for paths, ports and sizes.

    ``swaps``: parts of the line, and what stands for them here. ``more``: options that are added,
    to keep it small. ``before``, ``after``: what makes the files it needs, what looks at those it
    made. ``says``: part of its output. ``stays``: part of what a server says when it is up; it is
    ended with the page, in order. ``silent``: it prints nothing. ``needs``: a module
    without which it is left out, as set-up goes on without it.
    """

    swaps: tuple[tuple[str, str], ...] = ()
    more: str = ""
    before: Callable[[Stage], None] | None = None
    after: Callable[[Stage], None] | None = None
    says: str = ""
    stays: str = ""
    silent: bool = False
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another test runs it by its command line: ``text`` is where, in the file ``test``."""

    test: str
    text: str


@dataclass(frozen=True, slots=True)
class Needs:
    """What no CI machine has. The command's section says so, in one of these ``words``."""

    what: str
    words: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class ByItself:
    """It is what CI does: ``text`` is in the file ``script``."""

    script: str
    text: str


Kind = Runs | Elsewhere | Needs | ByItself
