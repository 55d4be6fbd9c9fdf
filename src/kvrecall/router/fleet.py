"""The instances behind the router: their health, load and what they hold, and the choice of one for
a prompt."""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import logging
import operator
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from kvrecall.block import TierName
from kvrecall.engines.base import Role
from kvrecall.events.holdings import REMOTE, HashRule, Holdings, tier_of
from kvrecall.events.subscriber import Publisher, Subscription, Subscriptions
from kvrecall.events.wire import BlockHash
from kvrecall.router.prefixes import PrefixMap, Prompt

log = logging.getLogger("kvrecall.router")
T = TypeVar("T")

_FAILED_PROBES = 2  # in a row, before an instance counts as down
_SILENT_PROBES = 4  # in a row, before what waits there is no longer waited for

COST = {
    TierName.DEVICE: 0.0,
    TierName.HOST: 0.05,
    TierName.DISK: 0.15,
    TierName.REMOTE: 0.3,
}
"""What recalling a token from a tier costs, in tokens computed. Measured on two processor cores,
where computing is slow (docs/benchmarks.md): 0.003, 0.01, 0.03. On a GPU computing is ten and more
times faster, and a disk or network is not."""

_WAITS = 0.25
"""What a token that waits at an instance weighs against one to compute. It delays this prompt only;
a token computed although another instance holds it delays all that come after it, and takes room
from their blocks."""


@dataclass(frozen=True, slots=True)
class Address:
    """An instance as given: its base URL, and who publishes KV events of what it can recall: itself
    (one publisher for each rank of data parallelism), and its node's pool service."""

    url: str
    events: tuple[Publisher, ...] = ()
    pool: Publisher | None = None


@dataclass(slots=True, eq=False)
class Instance:
    """One server. ``bit`` is its place in the masks of the prefix map; ``failed_probes`` counts
    those in a row, ``heard`` its replies to requests.

    ``waiting``: the cost, in tokens computed, of the prompts that it was sent and has not answered.
    ``engine``, ``pool``: what its publishers and those of its pool service say. ``serves``: names
    of models and adapters, empty if it did not say; ``models``: those without an adapter.
    ``way``: the routers before an engine, if it is a router: its Via.
    ``leaves``: it gets no further requests. ``calls``: what waits for its first byte, and the
    instances that can take its place, None if there is another way.
    """

    address: Address
    role: Role
    bit: int
    engine: tuple[Subscription, ...] = ()
    pool: tuple[Subscription, ...] = ()
    healthy: bool = False
    inflight: int = 0
    waiting: float = 0.0
    failed_probes: int = 0
    heard: int = 0
    serves: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    way: str = ""
    leaves: bool = False
    calls: dict[asyncio.Timeout, Sequence[Instance] | None] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def name(self) -> str:
        """Host and port, for headers, metrics and messages."""
        return self.url.partition("://")[2]

    @property
    def word(self) -> str:
        """Its role, for headers and metrics."""
        return "engine" if self.role is Role.BOTH else str(self.role)

    @property
    def rule(self) -> HashRule | None:
        """How it hashes blocks, None as long as that is not known."""
        for one in self.engine:
            if one.holdings.rule is not None:
                return one.holdings.rule
        return None

    @property
    def holdings(self) -> list[Holdings]:
        """All that it can recall by itself or from its pool service."""
        return [one.holdings for one in (*self.engine, *self.pool)]

    def less_busy(self) -> None:
        """One of the requests in flight has ended."""
        self.inflight -= 1

    async def answer(
        self, work: Awaitable[T], cost: float, others: Sequence[Instance] | None = None
    ) -> T:
        """What a request comes to. Until then, or its failure, it counts as work that waits. Ends
        it with TimeoutError if the instance turns out to hang while any of ``others`` is up; None:
        there is another way, whatever is up."""
        self.waiting += cost
        try:
            async with asyncio.timeout(None) as call:
                self.calls[call] = others
                return await work
        finally:
            del self.calls[call]
            # what rounding leaves would decide between equals for good
            self.waiting = max(0.0, self.waiting - cost) if self.calls else 0.0

    def hangs(self) -> None:
        """It has not answered several probes in a row."""
        for call, others in self.calls.items():
            has_other = others is None or any(one.healthy for one in others)
            if has_other and not call.expired():
                call.reschedule(0)


class _Shared:
    """What one choice has asked of the stores that instances share, by the stores' names.

    ``alone``: what an instance recalls that has nothing else, blocks by tier; also by the prompt's
    first block, which differs where instances hash in other ways.
    """

    def __init__(self, publishers: Iterable[Holdings]) -> None:
        self.alone: dict[tuple[frozenset[str], BlockHash], Mapping[TierName, int]] = {}
        self._all = [one for one in publishers if one.stores]
        self._of: dict[frozenset[str], list[Holdings]] = {}
        self._has: dict[tuple[frozenset[str], BlockHash], bool] = {}

    def has(self, stores: frozenset[str], block: BlockHash) -> bool:
        """Whether any publisher put ``block`` into any of ``stores``."""
        known = self._has.get((stores, block))
        if known is None:
            if stores not in self._of:
                self._of[stores] = [one for one in self._all if stores & one.stores]
            of = self._of[stores]
            place = next((at for at, one in enumerate(of) if one.mask(block) & REMOTE), None)
            if place:  # what put this there put what follows, as a rule
                of[0], of[place] = of[place], of[0]
            known = self._has[stores, block] = place is not None
        return known


Expected = Mapping[TierName, int]
"""Tokens of a prompt that an instance is expected to recall, by tier."""


class Fleet:
    """All instances. The best for a prompt is the healthy one with the least work until the
    prompt's first token: tokens to compute, tokens to recall at the cost of their tier, and a share
    of what waits there; unless it has more than ``imbalance`` requests in flight above the least
    busy one. Of equals, the prompt's beginning decides, or their turn.

    ``subscriptions``: makes those of the publishers in the addresses.
    """

    def __init__(
        self,
        prefill: Sequence[Address],
        decode: Sequence[Address],
        imbalance: int,
        engines: Sequence[Address] = (),
        subscriptions: Subscriptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``engines``: instances without roles; they take the part of decode instances."""
        self._subscriptions = subscriptions or Subscriptions(lambda _: None)
        self.prefill: tuple[Instance, ...] = ()
        self.decode: tuple[Instance, ...] = ()
        self._leaving: list[Instance] = []
        self.prefixes = PrefixMap()
        self._imbalance = imbalance
        self._clock = clock
        self._prefill_turns, self._decode_turns = itertools.count(), itertools.count()
        self.consist_of(prefill, decode, engines)

    def consist_of(
        self, prefill: Sequence[Address], decode: Sequence[Address], engines: Sequence[Address]
    ) -> None:
        """These are the instances from now on. Those that are there already stay as they are; new
        ones are used once they answer a probe; the others get no further requests, and leave when
        those that they have are answered."""
        before = {(one.address, one.role): one for one in self.all}
        up = {one.url: one for one in self.all if one.healthy}

        def made(role: Role, addresses: Sequence[Address]) -> tuple[Instance, ...]:
            known = [(one, before.pop((one, role), None)) for one in addresses]
            return tuple(there or self._instance(one, role) for one, there in known)

        self.prefill = made(Role.PREFILL, prefill)
        self.decode = made(Role.DECODE, decode) + made(Role.BOTH, engines)
        for one in self.all:  # also in another role, or with other publishers
            if same := up.get(one.url):
                one.healthy, one.way = True, same.way
                one.serves, one.models = same.serves, same.models
        for gone in before.values():
            gone.leaves = True
            self.prefixes.forget(gone.bit)
            self._leaving.append(gone)
            log.info("%s instance %s leaves", gone.role, gone.url)
        followed = (one for each in self.all for one in (*each.engine, *each.pool))
        self._subscriptions.keep({one.publisher for one in followed})

    def _instance(self, address: Address, role: Role) -> Instance:
        follow, bit = self._subscriptions.follow, self.prefixes.holder()
        pool = () if address.pool is None else (follow(address.pool),)
        return Instance(address, role, bit, tuple(map(follow, address.events)), pool)

    @property
    def all(self) -> tuple[Instance, ...]:
        """Those that get requests."""
        return self.prefill + self.decode

    @property
    def leaving(self) -> list[Instance]:
        """Instances that still answer what they were sent before they left."""
        self._leaving = [one for one in self._leaving if one.inflight]
        return self._leaving

    @property
    def can_serve(self) -> bool:
        """Whether any instance is healthy; each can serve a request alone if necessary."""
        return any(instance.healthy for instance in self.all)

    @property
    def way(self) -> str:
        """The shortest to an engine that is up."""
        return min((one.way for one in self.all if one.healthy), key=len, default="")

    @property
    def least_block(self) -> int | None:
        """Tokens of the smallest block of instances whose hashes are known; None if there is
        none."""
        return min([rule.block_size for rule in self.rules], default=None)

    @property
    def rules(self) -> set[HashRule]:
        """How the healthy instances hash blocks, as far as that is known."""
        if not self._subscriptions.of:
            return set()  # where none publishes, none is asked
        return {rule for one in self.all if one.healthy and (rule := one.rule)}

    @property
    def models(self) -> frozenset[str]:
        """Names of models without an adapter, of instances that publish events."""
        return frozenset().union(*(one.models for one in self.all))

    def of_model(self, model: object, among: Sequence[Instance]) -> Sequence[Instance]:
        """Those that serve the model, or all if none is known to: an engine may have got an adapter
        that it did not list yet, and knows best what to answer otherwise."""
        serving = [one for one in among if model in one.serves] if isinstance(model, str) else ()
        return serving or among

    def least_busy(self, model: object = None) -> Instance | None:
        """The healthy instance of a model with the fewest requests; one that may be about to be
        down last."""
        healthy = [one for one in self.of_model(model, self.all) if one.healthy]
        return min(healthy, key=lambda one: (one.failed_probes, one.inflight), default=None)

    def best_for_prefill(
        self, prompt: Prompt | None, model: object = None, most: int = sys.maxsize
    ) -> list[Instance]:
        """The healthy prefill instances of a model, best first, at most so many."""
        among = self.of_model(model, self.prefill)
        return self.ranked(prompt, among, next(self._prefill_turns), most)

    def best_for_decode(
        self, prompt: Prompt | None, model: object = None, most: int = sys.maxsize
    ) -> list[Instance]:
        """The same of decode instances, then the prefill instances as a fallback."""
        turn = next(self._decode_turns)
        parts = (self.of_model(model, part) for part in (self.decode, self.prefill))
        return [one for part in parts for one in self.ranked(prompt, part, turn, most)][:most]

    def ranked(
        self, prompt: Prompt | None, among: Sequence[Instance], turn: int, most: int
    ) -> list[Instance]:
        """The healthy ones of some instances, best first, at most ``most``; ``turn``: the number of
        the choice."""
        healthy = [instance for instance in among if instance.healthy]
        if not healthy:
            return []
        held, shared = self.prefixes.held(prompt), self._shared()
        by_guess, of_nothing = prompt is None or prompt.ids is None, self.cost_of(prompt, {})
        bound = min([one.inflight for one in healthy]) + self._imbalance
        head = int.from_bytes(bytes(prompt.prefixes[0])[:8]) if prompt and prompt.prefixes else None

        ranks = []
        for place, one in enumerate(healthy):
            if head is None:
                of_equals = (place - turn) % len(healthy)  # they take turns
            else:  # routers beside each other choose the same one
                of_equals = xxh3_64_intdigest(one.address.url.encode(), head)
            cost = of_nothing
            if not by_guess or one.bit in held:
                cost = self.cost_of(prompt, self.expected(one, prompt, shared))
            cost += _WAITS * one.waiting
            ranks.append((one.inflight > bound, cost, one.inflight, of_equals, place))
        return [healthy[rank[-1]] for rank in heapq.nsmallest(most, ranks)]

    def cost_of(self, prompt: Prompt | None, expected: Expected) -> float:
        """The work until a prompt's first token, in tokens computed, at an instance that is
        expected to recall so much."""
        if prompt is None or not expected:
            return 0.0 if prompt is None else float(prompt.tokens)
        new = prompt.tokens - sum(expected.values())
        return new + sum(COST[tier] * count for tier, count in expected.items())

    def expected(
        self, instance: Instance, prompt: Prompt | None, shared: _Shared | None = None
    ) -> Expected:
        """What ``instance`` recalls of a prompt: as its events say, or, where there are none, if it
        still has everything that it was sent. ``shared``: what the same choice has asked before."""
        if prompt is None:
            return {}
        rule = None if prompt.ids is None else instance.rule
        chain = prompt.chain(rule)
        if rule is None or chain is None:
            count = self.prefixes.held(prompt).get(instance.bit)
            return {TierName.DEVICE: prompt.tokens_of(count)} if count else {}
        blocks = self._blocks(instance, chain, shared or self._shared()) if chain else {}
        return {tier: count * rule.block_size for tier, count in blocks.items()}

    def _shared(self) -> _Shared:
        return _Shared([one.holdings for one in self._subscriptions.of.values()])

    def _blocks(
        self, instance: Instance, chain: Sequence[BlockHash], shared: _Shared
    ) -> Mapping[TierName, int]:
        """By tier, of the longest prefix of ``chain`` that ``instance`` can recall. What another
        instance put into a store that both have, it finds there, too. One that does not have the
        first block has no others: engines and pools evict those behind it first."""
        own, now = instance.holdings, self._clock()
        stores = frozenset[str]().union(*[one.stores for one in own if one.stores])
        masks: Iterable[int] = itertools.repeat(0)
        has_any = any(one.mask(chain[0], now) for one in own)
        if has_any:
            rows = (one.masks(chain, now) for one in own)
            masks = functools.reduce(lambda some, more: list(map(operator.or_, some, more)), rows)
        elif (stores, chain[0]) in shared.alone or not stores:
            return shared.alone.get((stores, chain[0]), {})
        found: Counter[int] = Counter()
        for block, mask in zip(chain, masks, strict=False):
            if not mask and not (stores and shared.has(stores, block)):
                break
            found[mask or REMOTE] += 1
        blocks: Counter[TierName] = Counter()
        for mask, count in found.items():
            if tier := tier_of(mask):
                blocks[tier] += count
        if not has_any:
            shared.alone[stores, chain[0]] = blocks
        return blocks

    def new_tokens(self, prompt: Prompt, model: object = None) -> float:
        """Tokens of a prompt that no instance of a model is known to hold."""
        among, shared = self.of_model(model, self.all), self._shared()
        recalled = (sum(self.expected(one, prompt, shared).values()) for one in among)
        return prompt.tokens - max(recalled, default=0)

    def sent(self, instance: Instance, prompt: Prompt | None) -> None:
        """``instance`` computes or recalls ``prompt`` now."""
        if prompt is not None and (chain := prompt.chain(instance.rule)) is not None:
            for one in instance.engine[:1]:
                one.holdings.sent(chain, self._clock())

    def computed(self, instance: Instance, prompt: Prompt | None) -> None:
        """Notes that ``instance`` has computed or loaded ``prompt``."""
        if not instance.leaves:
            self.prefixes.note(prompt, instance.bit)

    def probed(self, instance: Instance, well: bool) -> None:
        """Notes whether ``instance`` answered its health probe."""
        instance.failed_probes = 0 if well else instance.failed_probes + 1
        if instance.failed_probes >= _SILENT_PROBES:
            instance.hangs()
        if well and not instance.healthy:
            instance.healthy = True
            for one in instance.engine:
                one.doubt()  # it may be another process, with nothing on its device
            log.info("%s instance %s is up", instance.role, instance.url)
        elif instance.failed_probes >= _FAILED_PROBES:
            self.lost(instance, "it does not answer /health")

    def lost(self, instance: Instance, why: str) -> None:
        """Marks ``instance`` as down and forgets what it was sent."""
        if instance.healthy:
            instance.healthy = False
            if not instance.leaves:
                self.prefixes.forget(instance.bit)
                instance.bit = self.prefixes.holder()
            for one in instance.engine:
                one.holdings.forget_sent()
            log.warning("%s instance %s is down: %s", instance.role, instance.url, why)
