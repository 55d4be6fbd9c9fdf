"""Changes of a pool as KV events have them: runs of blocks that make one event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kvrecall.block import NAMESPACE_BYTES, BlockKey, TierName, is_tail
from kvrecall.pool.changes import Cause, Change, Removed, Restart, Stored

_MOST = 4096  # blocks of a run, which becomes one message


@dataclass(slots=True)
class Run:
    """Blocks of one namespace that entered or left a tier one after the other.

    ``hashes``: vLLM's block hashes; if ``stored``, each block is the next one's parent, and
    ``parent`` is the first one's, None at the root.
    """

    stored: bool
    tier: TierName
    namespace: bytes
    group: int
    parent: bytes | None
    hashes: list[bytes] = field(default_factory=list)
    _last: BlockKey | None = None

    def takes(self, change: Stored | Removed) -> bool:
        """Whether a change goes on with this run."""
        is_other = change.key[:NAMESPACE_BYTES] != self.namespace or change.tier != self.tier
        if is_other or len(self.hashes) >= _MOST or isinstance(change, Stored) != self.stored:
            return False
        return not isinstance(change, Stored) or change.parent == self._last

    def ownership(self, store: str | None) -> str | None:
        """Names the blocks of this namespace in the remote store ``store``: equal for all engines
        and hosts that can recall them."""
        return None if store is None else f"{store}/{self.namespace.hex()[:8]}"

    def add(self, key: BlockKey) -> None:
        self.hashes.append(key[NAMESPACE_BYTES:])
        self._last = key


def runs_of(
    changes: Iterable[Change],
    groups: Mapping[bytes, int],
    abandoned: Mapping[bytes, int] | None = None,
) -> Iterator[Run | Restart]:
    """Changes of whole blocks in these namespaces (``groups``: the KV group of each), in as few
    runs as their order allows. Blocks of ``abandoned`` namespaces are removed, wherever they
    are."""
    run: Run | None = None
    for change in changes:
        if isinstance(change, Restart):
            if run is not None:
                yield run
            run = None
            yield change
            continue
        digest = change.key[:NAMESPACE_BYTES]
        group = groups.get(digest)
        if group is None and abandoned is not None and digest in abandoned:
            group = abandoned[digest]
            change = Removed(change.tier, change.key, Cause.DROPPED)
        if group is None or is_tail(change.key):
            continue
        if run is None or not run.takes(change):
            if run is not None:
                yield run
            run = _begun(change, group)
        run.add(change.key)
    if run is not None:
        yield run


def _begun(first: Stored | Removed, group: int) -> Run:
    above = None
    if isinstance(first, Stored) and first.parent is not None:
        parent = first.parent
        if parent[:NAMESPACE_BYTES] == first.key[:NAMESPACE_BYTES]:
            above = parent[NAMESPACE_BYTES:]
    namespace = first.key[:NAMESPACE_BYTES]
    return Run(isinstance(first, Stored), first.tier, namespace, group, above)
