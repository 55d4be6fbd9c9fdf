"""Decides, in the scheduler, which blocks of long sequences leave the device.

A block leaves when the pool holds it in the arena and a lease keeps it there. The lease ends with
the sequence's stay in the batch: a preempted sequence comes back as any other, from the device's
prefix cache and the pool. Middle blocks of a prefix that is found in the pool do not come at all.

A pool service may die, and another one take its place. What has left the device by then stays
where it is: workers keep the dead one's arena mapped while sequences read it. Of such a sequence
nothing more leaves, so that all that has lies in one arena.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrecall.attention.settings import Regime, RetrievalSettings
from kvrecall.attention.split import Gate, Split, slots_of, split_of
from kvrecall.engines.vllm.attention.spec import Absence, Leave
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.connector.wire import Arrival, Departure, OffloadOrders
from kvrecall.pool.base import ArenaHandle, PoolClient, RecallState

PATIENCE = 64
"""Decoded tokens between two attempts to lease what the pool did not have."""


@dataclass(slots=True)
class _Stay:
    """A sequence past the offload boundary. Its middle blocks are counted from ``init``.

    ``offsets``: arena offsets of the leading middle blocks that are leased; ``gone``: how many of
    them have left the device. ``retry_at``: the length from which to lease more. ``over``: nothing
    more leaves, as the pool that has the others is gone.
    """

    init: int
    tickets: list[int] = field(default_factory=list)
    pending: int | None = None
    offsets: list[int] = field(default_factory=list)
    gone: int = 0
    retry_at: int = 0
    over: bool = False
    left: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    arrives: bool = False

    @property
    def news(self) -> bool:
        return bool(self.left or self.slots)


class Offloader:
    """The keeper of one engine's long sequences. Called from the engine's thread only."""

    def __init__(
        self,
        pool: PoolClient,
        settings: RetrievalSettings,
        block_size: int,
        gate: Gate,
        deadline_s: float,
        state_of: Callable[[str], RequestState | None],
        trusted: Callable[[RequestState, Sequence[int]], int],
    ) -> None:
        """``gate``: that of the workers. ``state_of``: the scheduler side's of a request.
        ``trusted``: how many of leased blocks, from the first on, may be read."""
        self._pool = pool
        self._settings = settings
        self._block_size = block_size
        self._gate = gate
        self._deadline_s = deadline_s
        self._state_of = state_of
        self._trusted = trusted
        self._stays: dict[str, _Stay] = {}
        self._expected: dict[str, tuple[_Stay, Absence]] = {}
        self._ended: list[str] = []
        self._arena: ArenaHandle | None = None
        self._out_of_reach: ArenaHandle | None = None

    # ---- as the scheduler side asks ------------------------------------------------------

    def expect(self, request_id: str, start: int, end: int) -> None:
        """Blocks ``[start, end)`` of a request that begins lie in the arena and are about to be
        loaded; those before are on the device. Leases what may stay there, if that is worth it."""
        if request_id in self._expected:
            if self._holds(self._expected[request_id][0]):
                return
            self.unexpect(request_id)
        state = self._state_of(request_id)
        if state is None or _is_open_ended(state) or not self._is_reachable:
            return
        split = self._split(state.request.num_tokens)
        last = 0 if split is None else min(end, split.local)
        if split is None or start >= last:
            return
        count = last - split.init
        slots = slots_of(split, count, self._settings)[1]
        if last < split.local and count <= 2 * slots:
            return
        keys = state.keys(last)
        parent = keys[split.init - 1] if split.init else None
        ticket = self._pool.acquire(keys[split.init :], self._deadline_s, parent, state.tenant)
        recall = self._pool.poll(ticket)
        if recall.state is RecallState.PENDING or len(recall.offsets) < count:
            self._pool.release(ticket)  # what is on the device is not in the arena
            return
        stay = _Stay(split.init, [ticket], offsets=list(recall.offsets), arrives=True)
        self._expected[request_id] = stay, Absence(split.init, last, slots)

    def unexpect(self, request_id: str) -> None:
        """Nothing is about to be loaded for the request. It may not have been expected."""
        stay, _ = self._expected.pop(request_id, (None, None))
        if stay is not None:
            self._release(stay)

    # ---- as vLLM's block manager asks ----------------------------------------------------

    def expected(self, request_id: str) -> Absence | None:
        _, what = self._expected.get(request_id, (None, None))
        return what

    def arrived(self, request_id: str, slots: Sequence[int]) -> None:
        stay, _ = self._expected.pop(request_id)
        stay.gone = len(stay.offsets)
        stay.slots.extend(slots)
        self._stays[request_id] = stay

    def review(self, request_id: str, tokens: int) -> Leave | None:
        split = self._split(tokens)
        state = self._state_of(request_id)
        if split is None or state is None or not _decodes(state, tokens):
            return None
        stay = self._stays.get(request_id)
        if stay is None:
            stay = self._stays[request_id] = _Stay(split.init)
        if stay.over or not self._is_reachable:
            return None
        if stay.gone < split.middle:
            self._lease(stay, state, split, tokens)
        safe = min(len(stay.offsets), split.middle)
        least, slots = slots_of(split, safe, self._settings)
        if safe <= stay.gone or not (safe == split.middle or safe > 2 * slots):
            return None
        if not self._holds(stay):
            return None
        return Leave(split.init + stay.gone, split.init + safe, least, slots)

    def left(self, request_id: str, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        stay = self._stays[request_id]
        stay.left.extend(block_ids)
        stay.slots.extend(slots)
        stay.gone += len(block_ids)

    def least_slots(self, request_id: str, tokens: int) -> int:
        stay = self._stays.get(request_id)
        if stay is None or not stay.gone:
            return 0
        split = split_of(tokens, self._block_size, self._settings)
        return slots_of(split, stay.gone, self._settings)[0]

    def ended(self, request_id: str) -> None:
        stay = self._stays.pop(request_id, None)
        if stay is None:
            return
        self._release(stay)
        if stay.gone:
            self._ended.append(request_id)

    def _release(self, stay: _Stay) -> None:
        for ticket in [*stay.tickets, *([] if stay.pending is None else [stay.pending])]:
            self._pool.release(ticket)

    # ---- as the connector asks -----------------------------------------------------------

    def out_of_reach(self) -> None:
        """The workers cannot read the last step's arena: nothing more goes there."""
        self._out_of_reach = self._arena

    def orders(
        self,
        scheduled: Mapping[str, int],
        block_ids: Callable[[str], Sequence[int]],
        arena: ArenaHandle,
    ) -> OffloadOrders | None:
        """What the workers must know before the step, whose requests are ``scheduled``, and whose
        orders name that arena."""
        self._arena = arena
        rows: dict[int, str] = {}
        departures: list[Departure] = []
        arrivals: list[Arrival] = []
        for request_id, stay in self._stays.items():
            if stay.arrives:
                arrivals.append(_arrival(request_id, stay))
            elif stay.news:
                departures.append(self._departure(request_id, stay))
            state = self._state_of(request_id)
            if stay.gone and state is not None and request_id in scheduled:
                last = state.request.num_computed_tokens + scheduled[request_id] - 1
                rows[block_ids(request_id)[last // self._block_size]] = request_id
        ended, self._ended = self._ended, []
        if not (departures or arrivals or rows or ended):
            return None
        return OffloadOrders(departures, rows, ended, arrivals)

    def _departure(self, request_id: str, stay: _Stay) -> Departure:
        offsets = stay.offsets[stay.gone - len(stay.left) : stay.gone]
        departure = Departure(
            request_id, stay.init, tuple(stay.left), tuple(offsets), tuple(stay.slots)
        )
        stay.left, stay.slots = [], []
        return departure

    # ---- leases --------------------------------------------------------------------------

    def _split(self, tokens: int) -> Split | None:
        """None unless sequences of that length leave the device."""
        if self._settings.regime(tokens) is not Regime.OFFLOAD:
            return None
        split = split_of(tokens, self._block_size, self._settings)
        return split if self._gate.passes(tokens, split) else None

    @property
    def _is_reachable(self) -> bool:
        return self._out_of_reach is None or self._out_of_reach != self._arena

    def _holds(self, stay: _Stay) -> bool:
        """Whether all that was leased is, so that its offsets are those of the step's arena. If
        not, the pool that had it is gone: then what has not left is leased anew, if none has."""
        if all(self._pool.poll(ticket).offsets for ticket in stay.tickets):
            return True
        if stay.gone:
            stay.over = True
        else:
            self._release(stay)
            stay.tickets, stay.pending, stay.offsets = [], None, []
        return False

    def _lease(self, stay: _Stay, state: RequestState, split: Split, tokens: int) -> None:
        """Leases middle blocks beyond those leased already, as far as the pool has them."""
        if stay.pending is None:
            first = split.init + len(stay.offsets)
            if first >= split.local or tokens < stay.retry_at:
                return
            if not self._holds(stay):
                return
            chain = state.keys(split.local)
            parent = chain[first - 1] if 0 < first <= len(chain) else None
            keys, deadline = chain[first:], self._deadline_s
            stay.pending = self._pool.acquire(keys, deadline, parent, state.tenant)
        recall = self._pool.poll(stay.pending)
        if recall.state is RecallState.PENDING:
            return
        offsets = recall.offsets[: self._trusted(state, recall.offsets)]
        if offsets:
            stay.tickets.append(stay.pending)
        else:
            self._pool.release(stay.pending)
        stay.pending = None
        stay.offsets.extend(offsets)
        if split.init + len(stay.offsets) < split.local:
            stay.retry_at = tokens + PATIENCE


def _arrival(request_id: str, stay: _Stay) -> Arrival:
    arrival = Arrival(request_id, stay.init, tuple(stay.offsets), tuple(stay.slots))
    stay.slots, stay.arrives = [], False
    return arrival


def _decodes(state: RequestState, tokens: int) -> bool:
    """Whether the request's next step is to compute one token that it has sampled."""
    request = state.request
    return (
        request.status.name == "RUNNING"
        and tokens == request.num_tokens > request.num_prompt_tokens
        and not _is_open_ended(state)
    )


def _is_open_ended(state: RequestState) -> bool:
    """Whether its prompt may go on after it was answered."""
    return bool(getattr(state.request, "resumable", False))
