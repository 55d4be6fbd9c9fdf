"""The KV events of a pool's changes, for a publisher."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvrecall.events.wire import Event, Hash, events_of, short_hash
from kvrecall.pool.changes import MOST_CHANGES, ChangeLog
from kvrecall.pool.pool import Pool


class PoolEvents:
    """Turns changes of a pool into KV events. Used by one thread.

    Publishes only whole blocks of live namespaces. What the pool held before is published once the
    first namespace is known, some of it with each call. When a namespace becomes live or is
    abandoned, its blocks alone are published, as stored or removed. If more changes come between
    two calls than the log keeps, everything is void and published again.
    """

    def __init__(
        self, pool: Pool, live: Callable[[], Mapping[bytes, int]], most: int = MOST_CHANGES
    ) -> None:
        """``live``: the KV group of each namespace whose blocks can be recalled now. ``most``:
        changes that are kept from one call to the next."""
        self._pool = pool
        self._live = live
        self._most = most
        self._groups: dict[bytes, int] = {}
        self._abandoned: dict[bytes, int] = {}  # groups of namespaces that were live
        self._log: ChangeLog | None = None

    def take(
        self, repeat: bool = False, hash_of: Callable[[bytes], Hash] = short_hash
    ) -> list[Event]:
        """Events since the last call, in order. ``repeat``: all blocks are reported once more.
        ``hash_of``: a hash as it is published."""
        live = self._live()
        if self._log is None:
            if not live:
                return []
            self._log = ChangeLog(self._pool.sweep, self._most)
            self._pool.watch(self._log)
        elif self._groups != live:
            self._abandoned |= {d: n for d, n in self._groups.items() if d not in live}
            self._log.repeat({digest for digest, _ in self._groups.items() ^ live.items()})
        if repeat:
            self._log.repeat()
        self._groups = dict(live)
        changes = self._log.take()
        return events_of(changes, self._groups, self._abandoned, self._pool.store_name, hash_of)

    @property
    def is_complete(self) -> bool:
        """Whether ``take`` has returned all that the pool held and all changes since."""
        return self._log is None or self._log.is_complete
