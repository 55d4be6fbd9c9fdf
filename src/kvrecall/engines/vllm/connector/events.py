"""The connector's KV cache events, for vLLM's event publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kvrecall.engines.vllm.compat import events
from kvrecall.pool.changes import Change, ChangeLog, Restart
from kvrecall.pool.pool import Pool
from kvrecall.pool.runs import runs_of

_SWEPT = 64  # blocks named once more in a step


class EngineEvents:
    """The events that vLLM does not make itself. Called from the engine's thread.

    - Changes of the engine's own pool.
    - Everything that device and pool hold, again and again, a few blocks with each step, so often
      that the batches which vLLM's publisher can repeat always name all of it: a reader that begins
      late, or has lost more than they reach back to, knows everything when it has read them.

    A repetition takes at most three eighths of these batches, and the next one begins a quarter
    after its end. With more blocks than that allows, 240,000 by default, a reader must wait for the
    rest of the repetition.
    """

    def __init__(
        self, device: events.DeviceBlocks, batches: int, pool: PoolEvents | None = None
    ) -> None:
        """``batches``: how many the publisher can repeat. ``pool``: None with a pool service."""
        self._device = device
        self._pool = pool
        self._rest = max(1, batches // 4)
        self._steps = 0  # since the last repetition ended
        self._sweep: Iterator[list[Any]] | None = None

    def take(self) -> list[Any]:
        """Events of one step, in order."""
        cleared = self._device.were_cleared()
        made, restarted = ([], False) if self._pool is None else self._pool.take(cleared)
        if restarted:
            self._sweep = self._device.sweep(_SWEPT)
        if self._pool is not None and not self._pool.is_swept:
            return made
        if self._sweep is not None:
            held = next(self._sweep, None)
            if held is not None:
                return made + held
            self._sweep = None
        self._steps += 1
        if self._steps >= self._rest:
            self._steps = 0
            self._sweep = self._device.sweep(_SWEPT)
            if self._pool is not None:
                self._pool.repeat()
        return made


class PoolEvents:
    """Turns changes of an engine's own pool into vLLM's events.

    Publishes only blocks that this engine can recall: whole blocks of its namespaces. What the pool
    held before is published once the first namespace is known, some of it with each step, and again
    after vLLM has published ``AllBlocksCleared`` for the device alone. If more changes come between
    two steps than the log keeps, everything is void and published again.
    """

    def __init__(self, pool: Pool, live: Callable[[], Mapping[bytes, int]]) -> None:
        """``live``: the KV group of each namespace whose blocks the engine can recall now."""
        self._pool = pool
        self._live = live
        self._groups: dict[bytes, int] = {}
        self._abandoned: dict[bytes, int] = {}  # groups of namespaces that were live
        self._log: ChangeLog | None = None

    def take(self, device_cleared: bool) -> tuple[list[Any], bool]:
        """Events since the last call, in order, and whether they void the device's blocks.
        ``device_cleared``: vLLM has voided the pool's since."""
        live = self._live()
        if self._log is None:
            if not live:
                return [], False
            self._log = ChangeLog(self._pool.sweep, swept=_SWEPT)
            self._pool.watch(self._log)
        elif self._groups != live:
            self._abandoned |= {d: n for d, n in self._groups.items() if d not in live}
            self._log.repeat()
        if device_cleared:
            self._log.repeat()
        self._groups = dict(live)
        restarts = self._log.restarts
        changes = self._log.take()
        made = to_events(changes, self._groups, self._abandoned, self._pool.store_name)
        return made, self._log.restarts > restarts

    @property
    def is_swept(self) -> bool:
        """Whether all that the pool holds has been published since the last time it had to be."""
        return self._log is None or self._log.is_swept

    def repeat(self) -> None:
        """All that the pool holds is published once more."""
        if self._log is not None:
            self._log.repeat()


def to_events(
    changes: Iterable[Change],
    groups: Mapping[bytes, int],
    abandoned: Mapping[bytes, int],
    store: str | None = None,
) -> list[Any]:
    """vLLM's events for changes of blocks in these namespaces, with as few events as their order
    allows: a chain stored in one tier is one event, and so are removals that follow each other.
    ``store``: names the remote store."""
    made: list[Any] = []
    for run in runs_of(changes, groups, abandoned):
        if isinstance(run, Restart):
            made.append(events.cleared())
        elif run.stored:
            made.append(events.stored(run, run.ownership(store)))
        else:
            made.append(events.removed(run, run.ownership(store)))
    return made
