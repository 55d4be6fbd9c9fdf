"""Scheduler side of offloading: decides which blocks of long sequences leave the device. vLLM's
block manager, which returns them, asks for it (``compat.offloadable``).

A block leaves when the pool holds it in the arena and a lease keeps it there. In exchange the
sequence holds slots: device blocks without tokens of their own, into which the worker recalls what
each layer and KV head needs. Lease and slots end with the sequence's stay in the batch: a preempted
sequence comes back like any other, from the device's prefix cache and the pool. Middle blocks of a
prefix that is found in the pool are not loaded to the device at all.

With asynchronous scheduling the scheduler is a step ahead of the workers. It chooses blocks by the
tokens whose step is done (vLLM's ``processed_computed_tokens``), which steps under way still find
on the device. Leases of a preempted sequence last until the results of its steps under way are in.

If a pool service dies, blocks that have left the device stay in its arena, which workers keep
mapped while sequences read it. Such a sequence offloads no further blocks: all are in one arena.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrecall.attention.selection import Gate, Split, slots_of, split_of
from kvrecall.attention.settings import Regime, RetrievalSettings
from kvrecall.engines.vllm.compat.offloadable import BlockPlanner, Offload
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.wire import Arrival, Departure, OffloadOrders
from kvrecall.pool.base import ArenaHandle, PoolClient, RecallState

PATIENCE = 64
"""Decoded tokens between two attempts to lease blocks that the pool lacked."""
_NO_ROOM = (
    "kvrecall: retrieval: %d of %d middle blocks of a sequence of %d tokens stay on the device: "
    "the pool's host memory lacks them; raise host_size (kvrecall plan MODEL --context %d gives it)"
)
logger = logging.getLogger("vllm.kvrecall")


@dataclass(slots=True)
class _Offloaded:
    """A sequence past the offload boundary. Its middle blocks are counted from ``init``.
    ``offsets``: in the arena, of the leading middle blocks that are leased, of which ``gone`` have
    left the device. ``retry_at``: the length from which to lease more. ``over``: no more blocks
    leave, as the pool that has the others is gone. ``told``: _NO_ROOM is logged."""

    init: int
    tickets: list[int] = field(default_factory=list)
    pending: int | None = None
    offsets: list[int] = field(default_factory=list)
    gone: int = 0
    retry_at: int = 0
    over: bool = False
    told: bool = False
    left: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    arrives: bool = False


StateOf = Callable[[str], RequestState | None]
Trusted = Callable[[RequestState, Sequence[int]], int]


class OffloadPlanner(BlockPlanner):
    """Plans which blocks of one engine's long sequences leave the device, in its thread."""

    def __init__(
        self,
        pool: PoolClient,
        settings: RetrievalSettings,
        block_size: int,
        gate: Gate,
        deadline_s: float,
        state_of: StateOf,
        trusted: Trusted,
        in_place: bool = False,
    ) -> None:
        """``gate``: the workers'. ``state_of``: the scheduler side's state of a request.
        ``trusted``: number of leased blocks, from the first on, that may be read. ``in_place``:
        workers read offloaded blocks in the arena, without slots."""
        self._state_of = state_of
        self._trusted = trusted
        self._pool = pool
        self._settings = settings
        self._block_size = block_size
        self._gate = gate
        self._deadline_s = deadline_s
        self._in_place = in_place
        self._sequences: dict[str, _Offloaded] = {}
        self._expected: dict[str, tuple[_Offloaded, Offload]] = {}
        self._ended: list[str] = []
        self._under_way: list[tuple[Any, _Offloaded]] = []  # preempted requests with steps to come
        self._arena: ArenaHandle | None = None
        self._out_of_reach: ArenaHandle | None = None

    # ---- as the scheduler side asks ------------------------------------------------------

    def expect(self, request_id: str, start: int, end: int) -> None:
        """Blocks ``[start, end)`` of a starting request are in the arena and about to be loaded;
        earlier ones are on the device. Leases those that may stay there, if that is worthwhile."""
        if request_id in self._expected:
            if self._holds(self._expected[request_id][0]):
                return
            self.unexpect(request_id)
        state = self._state_of(request_id)
        if state is None or _is_open_ended(state) or not self._is_reachable:
            return
        split = self._split(state, state.request.num_tokens)
        last = 0 if split is None else min(end, split.local)
        if split is None or last <= max(start, split.init):
            return
        count = last - split.init
        slots = self._slots_of(split, count)[1]
        if last < split.local and count <= 2 * slots:
            return
        keys = state.keys(last)
        parent = keys[split.init - 1] if split.init else None
        ticket = self._pool.acquire(keys[split.init :], self._deadline_s, parent, state.tenant)
        recall = self._pool.poll(ticket)
        if recall.state is RecallState.PENDING or self._trusted(state, recall.offsets) < count:
            self._pool.release(ticket)  # what is on the device is not in the arena, or another's
            return
        sequence = _Offloaded(split.init, [ticket], offsets=list(recall.offsets), arrives=True)
        self._expected[request_id] = sequence, Offload(split.init, last, slots, slots)

    def unexpect(self, request_id: str) -> None:
        """No block is about to be loaded for the request. It may not have been expected."""
        sequence, _ = self._expected.pop(request_id, (None, None))
        if sequence is not None:
            self._release(sequence)

    # ---- as vLLM's block manager asks ----------------------------------------------------

    def left_in_pool(self, request_id: str) -> Offload | None:
        _, what = self._expected.get(request_id, (None, None))
        return what

    def arrived(self, request_id: str, slots: Sequence[int]) -> None:
        sequence, _ = self._expected.pop(request_id)
        sequence.gone = len(sequence.offsets)
        sequence.slots.extend(slots)
        self._sequences[request_id] = sequence

    def review(self, request_id: str, tokens: int) -> Offload | None:
        # None while stores read its device blocks: the pool may have a block from a store that
        # others share before it has this sequence's own.
        state = self._state_of(request_id)
        split = None if state is None else self._split(state, tokens)
        if split is None or state is None or not _decodes(state, tokens):
            return None
        sequence = self._sequences.get(request_id)
        if sequence is None:
            sequence = self._sequences[request_id] = _Offloaded(split.init)
        if sequence.over or not self._is_reachable:
            return None
        if sequence.gone < split.middle:
            self._lease(sequence, state, split, tokens)
        safe = min(len(sequence.offsets), split.middle)
        least, slots = self._slots_of(split, safe)
        if safe <= sequence.gone or not (safe == split.middle or safe > 2 * slots):
            return None
        if state.saving.open or not self._holds(sequence):
            return None
        return Offload(split.init + sequence.gone, split.init + safe, least, slots)

    def left(self, request_id: str, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        sequence = self._sequences[request_id]
        sequence.left.extend(block_ids)
        sequence.slots.extend(slots)
        sequence.gone += len(block_ids)

    def least_slots(self, request_id: str, tokens: int) -> int:
        sequence = self._sequences.get(request_id)
        if sequence is None or not sequence.gone:
            return 0
        split = split_of(tokens, self._block_size, self._settings)
        return self._slots_of(split, sequence.gone)[0]

    def ended(self, request_id: str) -> None:
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        state = self._state_of(request_id)
        if sequence.gone and state is not None and state.request.num_in_flight_tokens:
            self._under_way.append((state.request, sequence))
        else:
            self._release(sequence)
        if sequence.gone:
            self._ended.append(request_id)

    def _release_done(self) -> None:
        """Ends the leases of preempted sequences whose last results are in, or will be dropped."""
        still = []
        for request, sequence in self._under_way:
            counts = request.num_stale_output_tokens and not request.drop_stale_output
            if counts and not request.is_finished():
                still.append((request, sequence))
            else:
                self._release(sequence)
        self._under_way = still

    def _release(self, sequence: _Offloaded) -> None:
        pending = () if sequence.pending is None else (sequence.pending,)
        for ticket in (*sequence.tickets, *pending):
            self._pool.release(ticket)

    # ---- as the connector asks -----------------------------------------------------------

    def out_of_reach(self) -> None:
        """The workers cannot read the last step's arena: no more blocks go there."""
        self._out_of_reach = self._arena

    def orders(
        self,
        scheduled: Mapping[str, int],
        block_ids: Callable[[str], Sequence[int]],
        arena: ArenaHandle,
    ) -> OffloadOrders | None:
        """The orders for the workers before a step of ``scheduled`` requests, on that arena."""
        self._arena = arena
        self._release_done()
        rows: dict[int, str] = {}
        departures: list[Departure] = []
        arrivals: list[Arrival] = []
        for request_id, sequence in self._sequences.items():
            init, left, slots = sequence.init, tuple(sequence.left), tuple(sequence.slots)
            if sequence.arrives:
                arrivals.append(Arrival(request_id, init, tuple(sequence.offsets), slots))
                sequence.arrives, sequence.slots = False, []
            elif left or slots:
                offsets = tuple(sequence.offsets[sequence.gone - len(left) : sequence.gone])
                departures.append(Departure(request_id, init, left, offsets, slots))
                sequence.left, sequence.slots = [], []
            state = self._state_of(request_id)
            if sequence.gone and state is not None and request_id in scheduled:
                last = state.request.num_computed_tokens + scheduled[request_id] - 1
                rows[block_ids(request_id)[last // self._block_size]] = request_id
        ended, self._ended = self._ended, []
        if not (departures or arrivals or rows or ended):
            return None
        return OffloadOrders(departures, rows, ended, arrivals)

    # ---- leases --------------------------------------------------------------------------

    def _split(self, state: RequestState, tokens: int) -> Split | None:
        """None unless the sequence leaves the device when it is that long."""
        if self._settings.regime(tokens, state.request.num_prompt_tokens) is not Regime.OFFLOAD:
            return None
        split = split_of(tokens, self._block_size, self._settings)
        return split if self._gate.passes(tokens, split) else None

    def _slots_of(self, split: Split, offloaded: int) -> tuple[int, int]:
        return (0, 0) if self._in_place else slots_of(split, offloaded, self._settings)

    @property
    def _is_reachable(self) -> bool:
        return self._out_of_reach is None or self._out_of_reach != self._arena

    def _holds(self, sequence: _Offloaded) -> bool:
        """Whether all leased blocks still are, so that their offsets belong to the step's arena. If
        not, the pool that had them is gone: its blocks are leased again, if none has left."""
        if all(self._pool.poll(ticket).offsets for ticket in sequence.tickets):
            return True
        if sequence.gone:
            sequence.over = True
        else:
            self._release(sequence)
            sequence.tickets, sequence.pending, sequence.offsets = [], None, []
        return False

    def _lease(self, sequence: _Offloaded, state: RequestState, split: Split, tokens: int) -> None:
        """Leases further middle blocks, as far as the pool has them."""
        if sequence.pending is None:
            first = split.init + len(sequence.offsets)
            if first >= split.local or tokens < sequence.retry_at:
                return
            if not self._holds(sequence):
                return
            chain = state.keys(split.local)
            parent = chain[first - 1] if 0 < first <= len(chain) else None
            keys, deadline = chain[first:], self._deadline_s
            sequence.pending = self._pool.acquire(keys, deadline, parent, state.tenant)
        recall = self._pool.poll(sequence.pending)
        if recall.state is RecallState.PENDING:
            return
        offsets = recall.offsets[: self._trusted(state, recall.offsets)]
        if offsets:
            sequence.tickets.append(sequence.pending)
        else:
            self._pool.release(sequence.pending)
        sequence.pending = None
        sequence.offsets.extend(offsets)
        if (missing := split.local - split.init - len(sequence.offsets)) > 0:
            if sequence.retry_at and not sequence.told:  # at first they may be on their way
                logger.warning(_NO_ROOM, missing, split.middle, tokens, tokens)
                sequence.told = True
            sequence.retry_at = tokens + PATIENCE


def _decodes(state: RequestState, tokens: int) -> bool:
    """Whether the request's next step is to compute one token that it has sampled."""
    request = state.request
    return (
        request.status.name == "RUNNING"
        and tokens == request.num_tokens > request.num_prompt_tokens
        and not _is_open_ended(state)
    )


def _is_open_ended(state: RequestState) -> bool:
    """Whether its prompt may continue after the answer."""
    return bool(getattr(state.request, "resumable", False))
