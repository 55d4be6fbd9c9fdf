"""The audit: an engine loads a writer's blocks only after it has seen that it computes the same.

No list of what KV depends on is ever complete. Every block therefore carries its *origin*: the
writer, a number drawn when an engine starts and when its weights change, and the *generation*, the
seconds that the writer had run. An engine computes the first hit on another writer's blocks and
then compares them. That proves the writer's blocks up to the generation compared. Weights may
change unseen, so a hit on later ones is audited as well, by the newest of them: the request loads
those before it, computes it, and starts over if it differs. In the same way one in a few thousand
hits on proved blocks is checked again.

Where a hit serves one boundary only (several KV groups), all of it is computed for an audit; there
a proof vouches for an hour more.

Proofs are kept per namespace, and separately for prompts with images or sound, which take other
paths through a model. Everything here belongs to the scheduler side and runs in its thread.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrecall.block import Namespace
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.connector.hit import BlockRun, Hit
from kvrecall.engines.vllm.connector.metrics import Counters
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.connector.saver import Tables, block_at
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.engines.vllm.wire import (
    ORIGIN_BYTES,
    Comparison,
    Deviation,
    EngineFacts,
)
from kvrecall.pool.base import PoolClient, RecallState

logger = logging.getLogger("vllm.kvrecall")

COMPARED = 16
"""Blocks compared from the start of a hit, and as many from its end."""

GENERATION_S = 1.0
"""Length of a writer's generation: what it writes later than that after the last block compared
needs another audit."""

GROUPS_GRACE = 3600
"""Generations behind the last one proved that hits of several KV groups may load: how long they may
load what a writer writes after a change of its weights that nothing noticed."""

_WRITER_BYTES = 6  # of an origin; the others are the generation
_LAST = (1 << 8 * (ORIGIN_BYTES - _WRITER_BYTES)) - 1  # a writer ends after 18 hours
_BUSY = 64  # hits for which a repeated audit is put off while other requests are in the engine
_LEASE_S = 5.0


Origin = tuple[bytes, int]
"""Writer and generation."""


def _parts(origin: bytes) -> Origin:
    return origin[:_WRITER_BYTES], int.from_bytes(origin[_WRITER_BYTES:], "big")


@dataclass(slots=True)
class Belief:
    """The audit state of one namespace's writers. ``proved``: by writer, up to which generation.
    ``hits``: on proved blocks, since the last audit."""

    proved: dict[bytes, int]
    hits: int = 0

    def trusts(self, origin: bytes, grace: int = 0) -> bool:
        """Whether blocks of this origin are proved, or at most ``grace`` generations later."""
        writer, generation = _parts(origin)
        return writer in self.proved and generation <= self.proved[writer] + grace


@dataclass(slots=True)
class _Audit:
    """A request that computes blocks which the pool has.

    ``repeated``: it has loaded those before them, and starts over if they differ. ``vouches``: the
    writer and the last generation of loaded blocks that are not proved. ``leased``: offsets by
    ticket. ``awaited``: tickets of blocks being promoted to the host, with their runs. ``left``:
    blocks to compare: KV group, index, offset, origin, and tokens up to the end of its KV.
    ``origins``: those of blocks whose comparison was ordered. ``open``: number of ranks that
    have not reported a comparison yet.
    """

    request_id: str
    namespace: Namespace
    belief: Belief
    repeated: bool
    awaited: dict[int, BlockRun]
    vouches: Origin | None = None
    leased: dict[int, tuple[int, ...]] = field(default_factory=dict)
    left: list[tuple[int, int, int, bytes, int]] = field(default_factory=list)
    origins: set[bytes] = field(default_factory=set)
    open: int = 0
    found: Deviation = field(default_factory=Deviation)

    @property
    def is_over(self) -> bool:
        """Whether no further block will be compared."""
        return not (self.awaited or self.left or self.open)


class Auditor:
    """Decides which blocks of a hit may be loaded, and what a comparison means."""

    def __init__(
        self,
        pool: PoolClient,
        facts: EngineFacts,
        every: int | None,
        counters: Counters,
        refuted: Callable[[Namespace], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``every``: hits between repeated audits; 0: none, None: every block is trusted.
        ``refuted``: called when the engine computes other KV than a namespace contains."""
        self._pool = pool
        self._facts = facts
        self._every = every
        self._counters = counters
        self._refuted = refuted
        self._clock = clock
        self._beliefs: dict[tuple[bytes, bool], Belief] = {}
        self._own: list[bytes] = []
        self._begin_writer()
        self._audits: dict[int, _Audit] = {}
        self._numbers = itertools.count()

    def origin(self) -> bytes:
        """The origin of blocks that are written now."""
        generation = int((self._clock() - self._since) / GENERATION_S)
        if generation > _LAST:
            self._begin_writer()
            generation = 0
        return self._own[-1] + generation.to_bytes(ORIGIN_BYTES - _WRITER_BYTES, "big")

    def trusted(self, state: RequestState, offsets: Sequence[int]) -> int:
        """Number of these leased blocks of the chain, from the first on, that the request may read:
        they are proved, or an audit of the request vouches for them."""
        if self._every is None or not offsets or state.namespace is None:
            return 0 if state.namespace is None else len(offsets)
        belief = self._belief(state)
        vouched = Belief(dict(belief.proved))
        for audit in self._audits.values():
            if audit.vouches and audit.request_id == state.id and audit.belief is belief:
                vouched.proved.update([audit.vouches])
        return _leading(self._origins(self._facts.chain, offsets), vouched)

    def admit(
        self, state: RequestState, hit: Hit, offsets: Sequence[Sequence[int]], alone: bool
    ) -> int:
        """Number of a hit's tokens that the request may load; it computes the others. ``offsets``:
        by run, of the blocks that have arrived. ``alone``: no other request is in the engine.
        Begins an audit if one is due."""
        if state.namespace is None:
            return 0
        if self._every is None:
            return hit.tokens(len(offsets[0])) if hit.is_chain else hit.end - hit.start
        if hit.is_chain:
            return hit.tokens(self._admit_chain(state, hit.chain, offsets[0], alone))
        return self._admit_groups(state, hit, offsets, alone)

    def _admit_chain(
        self, state: RequestState, run: BlockRun, offsets: Sequence[int], alone: bool
    ) -> int:
        count, belief = len(offsets), self._belief(state)
        origins = self._origins(self._facts.chain, offsets)
        trusted = _leading(origins, belief)
        end = min(count, max(0, self._facts.exact_blocks - run.first))
        if trusted < count:
            newest = _vouching(origins[: min(end, len(run.whole().keys))], trusted, belief)
            if newest is not None:
                vouches = _parts(origins[newest])
                if self._begin(state, [run.part(newest, end)], repeated=True, vouches=vouches):
                    return newest
            elif not self._is_under_way(belief):
                self._begin(state, [run.part(trusted, end)], repeated=False)
            return trusted
        if not self._is_due(belief, alone) or end < count:
            return count
        last = len(run.part(0, count).whole().keys)
        began = last > 0 and self._begin(state, [run.part(last - 1, last)], repeated=True)
        return last - 1 if began else count

    def _admit_groups(
        self, state: RequestState, hit: Hit, offsets: Sequence[Sequence[int]], alone: bool
    ) -> int:
        """All of the hit or none of it: its blocks serve this one boundary."""
        tokens, belief = hit.end - hit.start, self._belief(state)
        came = zip(hit.runs, offsets, strict=True)
        origins = [one for run, blocks in came for one in self._origins(run.group, blocks)]
        if _leading(origins, belief, GROUPS_GRACE) < len(origins):
            if not self._is_under_way(belief):
                self._begin(state, hit.runs, repeated=False)
            return 0
        if not self._is_due(belief, alone):
            return tokens
        last = [run.part(len(run.keys) - 1, len(run.keys)) for run in hit.runs]
        return 0 if self._begin(state, last, repeated=True) else tokens

    def _is_due(self, belief: Belief, alone: bool) -> bool:
        """Counts a hit on proved blocks; whether it is to be audited."""
        belief.hits += 1
        due = self._every and belief.hits >= self._every
        return bool(due and (alone or belief.hits >= (self._every or 0) + _BUSY))

    def declined(self, state: RequestState, hit: Hit) -> None:
        """The request computes blocks that the pool has, because loading them takes longer. While
        no other writer is proved they are compared as well. Short prefixes thus pay for the proof,
        and the first long one is loaded."""
        if self._every is None or state.namespace is None:
            return
        belief = self._belief(state)
        if len(belief.proved) == len(self._own) and not self._is_under_way(belief):
            most = min(COMPARED, self._facts.exact_blocks - hit.chain.first)
            runs = [run.part(0, most) for run in hit.runs]
            self._begin(state, runs, repeated=False)

    def comparisons(
        self, request_id: str, tokens: int, tables: Callable[[], Tables]
    ) -> list[Comparison]:
        """The comparisons for the workers after this step, which completes the blocks of the first
        ``tokens`` tokens of the request. ``tables``: its device blocks."""
        orders = []
        for number, audit in list(self._audits.items()):
            if audit.request_id != request_id:
                continue
            self._take_arrived(audit)
            ready = [row for row in audit.left if self._is_ready(row, tokens)]
            if not ready:
                if audit.is_over:
                    self._conclude(number)
                continue
            if not self._holds(audit):
                self._close(number)
                continue
            audit.left = [row for row in audit.left if not self._is_ready(row, tokens)]
            found = tables()
            for group in sorted({row[0] for row in ready}):
                of_group = (row for row in ready if row[0] == group)
                at = [(block_at(found[group], row[1], row[4]), row) for row in of_group]
                rows = [(block, row[2]) for block, row in at if block]
                if rows:
                    audit.origins |= {row[3] for block, row in at if block}
                    copy = Copy(tuple(row[0] for row in rows), tuple(row[1] for row in rows), group)
                    orders.append(Comparison(number, request_id, copy, audit.repeated))
                    audit.open += self._facts.ranks
            if audit.is_over:
                self._conclude(number)
        return orders

    def _is_ready(self, row: tuple[int, int, int, bytes, int], tokens: int) -> bool:
        """Whether a block to compare is there after a step that computes up to ``tokens``. A state
        inside a block is there one step later, when vLLM has put it aside."""
        is_inside = row[4] % self._facts.groups[row[0]].block_size != 0
        return row[4] < tokens if is_inside else row[4] <= tokens

    def audited(self) -> set[str]:
        """Requests whose blocks are being compared."""
        return {audit.request_id for audit in self._audits.values()}

    def compared(self, number: int, ranks: int, found: Deviation) -> None:
        """``ranks`` more have compared what one order named."""
        audit = self._audits.get(number)
        if audit is None:
            return
        audit.open -= ranks
        audit.found = audit.found.plus(found)
        if audit.is_over or not (audit.open or found.within):
            self._conclude(number)

    def ended(self, request_id: str) -> None:
        """The request is gone: blocks that it has not computed are not compared."""
        for number, audit in list(self._audits.items()):
            if audit.request_id == request_id:
                for ticket in audit.awaited:
                    self._pool.release(ticket)
                audit.awaited, audit.left = {}, []
                if audit.is_over:
                    self._conclude(number)

    def renew(self) -> None:
        """The engine's weights have changed. What was proved before says nothing of blocks of the
        new ones, here or in other engines, so those are another writer's."""
        self._own.clear()
        self._beliefs.clear()
        self._begin_writer()
        for number in list(self._audits):
            self._close(number)

    def forget(self, digests: set[bytes]) -> None:
        """These namespaces are not used any more."""
        for key in [key for key in self._beliefs if key[0] in digests]:
            del self._beliefs[key]
        for number, audit in list(self._audits.items()):
            if audit.namespace.digest in digests:
                self._close(number)

    # ---- within --------------------------------------------------------------------------

    def _begin_writer(self) -> None:
        self._own.append(secrets.token_bytes(_WRITER_BYTES))
        self._since = self._clock()
        for belief in self._beliefs.values():
            belief.proved[self._own[-1]] = _LAST

    def _belief(self, state: RequestState) -> Belief:
        assert state.namespace is not None
        key = state.namespace.digest, state.has_media
        belief = self._beliefs.get(key)
        if belief is None:
            belief = self._beliefs[key] = Belief(dict.fromkeys(self._own, _LAST))
        return belief

    def _origins(self, group: int, offsets: Sequence[int]) -> list[bytes]:
        at = self._facts.groups[group].record_bytes
        found = self._pool.read(offsets, at, ORIGIN_BYTES)
        return found or [b""] * len(offsets)

    def _begin(
        self,
        state: RequestState,
        runs: Sequence[BlockRun],
        repeated: bool,
        vouches: Origin | None = None,
    ) -> bool:
        """Leases the blocks of these runs, or the first and last of each. Returns whether the
        request is to compute them for an audit."""
        assert state.namespace is not None
        awaited: dict[int, BlockRun] = {}
        for run in map(self._comparable, runs):
            count = len(run.keys)
            parts = [run]
            if count > 2 * COMPARED:
                parts = [run.part(0, COMPARED), run.part(count - COMPARED, count)]
            for part in parts:
                if part.keys:
                    awaited[part.acquire(self._pool, _LEASE_S, state)] = part
        belief = self._belief(state)
        request_id = state.request.request_id
        audit = _Audit(request_id, state.namespace, belief, repeated, awaited, vouches)
        self._take_arrived(audit)
        if not (audit.left or audit.awaited):
            for ticket in audit.leased:
                self._pool.release(ticket)
            return False
        belief.hits = 0
        self._audits[next(self._numbers)] = audit
        return True

    def _comparable(self, run: BlockRun) -> BlockRun:
        """The blocks of a run whose bytes are all determined. Behind the KV of a tail there may be
        any; a state has nothing behind it."""
        is_state = self._facts.groups[run.group].kind is GroupKind.STATE
        return run if is_state else run.whole()

    def _is_under_way(self, belief: Belief) -> bool:
        """Whether a request computes all that is not proved of a hit."""
        return any(one.belief is belief and not one.repeated for one in self._audits.values())

    def _take_arrived(self, audit: _Audit) -> None:
        """Records which of the promoted blocks have arrived in the host."""
        for ticket, run in list(audit.awaited.items()):
            recall = self._pool.poll(ticket)
            if recall.state is RecallState.PENDING:
                continue
            del audit.awaited[ticket]
            audit.leased[ticket] = recall.offsets
            origins = self._origins(run.group, recall.offsets)
            size = self._facts.groups[run.group].block_size
            ends = itertools.count((run.first + 1) * size, size)
            if run.tail is not None:
                ends = itertools.count(run.tail)
            rows = zip(itertools.count(run.first), recall.offsets, origins, ends, strict=False)
            audit.left += [(run.group, *row) for row in rows if row[2]]

    def _holds(self, audit: _Audit) -> bool:
        """Whether the leased blocks are still in place: a pool service may have died since."""
        leased = audit.leased.items()
        return all(self._pool.poll(ticket).offsets == offsets for ticket, offsets in leased)

    def _close(self, number: int) -> _Audit:
        audit = self._audits.pop(number)
        for ticket in (*audit.awaited, *audit.leased):
            self._pool.release(ticket)
        return audit

    def _conclude(self, number: int) -> None:
        audit = self._close(number)
        total = audit.found
        if not total.blocks:
            return
        self._counters.counts["audits"] += 1
        if total.within:
            self._prove(audit, total)
            return
        self._counters.counts["audits_failed"] += 1
        logger.error(
            "kvrecall: AUDIT FAILED: the KV that this engine computes differs from the pool's "
            "under namespace %s: %d of %d blocks differ (request %s, origins %s), most in "
            "layer %s: relative deviation %.2g, %.1f times the bound for rounding. "
            "The namespace lacks something that KV depends on; please report both engines' "
            "settings. From now on this engine neither reads nor writes that namespace: "
            "its blocks are private to this process",
            audit.namespace.digest.hex(),
            total.unequal,
            total.blocks,
            audit.request_id,
            ", ".join(sorted(one.hex() for one in audit.origins)),
            total.layer,
            total.relative,
            total.times,
        )
        self._refuted(audit.namespace)

    def _prove(self, audit: _Audit, total: Deviation) -> None:
        belief = audit.belief
        is_new = any(_parts(origin)[0] not in belief.proved for origin in audit.origins)
        for writer, generation in map(_parts, audit.origins):
            belief.proved[writer] = max(generation, belief.proved.get(writer, -1))
        if is_new or not audit.repeated:
            logger.info(
                "kvrecall: audit passed: this engine computes the same KV as the pool "
                "contains under %s: %d blocks compared, %d of them bit-identical, the "
                "others within rounding (%.2f of the bound, in layer %s)",
                audit.namespace.digest.hex(),
                total.blocks,
                total.blocks - total.unequal,
                total.times,
                total.layer or "none",
            )


def _leading(origins: Sequence[bytes], belief: Belief, grace: int = 0) -> int:
    """Number of blocks before the first one that is not believed."""
    doubted = {one for one in set(origins) if not belief.trusts(one, grace)}
    return next((i for i, one in enumerate(origins) if one in doubted), len(origins))


def _vouching(origins: Sequence[bytes], first: int, belief: Belief) -> int | None:
    """The last block that, once compared, proves all blocks before it, of which the ``first`` are
    proved: they are of its writer, which was proved before, and no later."""
    latest: dict[bytes, int] = {}
    found = None
    for place, origin in enumerate(origins[first:], first):
        if belief.trusts(origin):
            continue
        writer, generation = _parts(origin)
        if writer not in belief.proved:
            break
        if latest.keys() <= {writer} and generation >= latest.get(writer, 0):
            found = place
        latest[writer] = max(generation, latest.get(writer, 0))
    return found
