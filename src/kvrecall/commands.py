"""Groups of commands whose parts are imported when they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand


def add_lazily(group: typer.Typer, name: str, text: str, load: Callable[[], typer.Typer]) -> None:
    """Adds a command to ``group`` whose typer app is loaded when the command is needed. ``text``:
    its line in the group's help."""

    class Lazy(TyperCommand):
        def make_context(
            self, info_name: str | None, args: list[str], *more: Any, **extra: Any
        ) -> Any:
            return typer.main.get_command(load()).make_context(info_name, args, *more, **extra)

    @group.command(name, cls=Lazy, help=text)
    def command() -> None:
        """Never called: ``make_context`` gives the context of the loaded command."""
