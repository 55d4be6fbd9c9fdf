"""What the scheduler side tells of its work: to metrics, reasons of misses, spans of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvrecall.engines.vllm.connector.handover import Handover
from kvrecall.engines.vllm.connector.hit import Hit, Lookup
from kvrecall.engines.vllm.connector.load import LoadPlan, PrefixLoad
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.engines.vllm.wire import StepReport


class SchedulerEvents:
    """Observes the scheduler side, in its thread, and changes nothing of it; this one ignores all.
    Does not wait, and does not raise."""

    def admitted(self, state: RequestState) -> None:
        """A request entered the engine."""

    def considered(self, state: RequestState) -> None:
        """vLLM asks what the pool has of it."""

    def waited(self, state: RequestState, outcome: Handover, tokens: int) -> None:
        """It looked for ``tokens`` tokens that a prefill instance promised."""

    def looked_up(self, state: RequestState, began: float, blocks: int, search: Lookup) -> None:
        """The pool was asked for ``blocks`` blocks of the chain since ``began``."""

    def lookup_late(self, state: RequestState, end: int) -> None:
        """A tier beyond this host did not answer in time: the hit ends at ``end``."""

    def declined(self, state: RequestState, hit: Hit, shorter: Hit | None, plan: LoadPlan) -> None:
        """Of a hit only the ``shorter`` one is loaded: the rest is faster to compute."""

    def load_over(self, state: RequestState, load: PrefixLoad) -> None:
        """Nothing more of the load is waited for; if ``load.offsets`` is None it was dropped."""

    def audited(self, state: RequestState, end: int) -> None:
        """Its hit ends at ``end``: the blocks behind are computed, to be compared."""

    def load_ordered(self, state: RequestState, copies: Sequence[Copy]) -> None:
        """The workers are to copy these blocks to the device."""

    def sources_known(self, state: RequestState) -> None:
        """The sources of its prompt are known."""

    def step_begins(self, is_idle: bool) -> None:
        """A step's orders are made next. ``is_idle``: it computes nothing."""

    def computes(self, states: Sequence[RequestState], scheduled: Mapping[str, int]) -> None:
        """The step computes so many tokens of each of these requests."""

    def store_ordered(self, state: RequestState, group: int, blocks: int) -> None:
        """The workers are to copy so many of its blocks of a KV group to the arena."""

    def changes(self) -> None:
        """What the pool or the engine has may change next."""

    def reported(self, report: StepReport) -> None:
        """The workers' report of a step."""

    def load_done(
        self, state: RequestState | None, load: PrefixLoad, failed: bool, copied_s: float | None
    ) -> None:
        """Every rank has reported a load. ``state``: None if the request has ended. ``copied_s``:
        seconds of the device, the slowest rank's."""

    def load_failed(self, state: RequestState) -> None:
        """Its blocks arrived, and the workers could not copy them."""

    def store_done(self, state: RequestState, failed: bool) -> None:
        """Every rank has reported a store of its blocks."""

    def finished(self, state: RequestState, final: int) -> None:
        """It is over; its first ``final`` tokens are."""

    def counted(self, name: str, amount: int = 1) -> None:
        """Something with a counter of that name happened."""


class Observers(SchedulerEvents):
    """Several observers as one, in this order. An event that none of them observes costs a call of
    nothing."""

    def __init__(self, observers: Sequence[SchedulerEvents]) -> None:
        for event in [name for name in vars(SchedulerEvents) if not name.startswith("_")]:
            ignore = getattr(SchedulerEvents, event)
            heard = [
                getattr(one, event) for one in observers if getattr(type(one), event) is not ignore
            ]
            if heard:
                setattr(self, event, heard[0] if len(heard) == 1 else _each(heard))


def _each(heard: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def tell(*args: Any) -> None:
        for event in heard:
            event(*args)

    return tell
