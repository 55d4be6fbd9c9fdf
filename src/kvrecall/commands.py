"""What commands share: groups that import their parts when they are called, and a progress bar."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Json = Annotated[bool, typer.Option("--json", help="Print only JSON, including errors.")]
_LONG_S = 1.0

OnProgress = Callable[[int, int], None]
"""Called with the work done and the total work."""


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


def take_options(command: Callable[..., None], options: Mapping[str, tuple[Any, Any]]) -> None:
    """Has typer give ``command``, a function of any keyword arguments, these: by name, the
    annotation of each and its default."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, keyword, default=default, annotation=kind)
            for name, (kind, default) in options.items()
        ]
    )
    command.__annotations__ = {name: kind for name, (kind, _) in options.items()}


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[OnProgress]:
    """On standard error, if that is a terminal: a bar, once it takes longer than a second."""
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    console = Console(stderr=True, emoji=False)
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(title.replace("[", r"\["), total=None)
    timer = threading.Timer(_LONG_S, bar.start)
    timer.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()  # it is started or never will be
        bar.stop()


@contextlib.contextmanager
def steps(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with each finished part of ``total``, however small."""
    done, total = 0, max(1, total)
    with progress_bar(title) as show:

        def advance(part: int = 1) -> None:
            nonlocal done
            before, done = done, done + part
            if (done << 8) // total > (before << 8) // total:
                show(done, total)

        yield advance
