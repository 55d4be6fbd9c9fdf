"""KV cache events of the pool's tiers, for vLLM's event publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvrecall.engines.vllm.compat import events
from kvrecall.nicety import nicety
from kvrecall.pool.changes import Change, ChangeLog, Restart
from kvrecall.pool.pool import Pool
from kvrecall.pool.runs import runs_of


class PoolEvents:
    """Turns changes of an engine's own pool into vLLM's events. Called from the engine's thread.

    Publishes only blocks that this engine can recall: whole blocks of its namespaces. What the pool
    held before is published once the first namespace is known, some of it with each step, and again
    after vLLM has published ``AllBlocksCleared`` for the device alone. When a namespace becomes
    known or is abandoned, its blocks alone are published, as stored or removed. If more changes
    come between two steps than the log keeps, everything is void and published again.
    """

    def __init__(
        self,
        pool: Pool,
        live: Callable[[], Mapping[bytes, int]],
        device_cleared: Callable[[], bool],
    ) -> None:
        """``live``: the KV group of each namespace whose blocks the engine can recall now.
        ``device_cleared``: whether vLLM has published a clear since the last call."""
        self._pool = pool
        self._live = live
        self._device_cleared = device_cleared
        self._groups: dict[bytes, int] = {}
        self._abandoned: dict[bytes, int] = {}  # groups of namespaces that were live
        self._log: ChangeLog | None = None

    @nicety("the publishing of KV events", lambda _: [])
    def take(self) -> list[Any]:
        """Events since the last call, in order."""
        live = self._live()
        if self._log is None:
            if not live:
                return []
            self._log = ChangeLog(self._pool.sweep)
            self._pool.watch(self._log)
        elif self._groups != live:
            self._abandoned |= {d: n for d, n in self._groups.items() if d not in live}
            self._log.repeat({digest for digest, _ in self._groups.items() ^ live.items()})
        if self._device_cleared():
            self._log.repeat()
        self._groups = dict(live)
        return to_events(self._log.take(), self._groups, self._abandoned, self._pool.store_name)


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
