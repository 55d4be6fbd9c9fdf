"""KV cache events of the pool's tiers, for vLLM's event publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvrecall.block import NAMESPACE_BYTES, BlockKey, TierName, is_tail
from kvrecall.engines.vllm.compat import events
from kvrecall.pool.changes import Cause, Change, ChangeLog, Removed, Restart, Stored
from kvrecall.pool.pool import Pool


class PoolEvents:
    """Turns changes of an engine's own pool into vLLM's events. Called from the engine's thread.

    Publishes only blocks that this engine can recall: whole blocks of its namespaces. What the pool
    held before is published once the first namespace is known, some of it with each step, and again
    after vLLM has published ``AllBlocksCleared`` for the device alone. If more changes come between
    two steps than the log keeps, everything is void and published again.
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
            self._log.repeat()
        if self._device_cleared():
            self._log.repeat()
        self._groups = dict(live)
        return to_events(self._log.take(), self._groups, self._abandoned)


def to_events(
    changes: Iterable[Change], groups: Mapping[bytes, int], abandoned: Mapping[bytes, int]
) -> list[Any]:
    """vLLM's events for changes of blocks in these namespaces, with as few events as their order
    allows: a chain stored in one tier is one event, and so are removals that follow each other.
    Blocks of abandoned namespaces are removed, wherever they are."""
    made: list[Any] = []
    run: _Run | None = None
    for change in changes:
        if isinstance(change, Restart):
            if run is not None:
                made.append(run.event())
            run = None
            made.append(events.cleared())
            continue
        digest = change.key[:NAMESPACE_BYTES]
        group = groups.get(digest)
        if group is None and digest in abandoned:
            group = abandoned[digest]
            change = Removed(change.tier, change.key, Cause.DROPPED)
        if group is None or is_tail(change.key):
            continue
        if run is None or not run.takes(change, group):
            if run is not None:
                made.append(run.event())
            run = _Run(change, group)
        run.add(change.key)
    if run is not None:
        made.append(run.event())
    return made


class _Run:
    """Changes that make one event."""

    def __init__(self, first: Change, group: int) -> None:
        assert not isinstance(first, Restart)
        self._first = first
        self._group = group
        self._last: BlockKey | None = None
        self._hashes: list[bytes] = []

    def takes(self, change: Change, group: int) -> bool:
        assert not isinstance(change, Restart)
        first = self._first
        if type(change) is not type(first) or group != self._group or change.tier != first.tier:
            return False
        return not isinstance(change, Stored) or change.parent == self._last

    def add(self, key: BlockKey) -> None:
        self._hashes.append(key[NAMESPACE_BYTES:])
        self._last = key

    def event(self) -> Any:
        first = self._first
        tier: TierName = first.tier
        if not isinstance(first, Stored):
            return events.removed(tier, self._group, self._hashes)
        parent = first.parent
        same = parent is not None and parent[:NAMESPACE_BYTES] == first.key[:NAMESPACE_BYTES]
        above = parent[NAMESPACE_BYTES:] if parent is not None and same else None
        return events.stored(tier, self._group, above, self._hashes)
