"""The scheduler side: decides what to recall and what to save. Never touches KV bytes.

It runs inside the engine's scheduling step, so it makes only pool calls that return at once;
promotions from disk are polled. The one exception is a setting: with ``async_write``
off, the step that ends a request waits (bounded) until its blocks are durable.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from kvrecall.block import BlockKey, Namespace, TierName, tenant_of
from kvrecall.config import RecallSettings
from kvrecall.engines.base import MISSED, REPORT, UNIT, Reason
from kvrecall.engines.vllm.attention.offload_scheduler import OffloadPlanner
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.compat.scheduler import boundary_states, fail_loads
from kvrecall.engines.vllm.connector.audit import Auditor
from kvrecall.engines.vllm.connector.hit import FirstNeeded, Hit, HitFinder
from kvrecall.engines.vllm.connector.load import PrefixLoad
from kvrecall.engines.vllm.connector.metrics import Tally
from kvrecall.engines.vllm.connector.miss import MissExplainer
from kvrecall.engines.vllm.connector.pages import Copy
from kvrecall.engines.vllm.connector.request import (
    LOOK_EVERY_S,
    Cut,
    Handover,
    LoadCostModel,
    Promise,
    RequestState,
    TailHash,
    hint_of_request,
    pool_id,
    receipt,
    request_of,
)
from kvrecall.engines.vllm.connector.saver import Computed, Reachable, Saver, Tables
from kvrecall.engines.vllm.connector.traces import Traces
from kvrecall.engines.vllm.connector.wire import (
    Comparison,
    EngineFacts,
    Load,
    StepOrders,
    StepReport,
)
from kvrecall.engines.vllm.identity.changes import LoadedAdapter
from kvrecall.engines.vllm.identity.namespace import Adapters, NamespaceRegistry
from kvrecall.pool.base import ArenaHandle, PoolClient

logger = logging.getLogger("vllm.kvrecall")

RoomFor = Callable[[Any, int, Iterable[Any]], bool]

_FINISHED_WHOLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
_ABORTED = "FINISHED_ABORTED"
_MOST_INCOMPLETE = 2  # loads after which a request is computed
_HINTED = 256  # requests of several sequences whose hint was told
_NOTHING = 0, False
_ASK_AGAIN = None, False


class RecallScheduler:
    """Scheduler side of the connector for one engine. Called from the engine's thread only."""

    def __init__(
        self,
        pool: PoolClient,
        settings: RecallSettings,
        facts: EngineFacts,
        namespace: Callable[[], Namespace | None],
        adapters: Adapters,
        tables: Callable[[str], Sequence[Sequence[int]]],
        first_needed: FirstNeeded = lambda group, tokens: 0,
        reachable: Reachable = lambda request, group, start, stop: None,
        room_for: RoomFor = lambda request, tokens, others: True,
        tail_hash: TailHash | None = None,
        uncache: Callable[[set[int]], None] = lambda block_ids: None,
        part_ways: Callable[[Iterable[Any]], None] = lambda requests: None,
        reloaded: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``namespace`` and ``adapters`` as of ``NamespaceRegistry``. ``tables``: the device blocks
        of a request by KV group, in order; 0 for one that is no longer there. ``first_needed`` as
        of ``HitFinder``, ``reachable`` as of ``Saver``; ``room_for`` and ``tail_hash``: see
        ``compat.scheduler``, and ``part_ways``. ``uncache``: takes device blocks out of vLLM's
        prefix cache. ``reloaded``: called when the workers' model has loaded weights by itself.
        ``clock``: seconds."""
        self._pool = pool
        self._settings = settings
        self._facts = facts
        self._tables = tables
        self._clock = clock
        self._record_bytes = tuple(group.record_bytes for group in facts.groups)
        self._states: dict[str, RequestState] = {}
        self._loading: dict[str, PrefixLoad] = {}  # of requests that may have ended since
        self._waiting: dict[str, Any] = {}  # requests that hold device blocks and have not run yet
        self._awake: dict[str, RequestState] = {}  # all but those that rest
        self._resting: dict[int, list[str]] = {}  # by the tick that wakes them; some woke before
        self._ticks = 0
        self._hinted: deque[int] = deque(maxlen=_HINTED)
        self._room_for = room_for
        self._tail_hash = tail_hash
        self._uncache = uncache
        self._part_ways = part_ways
        self._reloaded = reloaded
        self._has_mixtures = False
        self._loads: list[Load] = []
        self._releases: list[str] = []
        self._warned_of_foreign = False
        self.tally = Tally(clock)
        self.is_busy = False  # whether the last step computed anything
        self.offloader: OffloadPlanner | None = None  # where retrieval attention is on
        self.traces: Traces | None = None  # where a traces endpoint is set
        groups = [(str(group.group), group.block_bytes) for group in facts.groups]
        self.namespaces = NamespaceRegistry(pool, groups, namespace, adapters)
        self.costs = LoadCostModel(
            facts.block_size,
            facts.block_bytes,
            settings.pool.load_deadline_s,
            facts.least_token_seconds,
            clock,
        )
        self._finder = HitFinder(pool, facts, first_needed)
        self._auditor = Auditor(pool, facts, settings.audit_every, self.tally, self._refuted, clock)
        self.misses = MissExplainer(pool, facts, self.tally, settings.explain_misses, self._states)
        self._saver = Saver(pool, facts, self._finder, reachable, self._auditor.origin, self.tally)

    # ---- recall -------------------------------------------------------------------------

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that the pool can add to ``computed_tokens``; None while blocks are on their way.
        At least one token is left to compute, and a hit ends where one on the device can, so a
        recalled prefix is cut exactly like a hit on the device; except with a ``match_unit`` of the
        pool's own, see ``docs/models.md``."""
        state = self._state(request)
        self._wake(state)
        if state.trace is not None:
            state.trace.taken()
        if request.num_preemptions == 0:
            state.device_tokens = computed_tokens
        if not self._facts.recalls or state.namespace is None or state.computes:
            return _NOTHING
        if request.skip_reading_prefix_cache:
            return _NOTHING
        alignment = self._facts.alignment
        start = computed_tokens // alignment * alignment
        if state.load is not None and state.load.hit.start != start:
            self._drop_load(state)
        if state.load is None:
            unit = self._facts.unit
            limit = int(request.num_tokens - 1) // unit * unit
            if self._awaits_promise(state, start, limit):
                return _ASK_AGAIN
            is_pending = self._begin_load(state, start, limit)
            if state.load is None:
                return _ASK_AGAIN if is_pending else _NOTHING
        load = state.load
        is_new = load.offsets is None
        if not load.poll():
            return _ASK_AGAIN
        self.tally.counts["loads_given_up"] += is_new and load.given_up
        if is_new and state.trace is not None:
            state.trace.loaded(load, self._settings.pool.load_deadline_s)
        if is_new and (missing := load.missing) is not None:
            reason = Reason.LATE if load.was_late else None
            at, (key, tier) = load.hit.start + load.tokens, missing
            state.cut = Cut(at, reason, {"tier": tier}, key)
        if not load.tokens and self._may_retry(state, load):
            self._drop_load(state)
            return _ASK_AGAIN
        if is_new and load.tokens:
            assert load.offsets is not None
            alone = len(self._states) == 1
            admitted = self._auditor.admit(state, load.hit, load.offsets, alone)
            if admitted < load.tokens:
                state.cut = Cut(load.hit.start + admitted, Reason.AUDIT, {})
            load.cut(admitted)
        if not load.tokens:
            self._drop_load(state)
            state.computes = True
            return _NOTHING
        if not load.hit.is_chain and self._waiting:
            others = [one for one in self._waiting.values() if one is not request]
            if others and not self._room_for(request, start + load.tokens, others):
                return _ASK_AGAIN
        if self.offloader is not None:
            size = self._facts.block_size
            end = -(-(start + load.tokens) // size)
            self.offloader.expect(request.request_id, start // size, end)
        return load.tokens, True

    def _may_retry(self, state: RequestState, load: PrefixLoad) -> bool:
        """Whether to look for a shorter hit, because a block of one that needs all of them did not
        arrive. The pool knows by now that it is lost."""
        if load.hit.is_chain or load.given_up:
            return False
        state.incomplete_loads += 1
        return state.incomplete_loads <= _MOST_INCOMPLETE

    def _awaits_promise(self, state: RequestState, start: int, limit: int) -> bool:
        """Whether promised blocks are not in the pool yet and may still arrive."""
        promise = state.promise
        if promise is None or promise.is_over:
            return False
        end = min(promise.tokens, limit)

        def found() -> int:
            hit, _ = self._finder.find(state, start, end)
            return 0 if hit is None else hit.end - start

        outcome = promise.look(end - start, found)
        self.tally.counts["handovers_late"] += outcome is Handover.LATE
        if state.trace is not None:
            state.trace.waited(outcome, end - start)
        return outcome is Handover.WAIT

    def _is_hinted(self, state: RequestState) -> bool:
        """Whether another sequence of the request, or the prefill instance over the same pool,
        brought its hint: this is the same use of the prompt, not its return."""
        promise = state.promise
        if promise is not None and promise.hinted == pool_id(self._pool.arena_handle()):
            return True
        name = request_of(state.request.request_id)
        if name == state.request.request_id:
            return False
        number = hash(name)  # names may be long
        if number in self._hinted:
            return True
        self._hinted.append(number)
        return False

    def _begin_load(self, state: RequestState, start: int, limit: int) -> bool:
        """Acquires the blocks of the longest hit between ``start`` and ``limit``, as far as loading
        is expected to be faster than computing. True if a tier beyond this host has not answered
        yet."""
        if not state.touched:
            ending = self._finder.ending(state, limit)
            hint, is_invalid = hint_of_request(state.request)
            self.tally.counts["hints_invalid"] += is_invalid
            keys = state.keys(limit // self._facts.block_size)
            state.hinted = hint is not None
            if hint is None or not self._is_hinted(state):
                self._pool.touch(keys, ending=ending, hint=hint, tenant=state.tenant)
            state.touched = True
        now = self._clock()
        if now < state.next_lookup_at:
            return True
        hit, is_pending = self._finder.find(state, start, limit)
        if state.trace is not None:
            size = self._facts.block_size
            state.trace.looked(now, -(-(limit - start) // size), hit, is_pending)
        if is_pending:
            if state.first_lookup_at is None:
                state.first_lookup_at = now
            left_s = state.first_lookup_at + self._settings.pool.lookup_deadline_s - now
            if left_s > 0:
                state.next_lookup_at = now + min(left_s, LOOK_EVERY_S)
                return True
            end = start if hit is None else hit.end
            state.cut = Cut(end, Reason.LATE, {"tier": TierName.REMOTE, "cause": "lookup"})
        if hit is None:
            return False
        deadline = self._settings.pool.load_deadline_s
        patience = deadline
        if self._settings.appraise_loads and state.promise is None:
            appraised = self._appraise(state, hit)
            if appraised is None:
                return False
            hit, patience = appraised
        self._finder.used(hit)
        state.load = PrefixLoad(self._pool, self.costs, hit, self.costs.mark(), patience)
        state.load.acquire(deadline, state)
        if state.trace is not None:
            state.trace.acquired(state.load)
        return False

    def _appraise(self, state: RequestState, hit: Hit) -> tuple[Hit, float] | None:
        """The part of a hit that loads faster than it computes, and the patience for it; None if
        there is none."""
        size = self._facts.block_size
        blocks, tokens = hit.blocks, hit.end - hit.start
        tiers, weight = hit.chain.tiers, 1.0
        if not hit.is_chain:
            worst = max((tier for run in hit.runs for tier in run.tiers), key=list(TierName).index)
            tiers = tiers if len(tiers) == blocks else (worst,) * blocks
            weight = sum(run.weight * len(run.keys) for run in hit.runs) / max(1, blocks)
        last = (tokens - hit.tokens(blocks - 1)) / size
        plan = self.costs.plan(tiers, hit.start // size, weight, last)
        shorter: Hit | None = None
        if plan.blocks == blocks:
            shorter = hit
        elif plan.blocks and hit.is_chain:
            shorter = hit.cut(plan.blocks)
        elif plan.blocks:
            end = hit.start + hit.tokens(plan.blocks)
            shorter, _ = self._finder.find(state, hit.start, end)
        declined = blocks - (0 if shorter is None else shorter.blocks)
        self.tally.counts["blocks_declined"] += declined
        if state.trace is not None:
            state.trace.declined(declined)
        if shorter is not hit:
            end = hit.start if shorter is None else shorter.end
            seconds = {"load_s": round(plan.load_s, 6), "compute_s": round(plan.compute_s, 6)}
            state.cut = Cut(end, Reason.DECLINED, seconds)
        if shorter is None:
            self._auditor.declined(state, hit)
            return None
        return shorter, plan.patience_s

    def _drop_load(self, state: RequestState) -> None:
        if state.load is not None:
            if state.trace is not None and state.load.offsets is None:
                state.trace.loaded(state.load, self._settings.pool.load_deadline_s)
            state.load.release()
            state.load = None
            if self.offloader is not None:
                self.offloader.unexpect(state.request.request_id)

    def allocated(
        self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """The engine gave the request device blocks; ``external_tokens`` are to be loaded."""
        state = self._state(request)
        if external_tokens == 0:
            self._drop_load(state)
            return
        load = state.load
        assert load is not None
        copies = self._copies(load, block_ids, external_tokens)
        self._loads.append(Load(request.request_id, copies))
        if state.trace is not None:
            state.trace.copies(copies)
        for copy in copies:
            kind = self._facts.groups[copy.group].kind
            self.tally.counts[f"{kind}:loaded_blocks"] += len(copy.block_ids)
        self._loading[request.request_id], state.load = load, None
        self._waiting[request.request_id] = request
        if request.num_preemptions == 0:
            state.recalled = load.tokens_by_tier(external_tokens)
        self._report_sources(state)

    def _copies(
        self, load: PrefixLoad, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> tuple[Copy, ...]:
        """The copies of a load; none if the device blocks are not those that it needs."""
        assert load.offsets is not None
        copies = []
        if load.hit.is_chain:
            load.cut(external_tokens)
        elif external_tokens != load.tokens:
            return ()
        for run, offsets in zip(load.hit.runs, load.offsets, strict=True):
            ids = block_ids[run.group][run.first : run.first + len(offsets)]
            rows = [row for row in zip(ids, offsets, strict=False) if row[0] != 0]
            # Of one chain, blocks that have no place on the device stay in the arena.
            if len(rows) < len(offsets) and not load.hit.is_chain:
                return ()
            ours = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
            copies.append(Copy(*ours, run.group))
        return tuple(copies)

    def _report_sources(self, state: RequestState) -> None:
        if not state.reported:
            state.reported = True
            self.misses.begin(state)
            self.tally.splits[state.request.request_id] = {
                **state.sources(),
                "unit": self._facts.unit,
            }

    def sources(self, request: Any) -> dict[TierName, int]:
        """Tokens of the request's load by tier."""
        return dict(self._state(request).recalled)

    def trusted(self, state: RequestState, offsets: Sequence[int]) -> int:
        """Number of these leased blocks of a request, from the first on, that may be read."""
        return self._auditor.trusted(state, offsets)

    # ---- a step -------------------------------------------------------------------------

    def orders(self, scheduler_output: Any, arena: ArenaHandle) -> StepOrders:
        """This step's work for the workers."""
        scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
        offered = boundary_states(scheduler_output)
        comparisons: list[Comparison] = []
        computed: list[Computed] = []
        decoding: list[Computed] = []
        prompt_tokens = positions = 0
        waiting, has_states = self._waiting, self._facts.has_states
        if not scheduled or not self.misses.has_aside:
            self.misses.settle(not scheduled)
        has_tails = self._facts.match_unit is not None
        for state in self._due(scheduled, scheduler_output.total_num_scheduled_tokens, offered):
            request = state.request
            request_id = request.request_id
            if waiting:
                waiting.pop(request_id, None)
            if not state.settled:
                self._settle(state)
            tokens, first = scheduled[request_id], request.num_computed_tokens
            if not state.reported:
                state.device_tokens = first  # vLLM may have settled for another hit than it showed
                self._report_sources(state)
            final = min(first + tokens, request.num_tokens)
            states = offered.get(request_id, ()) if offered else ()
            tails = self._tails(request, final, states) if has_tails else ()
            tables = (
                functools.partial(self._tables_of, request_id, states)
                if has_states
                else functools.partial(self._tables, request_id)
            )
            one = Computed(state, final, tables, tails=tails)
            computed.append(one)
            count = request.num_prompt_tokens - first
            if count > 0:
                count = min(tokens, count)
                prompt_tokens += count
                positions += count * first + count * count // 2
            elif state.settled:
                decoding.append(one)
        if self.traces is not None:
            self.traces.computes(
                (one.state.trace, scheduled[one.state.request.request_id]) for one in computed
            )
        if computed:
            self._saver.save(computed)
            audited = self._auditor.audited()
            for one in computed if audited else ():
                request_id = one.state.request.request_id
                if request_id in audited:
                    comparisons += self._auditor.comparisons(request_id, one.tokens, one.tables)
            for one in decoding:
                if one.state.request.request_id not in audited:
                    self._rest(one)
        self.is_busy = bool(scheduled)
        depth = positions // prompt_tokens if prompt_tokens else 0
        timed = self.costs.step_begins(self.is_busy, prompt_tokens, depth)
        orders = StepOrders(
            arena,
            self._loads,
            self._saver.take(),
            self._releases,
            self._saver.must_precede(),
            comparisons,
            self._record_bytes,
            timed=timed,
            computes=self.is_busy,
        )
        if self.offloader is not None:
            orders.offload = self.offloader.orders(scheduled, self._chain_blocks, arena)
        self._loads, self._releases = [], []
        return orders

    def _due(
        self, scheduled: Mapping[str, int], tokens: int, offered: Collection[str]
    ) -> list[RequestState]:
        """The requests of a step of so many ``tokens`` that have work for this side: those that are
        new or compute their prompt, complete a block or offer a state. Most of the others decode
        within a block, and there may be hundreds of them in every step: they rest, and cost nothing
        before the tick at which they may complete it. In each step as many ticks pass as the
        fastest of them has tokens."""
        states, awake, now = self._states, self._awake, self._ticks
        if len(awake) <= len(scheduled):
            due = [state for request_id, state in awake.items() if request_id in scheduled]
        else:
            due = [awake[request_id] for request_id in scheduled if request_id in awake]
        for state in due:
            tokens -= scheduled[state.request.request_id]
        if tokens <= len(scheduled) - len(due):
            self._ticks = now + 1
        else:
            self._ticks += max(count for one, count in scheduled.items() if one not in awake)
        for tick in range(now + 1, self._ticks + 1):
            for request_id in self._resting.pop(tick, ()):
                rested = states.get(request_id)
                if rested is not None and rested.rests_until == tick:
                    rested.rests_until = 0
                    awake[request_id] = rested
                    due += [rested] if request_id in scheduled else []
        for request_id in offered:
            rested = states.get(request_id)
            if rested is not None and rested.rests_until:
                self._wake(rested)
                due.append(rested)
        return due

    def _wake(self, state: RequestState) -> None:
        if state.rests_until:
            state.rests_until = 0
            self._awake[state.request.request_id] = state

    def _rest(self, one: Computed) -> None:
        """A decoding request has no work for this side within its block."""
        left = self._saver.due(one.state, one.tokens)
        if left > 0:
            # Rejected speculation counts as tokens, too, so a block's end is not missed.
            tick = one.state.rests_until = self._ticks + left
            request_id = one.state.request.request_id
            del self._awake[request_id]
            self._resting.setdefault(tick, []).append(request_id)

    def _chain_blocks(self, request_id: str) -> Sequence[int]:
        return self._tables(request_id)[self._facts.chain]

    def _tables_of(self, request_id: str, offered: Sequence[tuple[int, int, int]]) -> Tables:
        """The device blocks of a request. ``offered``: the states that this step completes: group,
        device block, tokens at its end."""
        return self._with_states(self._tables(request_id), offered)

    def _with_states(
        self, tables: Sequence[Sequence[int]], offered: Sequence[tuple[int, int, int]]
    ) -> Tables:
        """Device blocks by KV group, of recurrent groups those offered."""
        if not self._facts.has_states:
            return tables
        states: dict[int, dict[int, int]] = {}
        for group, block, tokens in offered:
            states.setdefault(group, {})[tokens] = block
        return [
            states.get(i, {}) if facts.kind is GroupKind.STATE else table
            for i, (facts, table) in enumerate(zip(self._facts.groups, tables, strict=True))
        ]

    def _tails(
        self, request: Any, final: int, offered: Sequence[tuple[int, int, int]], ended: bool = False
    ) -> list[int]:
        """Tokens inside a block up to which a request is saved, of which the first ``final`` are
        computed. With recurrent layers where vLLM offers their states, as on the device; else where
        its prompt ends, and where it ends itself."""
        size, unit = self._facts.block_size, self._facts.match_unit
        if unit is None:
            return []
        if self._facts.has_states:
            return sorted({tokens for _, _, tokens in offered if tokens % size})
        prompt = int(request.num_prompt_tokens)
        tail = (prompt - 1) // unit * unit
        is_open = tail // size == prompt // size  # else the prompt's last block is saved whole
        tails = {tail} if is_open and tail <= final else set()
        if ended:
            tails.add(final // unit * unit)
        return sorted(end for end in tails if end % size)

    def reported(self, report: StepReport | None, loaded: set[str], failed: set[str]) -> None:
        """Processes the workers' report of a step."""
        if self.misses.is_asked:  # before anything changes that reasons depend on
            self.misses.settle()
        if report is not None:
            self.tally.count_step(report)
            for step, seconds in report.timed.items():
                self.costs.step_took(step, seconds)
            if report.load_seconds > 0:
                of_rank = self._facts.block_bytes * self._facts.rank_share
                blocks = report.loaded_bytes / of_rank
                self.costs.saw_load(TierName.HOST, blocks, report.load_rank_seconds)
            if report.lost:
                self._sequences_lost(report.lost)
            if report.starts_over:
                self._start_over(report)
            self.adapters_loaded(report.adapters, report.swapped)
            for number, (ranks, found) in report.compared.items():
                self._auditor.compared(number, ranks, found)
            self._saver.made(report.stored, report.failed)
        for request_id in loaded:
            load = self._loading.pop(request_id, None)
            if load is not None:
                if request_id not in failed:
                    self.tally.count_load(load.lowest_tier, self.costs.elapsed(load.mark))
                load.release()
            if self.traces is not None and (state := self._states.get(request_id)) is not None:
                copied = {} if report is None else report.copied
                if state.trace is not None:
                    state.trace.copied(request_id in failed, copied.get(request_id))
        for request_id in failed:  # the engine recomputes it, and is not offered the pool again
            self.tally.counts["loads_failed"] += 1
            self._waiting.pop(request_id, None)
            state = self._states.get(request_id)
            if state is not None:
                state.computes = True
                state.recalled.clear()
                self.misses.failed(state)
        self._saver.flush()  # with async_write off, replies of this step leave after it

    def _start_over(self, report: StepReport) -> None:
        """vLLM has preempted all running requests, see ``compat.scheduler``: nothing of their
        prompts was recalled. After a load of the workers' own accord it is not known which blocks
        on their way to the pool were computed before."""
        for state in self._states.values():
            if state.request.request_id not in self._loading:
                state.device_tokens = 0
                state.recalled.clear()
        if report.reloaded or report.swapped:
            self._saver.forsake(None)
        if report.reloaded:
            self._reloaded()

    def adapters_loaded(
        self, loaded: Mapping[int, LoadedAdapter], swapped: Collection[int]
    ) -> None:
        """The workers have loaded these adapters, of which ``swapped`` have another content."""
        if loaded:
            self.namespaces.adapters.loaded(loaded)
        if swapped:
            self.weights_changed(frozenset(swapped))

    def weights_changed(self, adapters: Collection[int] | None = None) -> None:
        """The workers have other weights, or another content of these ``adapters``. Requests in the
        engine are computed without the pool from here on, since part of their KV may be of before;
        their loads count as failed. What was ordered to be saved was computed before. No proof
        holds any more: neither of other writers' blocks, nor for others of those to come."""
        self.misses.settle()
        self.tally.counts["weights_changed"] += 1
        parted = []
        for request_id, state in self._states.items():
            lora = state.request.lora_request
            if adapters is not None and (lora is None or lora.lora_int_id not in adapters):
                continue
            self._drop_load(state)
            state.namespace, state.settled = None, True
            if request_id in self._loading or state.request.num_computed_tokens:
                parted.append(state.request)
        fail_loads(self._loading.keys() & {request.request_id for request in parted})
        self._part_ways(parted)
        self._auditor.renew()
        if adapters is None:
            self.namespaces.renew()

    def _sequences_lost(self, lost: Collection[str]) -> None:
        """The workers cannot reach the arena: no more blocks go there. The engine restarts those
        sequences, see ``compat.scheduler``."""
        self.tally.counts["sequences_lost"] += len(lost)
        if self.offloader is not None:
            self.offloader.out_of_reach()
        logger.error(
            "kvrecall: the offloaded blocks of %d sequences cannot be read; these "
            "sequences are recomputed, and sequences stay on the device from now on",
            len(lost),
        )

    def _refuted(self, namespace: Namespace) -> None:
        """The engine computes other KV than that namespace contains: it stops using it."""
        digests = self.namespaces.distrust(namespace)
        self._saver.forsake(digests)
        for state in self._states.values():
            if state.namespace is not None and state.namespace.digest in digests:
                self._drop_load(state)
                state.namespace = None
        self._auditor.forget(digests)

    # ---- life ---------------------------------------------------------------------------

    def admit(self, request: Any) -> None:
        """A request entered the engine."""
        self._state(request)

    def finished(
        self,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        states: Sequence[tuple[int, int, int]] = (),
    ) -> tuple[bool, dict[str, Any]]:
        """A request ended. True if its device blocks must be kept until a release is reported.
        ``block_ids``: by KV group. ``states``: of recurrent layers that are still at the end of
        the request's prompt, as of ``boundary_states``."""
        if self.misses.is_asked:
            self.misses.settle()
        self._waiting.pop(request.request_id, None)
        self._awake.pop(request.request_id, None)
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False, {}
        self._settle(state)
        self._drop_load(state)
        whole = request.status.name in _FINISHED_WHOLE
        loads = request.request_id in self._loading
        any_new = False
        if (whole or states) and not loads:
            # The last token sampled has no KV yet; under asynchronous scheduling the step that
            # computes it may be under way. States of recurrent layers have moved on.
            final = min(request.num_computed_tokens, request.num_tokens - 1)
            tables = self._with_states(block_ids, states)
            tails = self._tails(request, final, states, ended=True)
            any_new = self._saver.save([Computed(state, final, lambda: tables, True, tails)])
        self._auditor.ended(request.request_id)
        if self._facts.recovers and request.status.name == _ABORTED:
            # A step that failed aborts all requests, and its blocks are in vLLM's prefix cache.
            self._saver.doubt(state)
            self._uncache({block_id for ids in block_ids for block_id in ids})
        if whole and (state.saved or state.hanging) and not self._settings.async_write:
            self._saver.flush_later([*state.keys(state.saved), *state.hanging])
        if loads:
            # vLLM keeps its blocks until the load is reported, and takes one report only. Stores of
            # before its preemption are complete by then: the load came after them on the device.
            hold = False
        else:
            hold = any_new or (bool(state.open_stores) and not self._facts.copies_in_step)
        if hold:
            self._releases.append(request.request_id)
        sources = state.sources()
        self.misses.ended(state, min(request.num_computed_tokens + 1, request.num_tokens))
        self.tally.count_request(sources)
        if state.trace is not None:
            state.trace.finished(sources, len(state.open_stores), state.miss)
        promised = self._saver.promised(state) if whole and not state.closed else 0
        hinted = pool_id(self._pool.arena_handle()) if state.hinted else ""
        handed_over = receipt(state.namespace, promised, hinted)
        told = {REPORT: sources, UNIT: self._facts.unit, **handed_over}
        return hold, told if state.miss is None else {**told, MISSED: state.miss}

    def state_of(self, request_id: str) -> RequestState | None:
        """The state of a request, None if it is not in the engine."""
        return self._states.get(request_id)

    def reset(self) -> bool:
        """Forgets all pooled blocks permanently, those beyond this host, too: from here on this
        engine's blocks have a namespace private to this process. False (and no effect) while
        blocks are being loaded."""
        if self._loading:
            return False
        self.misses.settle()
        self._pool.clear()
        for state in self._states.values():
            self._drop_load(state)
            state.namespace = None  # its hashes stay, its blocks are of the old weights
            state.settled = True
        self.namespaces.turn_private()
        return True

    def _state(self, request: Any) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            unit = self._facts.hash_block_size
            steps = tuple(group.block_size // unit for group in self._facts.groups)
            tenant = tenant_of(request.cache_salt)
            state = RequestState(request, steps, tenant, self._facts.chain, unit, self._tail_hash)
            self._states[request.request_id] = self._awake[request.request_id] = state
            if self.traces is not None:
                state.trace = self.traces.begin(request)
        self._settle(state)
        return state

    def _settle(self, state: RequestState) -> None:
        """Determines a request's namespace, once that is possible, and the promise of a prefill
        instance for it."""
        if state.settled or not self.namespaces.is_settled(state.request):
            return
        state.settled = True
        if not self._is_hashed(state.request):
            return
        state.namespace = self.namespaces.of(state.request)
        if state.namespace is not None:
            state.group_namespaces = self.namespaces.groups_of(state.namespace)
        if not state.reported:
            state.promise = self._accept(state.request.kv_transfer_params, state.namespace)

    def _is_hashed(self, request: Any) -> bool:
        """Whether vLLM's block hash tells a request's prompt: of embeddings mixed with tokens it
        has the rows, and not which positions they are for. Embeddings alone have the same hash as
        such a mixture, whose blocks they could find on the device."""
        if getattr(request, "prompt_embeds", None) is None:
            return True
        if getattr(request, "prompt_is_token_ids", None) is not None:
            self._has_mixtures = True
        return not self._has_mixtures

    def _accept(self, params: object, namespace: Namespace | None) -> Promise | None:
        """The promise in a request's ``kv_transfer_params``; None if none can be kept."""
        patience_s = self._settings.handover_deadline_s
        promise = Promise.of(params, self._facts.unit, patience_s, self._clock)
        if promise is None or namespace is None:
            return None
        self.tally.counts["handovers"] += 1
        if promise.namespace == namespace.digest.hex():
            return promise
        self.tally.counts["handovers_foreign"] += 1
        if not self._warned_of_foreign:
            self._warned_of_foreign = True
            logger.warning(
                "kvrecall: the blocks of the prefill instance do not fit this engine "
                "(namespace %s there, %s here): prompts are recomputed. Both logs list "
                "the contents of the namespace; model, dtype, block size and vLLM must be "
                "the same",
                promise.namespace[:64],
                namespace.digest.hex(),
            )
        return None

    def saved(self, request_id: str) -> tuple[BlockKey, ...]:
        """Blocks of a request in the engine that are in the pool or on their way: the leading ones
        of its chain, and those that hang on it."""
        state = self._states.get(request_id)
        return () if state is None else (*state.keys(state.saved), *state.hanging)
