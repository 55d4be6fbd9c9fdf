"""The instances behind the router: their health, load and prefixes, and the choice of one for a
prompt."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvrecall.engines.base import Role
from kvrecall.router.prefixes import PrefixMap, Prompt

log = logging.getLogger("kvrecall.router")

_FAILED_PROBES = 2  # in a row, before an instance counts as down


@dataclass(slots=True, eq=False)
class Instance:
    """One server. ``bit`` is its place in the masks of the prefix map; ``failed_probes`` counts
    those in a row."""

    url: str
    role: Role
    bit: int
    healthy: bool = False
    inflight: int = 0
    failed_probes: int = 0

    @property
    def name(self) -> str:
        """Host and port, for headers, metrics and messages."""
        return self.url.partition("://")[2]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a request of this instance."""
        self.inflight += 1
        try:
            yield
        finally:
            self.inflight -= 1


class Fleet:
    """All instances, by role. The best for a prompt is the healthy instance that holds most of it,
    unless it has more than ``imbalance`` requests in flight above the least busy one."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], imbalance: int) -> None:
        bits = (1 << place for place in itertools.count())
        self.prefill = tuple(Instance(url, Role.PREFILL, next(bits)) for url in prefill)
        self.decode = tuple(Instance(url, Role.DECODE, next(bits)) for url in decode)
        self.all = self.prefill + self.decode
        self.prefixes = PrefixMap()
        self._imbalance = imbalance
        self._prefill_turns, self._decode_turns = itertools.count(), itertools.count()

    @property
    def can_serve(self) -> bool:
        """Whether any instance is healthy; each can serve a request alone if necessary."""
        return any(instance.healthy for instance in self.all)

    def best_for_prefill(self, prompt: Prompt | None) -> list[Instance]:
        """The healthy prefill instances, best first."""
        return self._best(prompt, self.prefill, next(self._prefill_turns))

    def best_for_decode(self, prompt: Prompt | None) -> list[Instance]:
        """The healthy decode instances, best first, then the prefill instances as a fallback."""
        turn = next(self._decode_turns)
        return self._best(prompt, self.decode, turn) + self._best(prompt, self.prefill, turn)

    def _best(self, prompt: Prompt | None, among: Sequence[Instance], turn: int) -> list[Instance]:
        healthy = [instance for instance in among if instance.healthy]
        held = self.prefixes.held(prompt, [instance.bit for instance in healthy])
        bound = min((i.inflight for i in healthy), default=0) + self._imbalance

        def rank(place: int) -> tuple[bool, int, int, int]:
            one = healthy[place]
            equals_take_turns = (place - turn) % len(healthy)
            return one.inflight > bound, -held[one.bit], one.inflight, equals_take_turns

        return [healthy[place] for place in sorted(range(len(healthy)), key=rank)]

    def new_tokens(self, prompt: Prompt) -> float:
        """Tokens of a prompt that no instance is known to hold."""
        held = self.prefixes.held(prompt, [instance.bit for instance in self.all])
        return prompt.tokens - max(held.values(), default=0) * prompt.tokens_per_prefix

    def holds(self, instance: Instance, prompt: Prompt | None) -> bool:
        """Whether an instance is known to hold a prefix of ``prompt``."""
        return self.prefixes.held(prompt, [instance.bit])[instance.bit] > 0

    def computed(self, instance: Instance, prompt: Prompt | None) -> None:
        """Notes that ``instance`` has computed or loaded ``prompt``."""
        self.prefixes.note(prompt, instance.bit)

    def probed(self, instance: Instance, well: bool) -> None:
        """Notes whether ``instance`` answered its health probe."""
        instance.failed_probes = 0 if well else instance.failed_probes + 1
        if well and not instance.healthy:
            instance.healthy = True
            log.info("%s instance %s is up", instance.role, instance.url)
        elif instance.failed_probes >= _FAILED_PROBES:
            self.lost(instance, "it does not answer /health")

    def lost(self, instance: Instance, why: str) -> None:
        """Marks ``instance`` as down and forgets its prefixes."""
        if instance.healthy:
            instance.healthy = False
            self.prefixes.forget(instance.bit)
            log.warning("%s instance %s is down: %s", instance.role, instance.url, why)
