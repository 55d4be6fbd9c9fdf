"""The scheduler side: decides what to recall and what to save. Never touches KV bytes.

It runs inside the engine's scheduling step, so it makes only pool calls that return at once;
promotions from disk are polled. The one exception is a setting: with ``async_write``
off, the step that ends a request waits (bounded) until its blocks are durable.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from kvrecall.block import BlockKey, Namespace, TierName, tenant_of
from kvrecall.config import RecallSettings
from kvrecall.engines.base import MISSED, REPORT, UNIT
from kvrecall.engines.vllm.compat.scheduler import boundary_states, fail_loads, keep_boundary
from kvrecall.engines.vllm.connector.audit import Auditor
from kvrecall.engines.vllm.connector.handover import (
    Handover,
    Promise,
    Wait,
    held_since,
    pool_id,
    receipt,
)
from kvrecall.engines.vllm.connector.hit import FirstNeeded, Hit, HitFinder, Lookup
from kvrecall.engines.vllm.connector.load import RISK_SHARE, LoadCostModel, PrefixLoad
from kvrecall.engines.vllm.connector.metrics import Counters, Observers, SchedulerEvents
from kvrecall.engines.vllm.connector.miss import MissExplainer
from kvrecall.engines.vllm.connector.offload import OffloadPlanner, StateOf, Trusted
from kvrecall.engines.vllm.connector.request import (
    AwakeRequests,
    BlockHashes,
    LoadRecord,
    RequestState,
    TailHash,
    hint_of_request,
)
from kvrecall.engines.vllm.connector.saver import BoundaryState, Computed, Reachable, Saver
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.engines.vllm.identity.changes import LoadedAdapter
from kvrecall.engines.vllm.identity.namespace import Adapters, NamespaceRegistry
from kvrecall.engines.vllm.wire import Comparison, EngineFacts, LoadOrder, StepOrders, StepReport
from kvrecall.pool.base import ArenaHandle, PoolClient

logger = logging.getLogger("vllm.kvrecall")

RoomFor = Callable[[Any, int, Iterable[Any]], bool]
MakePlanner = Callable[[StateOf, Trusted], OffloadPlanner]

_FINISHED_WHOLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
_ABORTED = "FINISHED_ABORTED"
_DELIVERED = "do_remote_prefill"  # in a request's parameters: by a connector beside this one
_LEASE_S = 15.0  # between two steps: NIXL renews 30 s at the first step after each 5 s
_MOST_RETRIES = 2  # of loads that were incomplete, before a request is computed
_HINTED = 256  # requests of several sequences whose hint was told
_Answer = tuple[int | None, bool]
_NOTHING: _Answer = (0, False)
_ASK_AGAIN: _Answer = (None, False)


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
        make_planner: MakePlanner | None = None,
        observers: Sequence[SchedulerEvents] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``namespace`` and ``adapters`` as of ``NamespaceRegistry``. ``tables``: the device blocks
        of a request by KV group, in order; 0 for one that is no longer there. ``first_needed`` as
        of ``HitFinder``, ``reachable`` as of ``Saver``; ``room_for`` and ``tail_hash``: see
        ``compat.scheduler``, and ``part_ways``. ``uncache``: takes device blocks out of vLLM's
        prefix cache. ``reloaded``: called when the workers' model has loaded weights by itself.
        ``make_planner``: where long sequences are offloaded. ``observers``: further ones, behind
        the counters and the reasons of misses. ``clock``: seconds."""
        self._pool = pool
        self._settings = settings
        self._facts = facts
        self._tables = tables
        self._clock = clock
        self._room_for = room_for
        self._uncache = uncache
        self._part_ways = part_ways
        self._reloaded = reloaded
        steps = tuple(group.block_size // facts.hash_block_size for group in facts.groups)
        self._hashes = BlockHashes(steps, facts.hash_block_size, facts.chain, tail_hash)
        self._record_bytes = tuple(group.record_bytes for group in facts.groups)
        self._states: dict[str, RequestState] = {}
        self._awake = AwakeRequests(self._states)
        self._matched: dict[str, PrefixLoad] = {}  # of requests that have no device blocks yet
        self._loading: dict[str, PrefixLoad] = {}  # of requests that may have ended since
        self._waiting: dict[str, Any] = {}  # requests that hold device blocks and have not run yet
        self._hinted: deque[int] = deque(maxlen=_HINTED)
        self._has_mixtures = False
        self._delivered: dict[str, float] = {}  # until when connectors beside this one may load
        self._leased: dict[str, float] = {}  # when a step last renewed it; inf: over, and counted
        self._loads: list[LoadOrder] = []
        self._releases: list[str] = []
        self._warned_of_foreign = False
        self.is_busy = False  # whether the last step computed anything
        self.counters = Counters(facts, clock)
        self.misses: MissExplainer | None = None
        heard: list[SchedulerEvents] = [self.counters, *observers]
        if settings.explain_misses != "off":
            tells_tokens = settings.explain_misses == "tokens"
            self.misses = MissExplainer(pool, facts, self.counters, tells_tokens, self._states)
            heard.insert(0, self.misses)
        self._events = Observers(heard)
        groups = [(str(group.group), group.block_bytes) for group in facts.groups]
        self.namespaces = NamespaceRegistry(pool, groups, namespace, adapters)
        if settings.access == "private":
            self.namespaces.turn_private()
        size, nbytes, least_s = facts.block_size, facts.block_bytes, facts.least_token_seconds
        deadline_s = settings.pool.load_deadline_s
        self.costs = LoadCostModel(size, nbytes, deadline_s, least_s, clock)
        self._finder = HitFinder(pool, facts, first_needed)
        every, refuted = settings.audit_every, self._refuted
        self._auditor = Auditor(pool, facts, every, self.counters, refuted, self._finder, clock)
        origin = self._auditor.origin
        self._saver = Saver(pool, facts, self._finder, reachable, origin, self._events)
        self._saver.writes = settings.access != "read"
        self.offload: OffloadPlanner | None = None
        if make_planner is not None:
            self.offload = make_planner(self.state_of, self._auditor.trusted)

    # ---- recall -------------------------------------------------------------------------

    def match(self, request: Any, computed_tokens: int) -> _Answer:
        """Tokens that the pool can add to ``computed_tokens``; None while blocks are on their way.
        At least one token is left to compute, and a hit ends where one on the device can, so a
        recalled prefix is cut exactly like a hit on the device; except with a ``match_unit`` of the
        pool's own, see ``docs/models.md``."""
        state = self._state(request)
        self._awake.wake(state.id)
        self._events.considered(state)
        if request.num_preemptions == 0:
            state.loading.device_tokens = computed_tokens
        if (request.kv_transfer_params or {}).get(_DELIVERED):
            self._delivered[state.id] = self._clock() + self._settings.pool.load_deadline_s
            return _NOTHING
        start = computed_tokens // self._facts.alignment * self._facts.alignment
        load = self._load_from(state, start)
        if not isinstance(load, PrefixLoad):
            return load
        is_new = load.offsets is None
        if not (load.poll() and self._arrived(state, load, is_new)):
            return _ASK_AGAIN
        if not load.tokens:
            return self._without(state, load)
        if self._blocks_others(request, load):
            return _ASK_AGAIN
        if self.offload is not None:
            size = self._facts.block_size
            self.offload.expect(state.id, start // size, -(-(start + load.tokens) // size))
        return load.tokens, True

    def _may_load(self, state: RequestState) -> bool:
        return (
            self._facts.recalls
            and state.namespace is not None
            and not state.loading.computes
            and not state.request.skip_reading_prefix_cache
        )

    def _load_from(self, state: RequestState, start: int) -> PrefixLoad | _Answer:
        """The load of the request's hit behind ``start``, which may begin here; or what ``match``
        answers, as there is no hit, or a remote tier or prefill instance has not delivered."""
        if start and self._auditor.doubts(state):
            return _ASK_AGAIN
        if not self._may_load(state):
            return _NOTHING
        load = self._matched.get(state.id)
        if load is not None and load.hit.start == start:
            return load
        self._drop_load(state)
        unit = self._facts.unit
        limit = int(state.request.num_tokens - 1) // unit * unit
        search = self._search(state, start, limit)
        if search is None:
            return _ASK_AGAIN
        if search.hit is None:
            return _NOTHING
        patience_s = self._settings.pool.load_deadline_s
        hit: Hit | None = search.hit
        if self._settings.appraise_loads and state.loading.promise is None:
            hit, patience_s = self._appraise(state, search.hit)
        if hit is None:
            return _NOTHING
        if hit.chain.tail is not None:  # no other request that uses the chain is bound to use it
            self._pool.touch((), hanging=hit.chain.keys[-1:])
        return self._acquire(state, hit, patience_s)

    def _acquire(self, state: RequestState, hit: Hit, patience_s: float) -> PrefixLoad:
        deadline_s = self._settings.pool.load_deadline_s
        load = PrefixLoad(self._pool, self.costs, hit, self.costs.mark(), patience_s, deadline_s)
        self._matched[state.id] = load
        load.acquire(state)
        return load

    def _search(self, state: RequestState, start: int, limit: int) -> Lookup | None:
        """Looks for the longest hit between ``start`` and ``limit``, once all of it that is to be
        waited for is there, or late; None until then. Tells pool and vLLM, once, of the use."""
        now, loading = self._clock(), state.loading
        promise = loading.promise if loading.promise and not loading.promise.is_over else None
        if (promise.wait if promise else loading.lookup).is_early(now):
            return None
        search = self._finder.find(state, start, limit)
        if promise is not None:
            wanted = min(promise.tokens, limit) - start
            found = 0 if search.hit is None else search.hit.end - start
            outcome = promise.look(now, found >= wanted)
            self._events.waited(state, outcome, wanted)
            if outcome is Handover.WAIT:
                return None
        self._touch(state, limit)
        blocks = -(-(limit - start) // self._facts.block_size)
        self._events.looked_up(state, now, blocks, search)
        if search.is_pending:
            seconds = self.costs.compute_seconds((start + limit) // 2 // self._facts.block_size)
            if loading.lookup.goes_on(now, RISK_SHARE * blocks * seconds):
                return None
            self._events.lookup_late(state, start if search.hit is None else search.hit.end)
        if search.used and not loading.dependents_touched:
            loading.dependents_touched = True
            self._pool.touch((), hanging=search.used)
        if search.boundary is not None:
            keep_boundary(state.request, search.boundary)
        return search

    def _touch(self, state: RequestState, limit: int) -> None:
        """Tells the pool, once, that the request uses its chain, and what its client says of its
        return."""
        if state.loading.touched:
            return
        state.loading.touched = True
        hint, is_invalid = hint_of_request(state.request)
        self._events.counted("hints_invalid", is_invalid)
        state.loading.hinted = hint is not None
        if hint is None or not self._is_hinted(state):
            keys = state.keys(limit // self._facts.block_size)
            ending = self._finder.ending(state, limit)
            self._pool.touch(keys, ending=ending, hint=hint, tenant=state.tenant)

    def _is_hinted(self, state: RequestState) -> bool:
        """Whether another sequence of the request, or the prefill instance over the same pool,
        brought its hint: this is the same use of the prompt, not its return."""
        promise = state.loading.promise
        if promise is not None and promise.hinted == pool_id(self._pool.arena_handle()):
            return True
        number, _, request = state.id.partition("_")  # as vLLM calls one of several sequences
        if not (number.isdecimal() and request):
            return False
        name = hash(request)  # names may be long
        if name in self._hinted:
            return True
        self._hinted.append(name)
        return False

    def _appraise(self, state: RequestState, hit: Hit) -> tuple[Hit | None, float]:
        """The part of a hit that loads faster than it computes, if any, and the patience for it."""
        size = self._facts.block_size
        blocks, tokens = hit.blocks, hit.end - hit.start
        tiers, weight = hit.chain.tiers, 1.0
        if not hit.is_chain:
            worst = max((tier for run in hit.runs for tier in run.tiers), key=list(TierName).index)
            tiers = tiers if len(tiers) == blocks else (worst,) * blocks
            weight = sum(run.weight * len(run.keys) for run in hit.runs) / max(1, blocks)
        last = (tokens - hit.tokens(blocks - 1)) / size
        plan = self.costs.plan(tiers, hit.start // size, weight, last)
        if plan.blocks == blocks:
            return hit, plan.patience_s
        shorter: Hit | None = None
        if plan.blocks and hit.is_chain:
            shorter = hit.cut(plan.blocks)
        elif plan.blocks:
            end = hit.start + hit.tokens(plan.blocks)
            shorter = self._finder.find(state, hit.start, end).hit
        self._events.declined(state, hit, shorter, plan)
        return shorter, plan.patience_s

    def _arrived(self, state: RequestState, load: PrefixLoad, is_new: bool) -> bool:
        """A load is over: decides, once, what is believed. False: a shorter one is loaded."""
        if is_new:
            self._events.load_over(state, load)
        if not (is_new and load.tokens):
            return True
        assert load.offsets is not None
        alone = len(self._states) == 1
        admitted = self._auditor.admit(state, load.hit, load.offsets, alone)
        if isinstance(admitted, Hit):
            self._events.audited(state, admitted.end)
            load.release()
            self._acquire(state, admitted, self._settings.pool.load_deadline_s)
            return False
        if admitted < load.tokens:
            self._events.audited(state, load.hit.start + admitted)
            state.loading.computes = not admitted
        load.cut(admitted)
        return True

    def _without(self, state: RequestState, load: PrefixLoad) -> _Answer:
        """A load gives nothing: the request is computed, or a shorter hit is looked for, because a
        block of one that needs all of them did not arrive: it is lost."""
        self._drop_load(state)
        is_lost = not (load.hit.is_chain or load.given_up or state.loading.computes)
        state.loading.retries += is_lost
        if is_lost and state.loading.retries <= _MOST_RETRIES:
            return _ASK_AGAIN
        state.loading.computes = True
        return _NOTHING

    def _blocks_others(self, request: Any, load: PrefixLoad) -> bool:
        """Whether the request does not fit the device beside those that wait there to run."""
        if load.hit.is_chain or not self._waiting:
            return False
        others = [one for one in self._waiting.values() if one is not request]
        end = load.hit.start + load.tokens
        return bool(others) and not self._room_for(request, end, others)

    def _drop_load(self, state: RequestState) -> None:
        load = self._matched.pop(state.id, None)
        if load is not None:
            if load.offsets is None:
                self._events.load_over(state, load)
            load.release()
            if self.offload is not None:
                self.offload.unexpect(state.id)

    def allocated(
        self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """The engine gave the request device blocks; ``external_tokens`` are to be loaded."""
        state = self._state(request)
        if external_tokens == 0:
            self._drop_load(state)
            return
        load = self._loading[state.id] = self._matched.pop(state.id)
        copies = self._copies(load, block_ids, external_tokens)
        self._loads.append(LoadOrder(state.id, copies))
        self._events.load_ordered(state, copies)
        self._waiting[state.id] = request
        if request.num_preemptions == 0:
            state.loading.recalled = load.tokens_by_tier(external_tokens)
        self._tell_sources(state)

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

    def _tell_sources(self, state: RequestState) -> None:
        if not state.loading.is_told:
            state.loading.is_told = True
            self._events.sources_known(state)

    def sources(self, request: Any) -> dict[TierName, int]:
        return dict(self._state(request).loading.recalled)

    # ---- a step -------------------------------------------------------------------------

    def orders(self, scheduler_output: Any, arena: ArenaHandle) -> StepOrders:
        scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
        offered = boundary_states(scheduler_output)
        tokens = scheduler_output.total_num_scheduled_tokens
        self._events.step_begins(not scheduled)
        due = self._awake.of_step(scheduled, tokens, offered)
        computed = []
        prompt_tokens = positions = 0
        for state in due:
            request_id = state.request.request_id
            tokens, first = scheduled[request_id], state.request.num_computed_tokens
            self._leased.pop(request_id, None)
            self._delivered.pop(request_id, None)
            if self._waiting:
                self._waiting.pop(request_id, None)
            if not state.settled:
                self._settle(state)
            if not state.loading.is_told:  # vLLM may have settled for another hit than it showed
                state.loading.device_tokens = first
                self._tell_sources(state)
            tables = functools.partial(self._tables, request_id)
            final = min(first + tokens, state.request.num_tokens)  # drafts may be rejected
            computed.append(Computed(state, final, tables, offered.get(request_id, ())))
            count = min(tokens, state.request.num_prompt_tokens - first)
            if count > 0:
                prompt_tokens += count
                positions += count * first + count * count // 2
        comparisons: list[Comparison] = []
        if computed:
            self._events.computes(due, scheduled)
            self._saver.save(computed)
            comparisons = self._comparisons(computed)
        self.is_busy = bool(scheduled)
        depth = positions // max(1, prompt_tokens)
        loads, self._loads = self._loads, []
        releases, self._releases = self._releases, []
        blocks = lambda name: self._tables(name)[self._facts.chain]  # noqa: E731
        return StepOrders(
            arena,
            loads,
            self._saver.take(),
            releases,
            self._saver.must_precede(),
            comparisons,
            self._record_bytes,
            self.offload and self.offload.orders(scheduled, blocks, arena),
            self.costs.step_begins(self.is_busy, prompt_tokens, depth),
            self.is_busy,
        )

    def _comparisons(self, computed: Sequence[Computed]) -> list[Comparison]:
        """The comparisons of audited requests. Others rest while they decode in a block."""
        comparisons: list[Comparison] = []
        audited = self._auditor.audited()
        for one in computed:
            request = one.state.request
            if request.request_id in audited:
                blocks = functools.partial(self._saver.blocks, one)
                name = request.request_id
                comparisons += self._auditor.comparisons(name, one.tokens, blocks)
            elif one.state.settled and request.num_computed_tokens >= request.num_prompt_tokens:
                left = self._saver.tokens_until_due(one.state, one.tokens)
                if left > 0:
                    self._awake.rest(one.state, left)
        return comparisons

    def reported(self, report: StepReport | None, loaded: set[str], failed: set[str]) -> None:
        self._events.changes()
        report = StepReport() if report is None else report
        self.counters.reported(report)
        for step, seconds in report.timed.items():
            self.costs.step_took(step, seconds)
        if report.load_seconds > 0:
            of_rank = self._facts.block_bytes * self._facts.rank_share
            blocks = report.loaded_bytes / of_rank
            self.costs.saw_load(TierName.HOST, blocks, report.load_rank_seconds)
        if report.lost and self.offload is not None:  # vLLM starts them over, see compat.scheduler
            self._events.counted("sequences_lost", len(report.lost))
            self.offload.out_of_reach()
            logger.error(
                "kvrecall: the offloaded blocks of %d sequences cannot be read; these "
                "sequences are recomputed, and sequences stay on the device from now on",
                len(report.lost),
            )
        if report.starts_over:  # vLLM has preempted all running requests, see compat.scheduler
            for state in self._states.values():
                if state.id not in self._loading:  # nothing of their prompts was recalled
                    state.loading.device_tokens = 0
                    state.loading.recalled.clear()
            self._saver.discard(None)  # what is on its way may be of before, or of wrong KV
        if report.reloaded:
            self._reloaded()
        self.adapters_loaded(report.adapters, report.swapped)
        for number, (ranks, found) in report.compared.items():
            self._auditor.compared(number, ranks, found)
        self._saver.made(report.stored, report.failed)
        for request_id in loaded:
            self._delivered.pop(request_id, None)
            self._leased.pop(request_id, None)
            load = self._loading.pop(request_id, None)
            if load is not None:
                one, has_failed = self._states.get(request_id), request_id in failed
                self._events.load_done(one, load, has_failed, report.copied.get(request_id))
                load.release()
            elif self._saver.writes:
                self._loaded_by_another()
        for request_id in failed:  # the engine recomputes it, and is not offered the pool again
            self._events.counted("loads_failed")
            self._waiting.pop(request_id, None)
            if (one := self._states.get(request_id)) is not None:
                one.loading.computes = True
                one.loading.recalled.clear()
                self._events.load_failed(one)
        self._saver.flush()  # with async_write off, replies of this step leave after it

    def late(self) -> list[str]:
        """Requests that a connector beside this one has had ``load_deadline`` to load, once. What
        it loads after a time without a step fails: where it was held it may be something else."""
        if not self._leased and not self._delivered:
            return []
        now = self._clock()
        for request_id, renewed in self._leased.items():
            is_over = now - renewed > _LEASE_S
            self._leased[request_id] = math.inf if is_over else max(now, renewed)
            if is_over:
                fail_loads([request_id])
                self._events.counted("handovers_late")
        late = [one for one, until in self._delivered.items() if until <= now]
        for request_id in late:
            del self._delivered[request_id]
            self._events.counted("handovers_late", self._leased.get(request_id) != math.inf)
        return late

    def _loaded_by_another(self) -> None:
        """A connector beside this one has loaded KV that nothing here has proved: of a request, and
        of all that find its blocks on the device. None of it, nor what is computed on it, may be
        offered to other engines as computed here."""
        self._saver.writes = False
        logger.warning(
            "kvrecall: another connector has loaded KV into this engine, which saves no blocks "
            "from here on, as they may be of other weights; it goes on to recall. Let the "
            "engines that compute the prompts write to the pool"
        )

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
        self._events.changes()
        self._events.counted("weights_changed")
        parted = []
        for request_id, state in self._states.items():
            lora = state.request.lora_request
            if adapters is not None and (lora is None or lora.lora_int_id not in adapters):
                continue
            self._part(state)
            if request_id in self._loading or state.request.num_computed_tokens:
                parted.append(state.request)
        fail_loads(self._loading.keys() & {request.request_id for request in parted})
        self._part_ways(parted)
        self._auditor.renew()
        if adapters is None:
            self.namespaces.renew()

    def _part(self, state: RequestState) -> None:
        """The request is computed without the pool from here on."""
        self._drop_load(state)
        state.namespace, state.settled = None, True

    def _refuted(self, namespace: Namespace) -> None:
        """The engine computes other KV than that namespace contains: it stops using it."""
        digests = self.namespaces.distrust(namespace)
        self._saver.discard(digests)
        for state in self._states.values():
            if state.namespace is not None and state.namespace.digest in digests:
                self._part(state)
        self._auditor.forget(digests)

    # ---- life ---------------------------------------------------------------------------

    def admit(self, request: Any) -> None:
        state = self._state(request)
        params = request.kv_transfer_params or {}
        if params.get(_DELIVERED):
            waited_s = max(0.0, time.time() - held_since(params, request.arrival_time))
            self._leased[state.id] = self._clock() - waited_s

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], states: Sequence[BoundaryState] = ()
    ) -> tuple[bool, dict[str, Any]]:
        """A request ended. True if its device blocks must be kept until a release is reported.
        ``block_ids``: by KV group. ``states``: of recurrent layers that are still at the end of
        the request's prompt, as of ``boundary_states``."""
        self._events.changes()
        self._waiting.pop(request.request_id, None)
        self._delivered.pop(request.request_id, None)
        self._leased.pop(request.request_id, None)
        self._awake.forget(request.request_id)
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False, {}
        self._settle(state)
        self._drop_load(state)
        whole = request.status.name in _FINISHED_WHOLE
        is_loading = state.id in self._loading
        if (whole or states) and not is_loading:
            # Its last token has no KV yet: under asynchronous scheduling the step that computes it
            # may be under way, and states of recurrent layers have moved on.
            final = min(request.num_computed_tokens, request.num_tokens - 1)
            self._saver.save([Computed(state, final, lambda: block_ids, states, True)])
        self._distrust(state, block_ids)
        if whole and not self._settings.async_write:
            self._saver.flush_later(state)
        # vLLM keeps the blocks of one that loads until that is reported, and takes one report only.
        # Stores of before its preemption are complete by then: the load came after them.
        hold = not is_loading and self._saver.is_reading(state)
        if hold:
            self._releases.append(state.id)
        self._events.finished(state, min(request.num_computed_tokens + 1, request.num_tokens))
        return hold, self._reply(state, whole)

    def _distrust(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> None:
        """Uncaches blocks of a step that failed, which aborts all, or loaded and not proved."""
        is_broken = self._facts.recovers and state.request.status.name == _ABORTED
        if is_broken:
            self._saver.invalidate(state)
        if self._auditor.ended(state.id) or is_broken:
            self._uncache(set().union(*block_ids))

    def _reply(self, state: RequestState, whole: bool) -> dict[str, Any]:
        """What the reply to a request carries for others."""
        promised = self._saver.promised(state) if whole and not state.saving.closed else 0
        hinted = pool_id(self._pool.arena_handle()) if state.loading.hinted else ""
        handed_over = receipt(state.namespace, promised, hinted)
        missed = {} if state.missed.miss is None else {MISSED: state.missed.miss}
        return {REPORT: state.sources(), UNIT: self._facts.unit, **handed_over, **missed}

    def state_of(self, request_id: str) -> RequestState | None:
        """The state of a request, None if it is not in the engine."""
        return self._states.get(request_id)

    def reset(self) -> bool:
        """Forgets all pooled blocks permanently, those beyond this host, too: from here on this
        engine's blocks have a namespace private to this process. False while it loads."""
        if self._loading:
            return False
        self._events.changes()
        if self._saver.writes:
            self._pool.clear()
        for state in self._states.values():
            self._part(state)  # its hashes stay, its blocks are of the old weights
        self.namespaces.turn_private()
        return True

    def _state(self, request: Any) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            loading = LoadRecord(Wait(self._settings.pool.lookup_deadline_s))
            state = RequestState(request, self._hashes, loading, tenant_of(request.cache_salt))
            self._states[request.request_id] = state
            self._awake.wake(request.request_id)
            self._events.admitted(state)
        self._settle(state)
        return state

    def _settle(self, state: RequestState) -> None:
        """Determines a request's namespace, once possible, and a prefill instance's promise."""
        if state.settled or not self.namespaces.is_settled(state.request):
            return
        state.settled = True
        namespace = self.namespaces.of(state.request) if self._is_hashed(state.request) else None
        if namespace is None:
            return
        state.namespace = namespace
        state.group_namespaces = self.namespaces.groups_of(namespace)
        params, unit = state.request.kv_transfer_params, self._facts.unit
        promise = Promise.of(params, unit, self._settings.handover_deadline_s)
        if promise is None or state.loading.is_told:
            return
        self._events.counted("handovers")
        if promise.namespace == namespace.digest.hex():
            state.loading.promise = promise
            return
        self._events.counted("handovers_foreign")
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

    def _is_hashed(self, request: Any) -> bool:
        """Whether vLLM's block hash tells a request's prompt: of embeddings mixed with tokens it
        has the rows, and not which positions they are for. Embeddings alone have the same hash as
        such a mixture, whose blocks they could find on the device."""
        if getattr(request, "prompt_embeds", None) is None:
            return True
        if getattr(request, "prompt_is_token_ids", None) is not None:
            self._has_mixtures = True
        return not self._has_mixtures

    def saved(self, request_id: str) -> tuple[BlockKey, ...]:
        """As of ``Saver``; of a request in the engine."""
        state = self._states.get(request_id)
        return () if state is None else self._saver.saved(state)
