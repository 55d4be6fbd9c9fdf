"""The ways of testing a documented command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .stage import Stage


@dataclass(frozen=True, slots=True)
class Runs:
    """Every documented line of the command is run unchanged, except paths, ports and sizes.

    ``swaps``: parts of the line and their replacements. ``more``: added options that keep it small.
    ``before``: makes the files it needs; ``after``: checks those it made. ``says``: part of its
    output. ``stays``: part of a server's output when it is up; it is stopped at the end of the
    page. ``silent``: it prints nothing. ``needs``: a module without which it is skipped, because
    set-up does not require it.
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
    """The command needs what no CI machine has. Its section says so, in one of these ``words``."""

    what: str
    words: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class ByItself:
    """CI itself runs it: ``text`` is in the file ``script``."""

    script: str
    text: str


Kind = Runs | Elsewhere | Needs | ByItself
