"""What the options of ``kvrecall simulate`` name: tiers and traces, read with progress."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvrecall.config import format_size, parse_size
from kvrecall.errors import ConfigError
from kvrecall.simulate.replay import TierSpec
from kvrecall.simulate.trace import Trace, read_trace
from kvrecall.simulate.workload import WORKLOAD_HOURS, make_workload

SYNTHETIC = "synthetic:"


def parse_tiers(
    capacity: str, capacity_blocks: str, tiers: str, block_bytes: int
) -> tuple[TierSpec, ...]:
    """Tiers of ``--capacity SIZE``, ``--capacity-blocks N`` or ``--tiers NAME:SIZE,...``. Raises
    ConfigError unless exactly one is given."""
    if sum(map(bool, (capacity, capacity_blocks, tiers))) != 1:
        raise ConfigError(
            "give one of --capacity SIZE, --capacity-blocks N and --tiers host:SIZE,disk:SIZE"
        )
    if capacity:
        return (TierSpec("host", _blocks_in(capacity, "--capacity", block_bytes)),)
    if capacity_blocks:
        return (TierSpec("host", _blocks(capacity_blocks, "--capacity-blocks")),)
    specs: list[TierSpec] = []
    for item in tiers.split(","):
        name, colon, amount = (part.strip() for part in item.partition(":"))
        if not colon or not name:
            raise ConfigError(f"--tiers: {item!r} is not NAME:SIZE, for example host:64GiB")
        if any(name == spec.name for spec in specs):
            raise ConfigError(f"--tiers: {name!r} is named twice")
        specs.append(TierSpec(name, _amount(amount, f"--tiers: {name}", block_bytes)))
    return tuple(specs)


def block_size(text: str) -> int:
    """Bytes of ``--block-bytes``, 0 without it. Raises ConfigError."""
    size = parse_size(text, "--block-bytes", 1) if text else 0
    if text and size <= 0:
        raise ConfigError(f"--block-bytes: {text!r} must be more than 0")
    return size


def store_of(text: str, block_bytes: int) -> TierSpec | None:
    """The store of ``--store SIZE``, or in blocks; None without it. Raises ConfigError."""
    return TierSpec("store", _amount(text, "--store", block_bytes)) if text else None


def _amount(text: str, name: str, block_bytes: int) -> int:
    """Blocks of a size, or of a number of blocks."""
    is_count = re.fullmatch(r"[-\d]*", text) is not None
    return _blocks(text, name) if is_count else _blocks_in(text, name, block_bytes)


def _blocks(text: str, name: str) -> int:
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > 15 or int(digits) == 0:
        raise ConfigError(f"{name}: {text!r} is not a number of blocks; it must be 1 or more")
    return int(digits)


def _blocks_in(text: str, name: str, block_bytes: int) -> int:
    nbytes = parse_size(text, name)
    if not block_bytes:
        raise ConfigError(
            f"{name}: {text!r} is a size, but the size of a block depends on the model: add "
            "--block-bytes, the KV of 512 tokens, which `kvrecall plan MODEL` prints"
        )
    if nbytes < block_bytes:
        raise ConfigError(f"{name}: {text!r} is smaller than a block ({format_size(block_bytes)})")
    return nbytes // block_bytes


def load_trace(trace: str, hints: str = "none", hours: float | None = None) -> Trace:
    """The trace of that file or ``synthetic:NAME``, with a progress bar on stderr. ``hints``: what
    the clients of a workload say. ``hours``: of a workload, how much of it. Raises ConfigError."""
    if trace.startswith(SYNTHETIC):
        name = trace.removeprefix(SYNTHETIC)
        return make_workload(name, hours=WORKLOAD_HOURS if hours is None else hours, hints=hints)
    if hours is not None:
        raise ConfigError(f"--hours: {hours:g}, but a file is replayed whole; leave out --hours")
    if hints != "none":
        raise ConfigError(f"--hints: {hints!r}, but a file has no hints; --workload agents has")
    path = Path(trace)
    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    with progress_bar("reading", size) as advance:
        return read_trace(path, advance)


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with each finished part of ``total``; shows a progress bar if stderr is a
    terminal."""
    console = Console(stderr=True)
    done = shown = 0
    columns = TextColumn(title), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=total)

        def advance(part: int = 1) -> None:
            nonlocal done, shown
            done += part
            if done - shown >= total >> 8:
                shown = done
                bar.update(task, completed=done)

        yield advance
