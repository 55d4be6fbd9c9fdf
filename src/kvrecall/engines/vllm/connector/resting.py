"""Which requests of a step have work for the scheduler side."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvrecall.engines.vllm.connector.request import RequestState


class AwakeRequests:
    """The requests of the engine, of which those that decode within a block *rest*: there may be
    hundreds of them in every step, and they cost nothing before the tick at which they may complete
    it. In each step as many ticks pass as the fastest of them has tokens."""

    def __init__(self, states: Mapping[str, RequestState]) -> None:
        self._states = states
        self._awake: dict[str, RequestState] = {}
        self._until: dict[str, int] = {}  # tick that wakes each of the others
        self._resting: dict[int, list[str]] = {}  # by that tick; some woke before
        self._ticks = 0

    def of_step(
        self, scheduled: Mapping[str, int], tokens: int, offered: Collection[str]
    ) -> list[RequestState]:
        """The requests of a step of so many ``tokens`` that have work: those that are new or
        compute their prompt, complete a block, or offer a state."""
        awake, now = self._awake, self._ticks
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
                if self._until.get(request_id) == tick:
                    del self._until[request_id]
                    rested = awake[request_id] = self._states[request_id]
                    due += [rested] if request_id in scheduled else []
        for request_id in offered:
            if request_id in self._until:
                due.append(self.wake(request_id))
        return due

    def wake(self, request_id: str) -> RequestState:
        """The request has work, whether it rests or not."""
        self._until.pop(request_id, None)
        state = self._awake[request_id] = self._states[request_id]
        return state

    def rest(self, state: RequestState, tokens: int) -> None:
        """A decoding request has no work before it has that many further tokens. Rejected
        speculation counts as tokens, too, so a block's end is not missed."""
        request_id = state.request.request_id
        tick = self._until[request_id] = self._ticks + tokens
        del self._awake[request_id]
        self._resting.setdefault(tick, []).append(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._awake.pop(request_id, None)
        self._until.pop(request_id, None)
