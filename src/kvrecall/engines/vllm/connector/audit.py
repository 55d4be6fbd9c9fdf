"""The audit: an engine answers from a writer's blocks only once it has computed the same.

No list of what KV depends on is ever complete. Every block therefore carries its *origin*: the
writer, a number drawn when an engine starts and when its weights change, and the *generation*, the
seconds that the writer had run. A hit on blocks that are not proved is audited by its last one: the
request loads those before it, computes it and compares, before its first token leaves. If it
differs, all running requests start over. If not, the writer's blocks are proved up to the
generation compared; later ones are audited in the same way, as weights may change unseen, and so is
one in a few thousand hits on proved blocks. Of each writer whose blocks are loaded a block of its
own is compared, of no earlier generation (``_vouching``).

A block computed on loaded ones shows in each layer what the layers before it do to its tokens:

| what differs | where the last block shows it | audited by |
|---|---|---|
| weights, kernels, rope, dtype, scales of KV | in layer 0 or the next | last block |
| the last layer's output, ``lm_head`` | nowhere: KV is equal | last block |
| latents (MLA), quantised KV, a draft's layers | as in any layer | last block |
| one expert | if its tokens choose it | last 16 blocks |
| an encoder of images or sound | nowhere: prompts end in text | all blocks |
| an adapter, on for a part of the tokens | perhaps nowhere | all blocks |
| a window, which does not see early blocks | in each group's last block | last boundary |
| a recurrent state | one step later, if it was kept | all blocks |
| one row of a table; early blocks of other weights | nowhere | all blocks, later |

*All blocks*: the request computes all that is not proved; 16 from each end are compared. *Later*:
so is a chain of each writer by the next repeated audit, which waits for a moment of one request.

A hit of several KV groups serves one boundary only: it is audited by loading the one at a boundary
before. With recurrent layers a proof vouches for an hour more, or no hand-over was a hit.

Proofs are kept per namespace, and separately for prompts with images or sound. Everything here
belongs to the scheduler side and runs in its thread.
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
from kvrecall.engines.vllm.connector.hit import BlockRun, Hit, HitFinder
from kvrecall.engines.vllm.connector.metrics import Counters
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.connector.saver import Tables, block_at
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.engines.vllm.wire import ORIGIN_BYTES, Comparison, Deviation, EngineFacts
from kvrecall.pool.base import PoolClient

logger = logging.getLogger("vllm.kvrecall")
COMPARED = 16
"""Blocks compared from the start of a hit, and as many from its end."""

GENERATION_S = 1.0
"""Length of a writer's generation: what it writes later needs another audit."""

STATES_GRACE = 3600
"""Generations behind the last one proved that hits with recurrent states may load: how long they
load what a writer writes after a change of its weights that nothing noticed."""

_WRITER_BYTES = 6  # of an origin; the others are the generation
_LAST = (1 << 8 * (ORIGIN_BYTES - _WRITER_BYTES)) - 1  # a writer ends after 18 hours
_BUSY = 64  # hits for which a repeated audit is put off while other requests are in the engine
_LEASE_S = 5.0
_NOTHING = Copy((), ())


def _parts(origin: bytes) -> tuple[bytes, int]:
    """Writer and generation."""
    return origin[:_WRITER_BYTES], int.from_bytes(origin[_WRITER_BYTES:], "big")


@dataclass(slots=True)
class Belief:
    """The audit state of one namespace's writers. ``proved``: by writer, up to which generation.
    ``whole``: those of whom a chain was compared from its start. ``hits``: since the last audit."""

    proved: dict[bytes, int]
    whole: set[bytes] = field(default_factory=set)
    hits: int = 0

    def trusts(self, origin: bytes, grace: int = 0) -> bool:
        """Whether blocks of this origin are proved, or at most ``grace`` generations later."""
        writer, generation = _parts(origin)
        return writer in self.proved and generation <= self.proved[writer] + grace


@dataclass(slots=True)
class _Audit:
    """A request that computes blocks which the pool has. ``root``: vLLM's hash of its first block.

    ``starts_over``: all running requests do if they differ. ``is_whole``: they are compared from
    the chain's start. ``vouches``: for loaded blocks that are not proved: by writer, the last
    generation. ``leased``: offsets by ticket. ``left``: blocks to compare: KV group, index, offset,
    origin, and tokens up to the end of its KV. ``origins``: those of blocks whose comparison was
    ordered. ``open``: ranks yet to report one. ``is_void``: it ended before its blocks were.
    """

    request_id: str
    root: object
    namespace: Namespace
    belief: Belief
    starts_over: bool
    is_whole: bool
    vouches: dict[bytes, int]
    leased: dict[int, tuple[int, ...]] = field(default_factory=dict)
    left: list[tuple[int, int, int, bytes, int]] = field(default_factory=list)
    origins: set[bytes] = field(default_factory=set)
    open: int = 0
    is_void: bool = False
    found: Deviation = field(default_factory=Deviation)

    @property
    def is_over(self) -> bool:
        return not (self.left or self.open)


class Auditor:
    """Decides which blocks of a hit may be loaded, and what a comparison means."""

    def __init__(
        self,
        pool: PoolClient,
        facts: EngineFacts,
        every: int | None,
        counters: Counters,
        refuted: Callable[[Namespace], None],
        finder: HitFinder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``every``: hits between repeated audits; 0: none, None: every block is trusted.
        ``refuted``: called when the engine computes other KV than a namespace contains."""
        self._pool = pool
        self._facts = facts
        self._every = every
        self._counters = counters
        self._refuted = refuted
        self._finder = finder
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
        return _leading(self._origins(self._facts.chain, offsets), self._vouched(state))

    def doubts(self, state: RequestState) -> bool:
        """Whether another request has loaded blocks, not proved yet, which this one may share."""
        others = (one for one in self._audits.values() if one.request_id != state.id)
        return any(one.vouches and one.root == _root(state) for one in others)

    def admit(
        self, state: RequestState, hit: Hit, offsets: Sequence[Sequence[int]], alone: bool
    ) -> int | Hit:
        """Number of a hit's tokens that the request may load, or a shorter hit to load instead; it
        computes the others. ``offsets``: by run, of the blocks that have arrived. ``alone``: no
        other request is in the engine. Begins an audit if one is due."""
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
            comparable = origins[: min(end, len(run.whole().keys))]
            first, vouches, by = _vouching(comparable, trusted, belief, self._least(state))
            if vouches:
                by = [at for at in by if first + COMPARED <= at < end - COMPARED]
                parts = [run.part(first, end), *(run.part(at, at + 1) for at in by)]
                return first if self._begin(state, parts, vouches=vouches) else trusted
            if not self._is_under_way(belief):
                self._begin(state, [run.part(trusted, end)], is_whole=not trusted)
            return trusted
        if not self._is_due(belief, alone) or end < count:
            return count
        last = len(run.part(0, count).whole().keys)
        first = 0 if alone and self._is_new_to(belief, origins) else last - 1
        parts = [run.part(first, last)]
        began = last > 0 and self._begin(state, parts, starts_over=True, is_whole=not first)
        return first if began else count

    def _admit_groups(
        self, state: RequestState, hit: Hit, offsets: Sequence[Sequence[int]], alone: bool
    ) -> int | Hit:
        """All of the hit or none of it: its blocks serve this one boundary."""
        tokens, belief = hit.end - hit.start, self._belief(state)
        came = zip(hit.runs, offsets, strict=True)
        origins = [self._origins(run.group, blocks) for run, blocks in came]
        every = list(itertools.chain(*origins))
        grace = STATES_GRACE if self._facts.has_states else 0
        if _leading(every, belief, grace) < len(every):
            if _leading(every, self._vouched(state)) == len(every):
                return tokens
            first = not any(one.request_id == state.id for one in self._audits.values())
            if first and (earlier := self._before(state, hit, origins)):
                return earlier
            if not self._is_under_way(belief):
                self._begin(state, hit.runs, is_whole=True)
            return 0
        if not self._is_due(belief, alone):
            return tokens
        last = [run.part(len(run.keys) - 1, len(run.keys)) for run in hit.runs]
        runs, is_whole = (hit.runs, True) if self._is_new_to(belief, every) else (last, False)
        return 0 if self._begin(state, runs, starts_over=True, is_whole=is_whole) else tokens

    def _before(
        self, state: RequestState, hit: Hit, origins: Sequence[Sequence[bytes]]
    ) -> Hit | None:
        """A hit that ends earlier, if blocks of each group behind it vouch for what it loads."""
        belief, least = self._belief(state), self._least(state)
        if all(_parts(origin)[0] in belief.proved for of in origins for origin in of):
            least = 1
        limit = hit.end - least * self._facts.alignment
        if not least or self._facts.has_states or limit <= hit.start:
            return None
        earlier = self._finder.find(state, hit.start, limit).hit
        if earlier is None:
            return None
        parts, latest = [], list[dict[bytes, int]]()
        for run, of_run in zip(hit.runs, origins, strict=True):
            first = earlier.end // self._facts.groups[run.group].block_size - run.first
            first = max(0, first, len(of_run) - COMPARED)
            parts.append(run.part(first, len(of_run)))
            latest.append(dict(sorted(map(_parts, of_run[first:]))))
        common = set[bytes].intersection(*map(set, latest))
        vouches = {writer: min(each[writer] for each in latest) for writer in common}
        return earlier if vouches and self._begin(state, parts, vouches=vouches) else None

    def _least(self, state: RequestState) -> int:
        """How many last blocks show what an unknown writer computes; 0: none does."""
        is_hidden = state.has_media or state.request.lora_request is not None
        return 0 if is_hidden else COMPARED if self._facts.has_experts else 1

    def _is_new_to(self, belief: Belief, origins: Sequence[bytes]) -> bool:
        """Whether no chain of one of the writers was compared from its start."""
        return not {_parts(one)[0] for one in origins} <= belief.whole.union(self._own)

    def _is_due(self, belief: Belief, alone: bool) -> bool:
        """Counts a hit on proved blocks; whether it is to be audited."""
        belief.hits += 1
        due = self._every and belief.hits >= self._every
        return bool(due and (alone or belief.hits >= (self._every or 0) + _BUSY))

    def comparisons(
        self, request_id: str, tokens: int, tables: Callable[[], Tables]
    ) -> list[Comparison]:
        """The comparisons for the workers after this step, which completes the blocks of the first
        ``tokens`` tokens of the request. ``tables``: its device blocks."""
        orders = []
        for number, audit in list(self._audits.items()):
            if audit.request_id != request_id:
                continue
            ready = [row for row in audit.left if self._is_ready(row, tokens)]
            if ready and (audit.is_void or not self._holds(audit)):
                self._close(number)
                if audit.vouches:
                    orders.append(Comparison(number, request_id, _NOTHING, True))
                continue
            audit.left = [row for row in audit.left if row not in ready]
            for group in sorted({row[0] for row in ready}):
                of_group = (row for row in ready if row[0] == group)
                at = [(block_at(tables()[group], row[1], row[4]), row) for row in of_group]
                found = [(block, row[2], row[3]) for block, row in at if block]
                if audit.vouches and len(found) < len(at):
                    orders.append(Comparison(number, request_id, _NOTHING, True))
                if found:
                    ids, offsets, origins = zip(*found, strict=True)
                    audit.origins.update(origins)
                    copy = Copy(ids, offsets, group)
                    orders.append(Comparison(number, request_id, copy, audit.starts_over))
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

    def ended(self, request_id: str) -> bool:
        """The request is gone: what it has not computed is not compared. Whether it may have loaded
        blocks that nothing vouches for."""
        own = [one for one in self._audits.items() if one[1].request_id == request_id]
        is_void = any(audit.vouches and audit.left for _, audit in own)
        for number, audit in own:
            audit.left = []
            if audit.is_over:
                self._conclude(number)
        return is_void

    def renew(self) -> None:
        """The engine's weights have changed. What was proved before says nothing of blocks of the
        new ones, here or in other engines, so those are another writer's."""
        self._own.clear()
        self._beliefs.clear()
        self._begin_writer()
        self._drop(None)

    def forget(self, digests: set[bytes]) -> None:
        """These namespaces are not used any more."""
        for key in [key for key in self._beliefs if key[0] in digests]:
            del self._beliefs[key]
        self._drop(digests)

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

    def _vouched(self, state: RequestState) -> Belief:
        vouched = Belief(dict(self._belief(state).proved))
        own = (one for one in self._audits.values() if one.request_id == state.id)
        for writer, last in (pair for one in own for pair in one.vouches.items()):
            vouched.proved[writer] = max(last, vouched.proved.get(writer, -1))
        return vouched

    def _origins(self, group: int, offsets: Sequence[int]) -> list[bytes]:
        at = self._facts.groups[group].record_bytes
        found = self._pool.read(offsets, at, ORIGIN_BYTES)
        return found or [b""] * len(offsets)

    def _begin(
        self,
        state: RequestState,
        runs: Sequence[BlockRun],
        starts_over: bool = False,
        is_whole: bool = False,
        vouches: dict[bytes, int] | None = None,
    ) -> bool:
        """Leases these blocks, or the first and last of each run; whether the request is to compute
        them. All of them must be there if it ``vouches``."""
        assert state.namespace is not None
        belief, names, wanted = self._belief(state), (state.id, _root(state), state.namespace), 0
        audit = _Audit(*names, belief, starts_over or bool(vouches), is_whole, vouches or {})
        for run in map(self._comparable, runs):
            parts, count = [run], len(run.keys)
            if count > 2 * COMPARED:
                parts = [run.part(0, COMPARED), run.part(count - COMPARED, count)]
            for part in parts:
                wanted += len(part.keys)
                self._lease(audit, state, part)
        if len(audit.left) < (wanted if vouches else 1):
            for ticket in audit.leased:
                self._pool.release(ticket)
            return False
        belief.hits = 0
        self._audits[next(self._numbers)] = audit
        return True

    def _lease(self, audit: _Audit, state: RequestState, run: BlockRun) -> None:
        """Leases blocks to compare, as far as they are in the host: a load has brought them."""
        ticket = run.acquire(self._pool, _LEASE_S, state)
        offsets = audit.leased[ticket] = self._pool.poll(ticket).offsets
        origins = self._origins(run.group, offsets)
        size = self._facts.groups[run.group].block_size
        ends = itertools.count((run.first + 1) * size, size)
        if run.tail is not None:
            ends = itertools.count(run.tail)
        rows = zip(itertools.count(run.first), offsets, origins, ends, strict=False)
        audit.left += [(run.group, *row) for row in rows if row[2]]

    def _comparable(self, run: BlockRun) -> BlockRun:
        """The blocks of a run whose bytes are all determined. Behind KV in a tail is any."""
        is_state = self._facts.groups[run.group].kind is GroupKind.STATE
        return run if is_state else run.whole()

    def _is_under_way(self, belief: Belief) -> bool:
        """Whether a request computes all that is not proved of a hit."""
        return any(one.belief is belief and not one.starts_over for one in self._audits.values())

    def _holds(self, audit: _Audit) -> bool:
        """Whether the leased blocks are still in place: a pool service may have died since."""
        leased = audit.leased.items()
        return all(self._pool.poll(ticket).offsets == offsets for ticket, offsets in leased)

    def _close(self, number: int) -> _Audit:
        audit = self._audits.pop(number)
        for ticket in audit.leased:
            self._pool.release(ticket)
        return audit

    def _drop(self, digests: set[bytes] | None) -> None:
        for number, audit in list(self._audits.items()):
            if digests is None or audit.namespace.digest in digests:
                audit.is_void = bool(audit.vouches and audit.left)
                if not audit.is_void:
                    self._close(number)

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
        proved = audit.belief.proved
        is_new = any(_parts(origin)[0] not in proved for origin in audit.origins)
        for writer, generation in map(_parts, audit.origins):
            proved[writer] = max(generation, proved.get(writer, -1))
            audit.belief.whole.update([writer] if audit.is_whole else [])
        if is_new or audit.is_whole:
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


def _vouching(
    origins: Sequence[bytes], first: int, belief: Belief, least: int
) -> tuple[int, dict[bytes, int], list[int]]:
    """How many leading blocks, of which the ``first`` are proved, may be loaded if those behind
    them are computed; the last generation of each writer of the others; and the blocks to compare,
    which vouch for them: ``least`` of each writer (one if it was proved before; 0: such only)."""
    able: dict[bytes, list[int]] = {}  # by writer, blocks of no earlier generation than before
    latest: dict[bytes, int] = {}
    for place, (writer, generation) in enumerate(map(_parts, origins)):
        if place >= first and generation >= latest.get(writer, 0):
            latest[writer] = generation
            able.setdefault(writer, []).append(place)
    end, by = len(origins) - 1, dict[bytes, list[int]]()
    doubted = [place for place in range(first, len(origins)) if not belief.trusts(origins[place])]
    for place in doubted:
        writer, _ = _parts(origins[place])
        if place < end and writer not in by:  # of too few, as of all, the first is this one
            by[writer] = able[writer][-(1 if writer in belief.proved else least) :]
            end = min(end, by[writer][0])
    vouches: dict[bytes, int] = {}
    for writer, generation in (_parts(origins[place]) for place in doubted if place < end):
        vouches[writer] = max(generation, vouches.get(writer, 0))
    return end, vouches, [place for writer in vouches for place in by[writer]]


def _root(state: RequestState) -> object:
    return next(iter(state.request.block_hashes), None)
