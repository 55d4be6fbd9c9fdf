"""Chooses instances: the one that holds most of the prompt, unless it is much busier."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvrecall.router.instance import Fleet, Instance
from kvrecall.router.prefixes import PrefixMap, Prompt


class Chooser:
    """Over a fleet and what the router remembers of prefixes."""

    def __init__(self, fleet: Fleet, prefixes: PrefixMap, imbalance: int) -> None:
        self._fleet = fleet
        self._prefixes = prefixes
        self._imbalance = imbalance
        self._turn = itertools.count()

    def order(self, prompt: Prompt | None, among: Sequence[Instance]) -> list[Instance]:
        """The healthy ones of ``among``, best first."""
        healthy = [instance for instance in among if instance.healthy]
        if not healthy:
            return []
        held = self._prefixes.held(prompt, healthy)
        bound = min(instance.inflight for instance in healthy) + self._imbalance
        turn = next(self._turn)
        places = {instance: (place - turn) % len(healthy) for place, instance in enumerate(healthy)}

        def rank(instance: Instance) -> tuple[bool, int, int, int]:
            much_busier = instance.inflight > bound
            return much_busier, -held[instance], instance.inflight, places[instance]

        return sorted(healthy, key=rank)

    def for_prefill(self, prompt: Prompt | None) -> list[Instance]:
        return self.order(prompt, self._fleet.prefill)

    def for_decode(self, prompt: Prompt | None) -> list[Instance]:
        """Decode instances, and behind them, so that no request fails that could be served,
        prefill instances."""
        decode = self.order(prompt, self._fleet.decode)
        return decode + self.order(prompt, self._fleet.prefill)

    def new_tokens(self, prompt: Prompt) -> float:
        """Tokens of a prompt that, as far as is known, no instance has computed."""
        held = max(self._prefixes.held(prompt, self._fleet.all).values(), default=0)
        return prompt.tokens - held * prompt.tokens_per_prefix
