"""The scheduler side: decides what to recall and what to save. Never touches KV bytes.

It runs inside the engine's scheduling step, so it asks the pool only questions that are answered
at once; promotions from disk are polled. The one exception is asked for: with ``async_write``
off, the step that ends a request waits (bounded) until its blocks are durable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from kvrecall.block import BlockKey, Namespace, TierName, tenant_of
from kvrecall.config import RecallSettings
from kvrecall.engines.base import REPORT
from kvrecall.engines.vllm.connector.appraisal import Appraiser, Plan
from kvrecall.engines.vllm.connector.audit import Auditor
from kvrecall.engines.vllm.connector.claim import Claim
from kvrecall.engines.vllm.connector.facts import EngineFacts
from kvrecall.engines.vllm.connector.handover import Handover, HandoverDesk, receipt
from kvrecall.engines.vllm.connector.ledger import RequestState
from kvrecall.engines.vllm.connector.metrics import Tally
from kvrecall.engines.vllm.connector.saver import Saver
from kvrecall.engines.vllm.connector.stepclock import StepClock, Work
from kvrecall.engines.vllm.connector.wire import (
    Comparison,
    Copy,
    Load,
    OffloadOrders,
    StepOrders,
    StepReport,
)
from kvrecall.engines.vllm.identity.spaces import AdapterIdentity, Spaces
from kvrecall.pool.base import ArenaHandle, PoolClient, Recall, RecallState

logger = logging.getLogger("vllm.kvrecall")

_FINISHED_WHOLE = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")


class Offloads(Protocol):
    """Who keeps blocks of running sequences off the device, if anybody does."""

    def expect(self, request_id: str, start: int, end: int) -> None: ...

    def unexpect(self, request_id: str) -> None: ...

    def orders(
        self,
        scheduled: Mapping[str, int],
        block_ids: Callable[[str], Sequence[int]],
        arena: ArenaHandle,
    ) -> OffloadOrders | None: ...

    def out_of_reach(self) -> None: ...


class RecallScheduler:
    """Scheduler side of the connector for one engine. Called from the engine's thread only."""

    def __init__(
        self,
        pool: PoolClient,
        settings: RecallSettings,
        facts: EngineFacts,
        namespace: Callable[[], Namespace | None],
        adapters: AdapterIdentity,
        block_ids: Callable[[str], Sequence[int]],
    ) -> None:
        """``namespace`` and ``adapters`` as of ``Spaces``, ``block_ids`` as of ``Saver``."""
        self._pool = pool
        self._settings = settings
        self._facts = facts
        self._block_ids = block_ids
        self._states: dict[str, RequestState] = {}
        self._loading: dict[str, Claim] = {}
        self._loads: list[Load] = []
        self._releases: list[str] = []
        self.tally = Tally()
        self.offloader: Offloads | None = None
        self._spaces = Spaces(pool, facts.block_bytes, namespace, adapters)
        self._auditor = Auditor(pool, facts, settings.audit_every, self.tally, self._refuted)
        self._saver = Saver(pool, facts, self._states, block_ids, self._auditor.origin, self.tally)
        deadline = settings.pool.load_deadline_s
        self._appraiser = Appraiser(
            facts.block_size, facts.block_bytes, deadline, facts.least_token_seconds
        )
        self._clock = StepClock()
        self._desk = HandoverDesk(facts.block_size, settings.handover_deadline_s, self.tally)

    # ---- recall -------------------------------------------------------------------------

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens the pool can add to ``computed_tokens``; None while blocks are on their way.

        Whole blocks only, and at least one token is left to compute, as the device cache does:
        so a recalled prefix is cut exactly as one hit on the device.
        """
        state = self._state(request)
        if request.num_preemptions == 0:
            state.device_tokens = computed_tokens
        if not self._may_recall(state):
            return 0, False
        start = computed_tokens // self._facts.block_size
        if state.claim is not None and state.claim.start != start:
            self._drop_claim(state)
        if state.claim is None:
            if self._must_await(state, start):
                return None, False
            if not self._claim(state, start):
                return (None if state.asking else 0), False
        assert state.claim is not None
        recall = self._poll(state.claim)
        if recall.state is RecallState.PENDING:
            return None, False
        if not recall.offsets or not self._admit(state):
            self._drop_claim(state)
            state.computes = True
            return 0, False
        assert state.claim.recall is not None
        recall = state.claim.recall
        if self.offloader is not None:
            end = start + len(recall.offsets)
            self.offloader.expect(request.request_id, start, end)
        return len(recall.offsets) * self._facts.block_size, True

    def _admit(self, state: RequestState) -> bool:
        """Cuts a claim that has come to the blocks that may be loaded; whether there are any."""
        claim = state.claim
        assert claim is not None
        assert claim.recall is not None
        if not claim.admitted:
            claim.admitted = True
            alone = len(self._states) == 1
            claim.cut(self._auditor.admit(state, claim.start, claim.recall.offsets, alone))
        return bool(claim.recall.offsets)

    def trusted(self, state: RequestState, offsets: Sequence[int]) -> int:
        """How many of these leased blocks of a request, from the first on, may be read."""
        return self._auditor.trusted(state, offsets)

    def _may_recall(self, state: RequestState) -> bool:
        if not self._facts.recalls or state.space is None or state.computes:
            return False
        return not state.request.skip_reading_prefix_cache

    def _must_await(self, state: RequestState, start: int) -> bool:
        """Whether blocks that were promised are not in the pool yet and may still come."""
        promise = state.promise
        if promise is None or promise.is_over:
            return False
        wanted = state.keys(min(promise.blocks, self._limit(state)))[start:]
        outcome = promise.look(len(wanted), lambda: self._pool.find(wanted).blocks)
        self.tally.handovers_late += outcome is Handover.LATE
        return outcome is Handover.WAIT

    def _limit(self, state: RequestState) -> int:
        """Blocks that may be recalled: whole ones, and a token is left to compute."""
        return int(state.request.num_tokens - 1) // self._facts.block_size

    def _claim(self, state: RequestState, start: int) -> bool:
        chain = state.keys(self._limit(state))
        if not state.touched:
            self._pool.touch(chain)
            state.touched = True
        keys = chain[start:]
        found = self._pool.find(keys) if keys else None
        state.asking = found is not None and found.pending and self._may_wait(state)
        if found is None or found.blocks == 0 or state.asking:
            return False
        deadline = self._settings.pool.load_deadline_s
        plan = Plan(found.blocks, deadline)
        if self._settings.appraise_loads and state.promise is None:
            plan = self._appraiser.plan(found.tiers, start)
            self.tally.blocks_declined += found.blocks - plan.blocks
            if plan.blocks == 0:
                return False
        parent = chain[start - 1] if start else None
        tiers = found.tiers[: plan.blocks]
        state.claim = Claim(start, tiers, self._clock.mark(), plan.patience_s)
        wanted = keys[: plan.blocks]
        state.claim.acquire(self._pool, wanted, deadline, parent, state.tenant)
        return True

    def _may_wait(self, state: RequestState) -> bool:
        """Whether the request waits on for the answer of a tier beyond this host."""
        now = time.monotonic()
        if state.asked_at is None:
            state.asked_at = now
        return now - state.asked_at < self._settings.pool.lookup_deadline_s

    def _poll(self, claim: Claim) -> Recall:
        """What came of a claim; waits no longer where that does not pay."""
        if claim.recall is not None:
            return claim.recall if claim.holds(self._pool) else Recall(RecallState.READY)
        recall = claim.poll(self._pool)
        given_up = False
        if recall.state is RecallState.PENDING:
            claim.pending_s = self._clock.elapsed(claim.mark)
            gained = self._appraiser.gained_seconds(claim.arrived, claim.start)
            given_up = claim.pending_s > gained + claim.patience_s
            if not given_up:
                return recall
            recall = claim.settle(self._pool)
            self.tally.loads_given_up += 1
        self._appraise(claim, recall, given_up)
        return recall

    def _appraise(self, claim: Claim, recall: Recall, given_up: bool) -> None:
        """Learns from a promotion that ended. After a step of other work it is only known that
        it took longer than until it was last seen pending. Blocks that did not come although
        nobody gave them up were lost (a damaged file, a dead service), which says nothing of
        speed."""
        seconds = self._clock.since(claim.mark) or claim.pending_s
        for tier in set(claim.tiers) - {TierName.HOST}:
            came = recall.tiers.count(tier)
            if seconds > 0 and (came or given_up):
                self._appraiser.saw_load(tier, came, seconds)

    def _drop_claim(self, state: RequestState) -> None:
        if state.claim is not None:
            state.claim.release(self._pool)
            state.claim = None
            if self.offloader is not None:
                self.offloader.unexpect(state.request.request_id)

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """The engine gave the request device blocks; ``external_tokens`` are to be loaded."""
        state = self._state(request)
        claim = state.claim
        if external_tokens == 0:
            self._drop_claim(state)
            return
        assert claim is not None
        assert claim.recall is not None
        count = external_tokens // self._facts.block_size
        first = claim.start
        rows = zip(block_ids[first : first + count], claim.recall.offsets, strict=False)
        come = [row for row in rows if row[0] != 0]  # the others stay in the arena
        copy = Copy(tuple(row[0] for row in come), tuple(row[1] for row in come))
        self._loads.append(Load(request.request_id, copy))
        self._loading[request.request_id] = claim
        if request.num_preemptions == 0:
            state.recalled.clear()
            for tier in claim.recall.tiers[:count]:
                state.recalled[tier] += self._facts.block_size
        state.claim = None
        self._tell(state)

    def _tell(self, state: RequestState) -> None:
        if not state.told:
            state.told = True
            self.tally.splits[state.request.request_id] = state.sources()

    def sources(self, request: Any) -> dict[TierName, int]:
        """Tokens of the request's load by tier."""
        return dict(self._state(request).recalled)

    # ---- save ---------------------------------------------------------------------------

    def orders(self, scheduler_output: Any, arena: Any) -> StepOrders:
        """This step's work for the workers."""
        comparisons: list[Comparison] = []
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is not None:
                self._settle(state)
                self._tell(state)
                request = state.request
                final = min(request.num_computed_tokens + tokens, request.num_tokens)
                self._saver.save(state, final // self._facts.block_size)
                comparisons += self._auditor.comparisons(
                    request_id, final // self._facts.block_size, self._block_ids
                )
        self._clock.step_begins(self._prompt_work(scheduler_output))
        orders = StepOrders(
            arena,
            self._loads,
            self._saver.take(),
            self._releases,
            self._saver.must_drain(),
            comparisons,
            self._facts.record_bytes,
        )
        if self.offloader is not None:
            scheduled = scheduler_output.num_scheduled_tokens
            orders.offload = self.offloader.orders(scheduled, self._block_ids, arena)
        self._loads, self._releases = [], []
        return orders

    def _prompt_work(self, scheduler_output: Any) -> Work:
        """Prompt tokens that this step computes, and their mean position."""
        tokens = positions = 0
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is not None:
                first = state.request.num_computed_tokens
                count = min(scheduled, state.request.num_prompt_tokens - first)
                if count > 0:
                    tokens += count
                    positions += count * first + count * count // 2
        everything = bool(scheduler_output.num_scheduled_tokens)
        return Work(everything, tokens, positions // tokens if tokens else 0)

    def finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any]]:
        """A request ended. True if its device blocks must be kept until a release is reported."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False, {}
        self._settle(state)
        self._drop_claim(state)
        whole = request.status.name in _FINISHED_WHOLE
        tail = False
        if whole:
            # The last token sampled has no KV yet; under asynchronous scheduling the step that
            # computes it may be under way.
            final = min(request.num_computed_tokens, request.num_tokens - 1)
            tail = self._saver.save(state, final // self._facts.block_size, block_ids)
        self._auditor.ended(request.request_id)
        if whole and state.saved and not self._settings.async_write:
            self._saver.flush_later(state.keys(state.saved))
        hold = tail or (bool(state.open_stores) and not self._facts.copies_in_step)
        if hold:
            self._releases.append(request.request_id)
        sources = state.sources()
        self.tally.count_request(sources)
        promised = state.saved * self._facts.block_size if whole and not state.closed else 0
        return hold, {REPORT: sources, **receipt(state.space, promised)}

    def saved(self, request_id: str) -> tuple[BlockKey, ...]:
        """Leading blocks of a request in the engine that are in the pool or on their way."""
        state = self._states.get(request_id)
        return () if state is None else tuple(state.keys(state.saved))

    # ---- reports ------------------------------------------------------------------------

    def reported(self, report: StepReport | None, loaded: set[str], failed: set[str]) -> None:
        """Takes in what the workers finished in a step."""
        work, seconds = self._clock.step_ends()
        if work.prompt_tokens and seconds is not None:
            self._appraiser.saw_step(work.prompt_tokens, work.depth, seconds)
        if report is not None:
            self.tally.count_step(report)
            if report.load_seconds > 0:
                blocks = report.loaded_bytes // self._facts.record_bytes
                self._appraiser.saw_load(TierName.HOST, blocks, report.load_seconds)
            if report.lost:
                self._sequences_lost(report.lost)
            for number, (ranks, found) in report.compared.items():
                self._auditor.compared(number, ranks, found)
            for store_id, ranks in report.stored.items():
                self._saver.count_down(store_id, ranks, store_id in report.failed)
        for request_id in loaded:
            claim = self._loading.pop(request_id, None)
            if claim is not None:
                claim.release(self._pool)
        for request_id in failed:
            self._load_failed(request_id)
        self._saver.flush()  # with async_write off, replies of this step leave after it

    def _sequences_lost(self, lost: Collection[str]) -> None:
        """The workers cannot reach the arena: nothing more goes there. The engine begins those
        sequences anew, see ``compat.begin_lost_anew``."""
        self.tally.sequences_lost += len(lost)
        if self.offloader is not None:
            self.offloader.out_of_reach()
        logger.error(
            "kvrecall: blocks of %d sequences off the device cannot be read in the pool; they are "
            "computed anew, and sequences stay on the device from now on",
            len(lost),
        )

    def _refuted(self, space: Namespace) -> None:
        """The engine does not compute what lies in that namespace: it uses it no more."""
        spaces = self._spaces.distrust(space)
        self._saver.forsake(spaces)
        for state in self._states.values():
            if state.space is not None and state.space.digest in spaces:
                self._drop_claim(state)
                state.space = None
        self._auditor.forget(spaces)

    def _load_failed(self, request_id: str) -> None:
        """The engine recomputes the request; it is not offered the pool again."""
        self.tally.loads_failed += 1
        state = self._states.get(request_id)
        if state is not None:
            state.computes = True
            state.recalled.clear()

    # ---- life ---------------------------------------------------------------------------

    def state_of(self, request_id: str) -> RequestState | None:
        """What is remembered of a request, None if it is not in the engine."""
        return self._states.get(request_id)

    def admit(self, request: Any) -> None:
        """A request entered the engine."""
        self._state(request)

    def reset(self) -> bool:
        """Forgets everything pooled, and does not find it again.

        vLLM resets its caches when weights are replaced in place, which no fingerprint sees; so
        from here on this engine's blocks have a namespace private to this process. False (and
        nothing done) while blocks are being loaded.
        """
        if self._loading:
            return False
        self._pool.clear()
        for state in self._states.values():
            self._drop_claim(state)
            state.space = None  # its hashes stay, its blocks are of the old weights
            state.settled = True
        self._spaces.turn_private()
        return True

    def _settle(self, state: RequestState) -> None:
        """Finds out whose blocks a request's are, once that can be known."""
        if state.settled or not self._spaces.is_settled(state.request):
            return
        state.settled = True
        state.space = self._spaces.of(state.request)
        if not state.told:
            state.promise = self._desk.accept(state.request.kv_transfer_params, state.space)

    def _state(self, request: Any) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            step = self._facts.block_size // self._facts.hash_block_size
            state = RequestState(request, None, step, tenant_of(request.cache_salt))
            self._states[request.request_id] = state
        self._settle(state)
        return state

    def close(self) -> None:
        self._pool.close()
