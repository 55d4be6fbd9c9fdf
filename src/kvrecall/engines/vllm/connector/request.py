"""A request on the scheduler side: its blocks, and the load of the prefix found in the pool.

A request *matches* (which leading blocks does the pool have?), *waits* (for blocks that a prefill
instance promised, for a store's answer, for blocks on their way into the arena), *loads* (the
workers copy, leases hold the blocks) and is then an ordinary request of the engine.
``RecallScheduler`` moves it from one state to the next.

A hit that is slower than recomputing is worse than a miss, so ``LoadCostModel`` decides how much
of a match to load and how long to wait for it. The cost of loading is proportional to bytes, per
tier; computing a token costs more the deeper it is (attention). Both are measured on the engine's
own work, so neither needs settings: prefill steps and copies by the device's own time, whatever
overlaps them, and loads from lower tiers as they arrive. Before the first prefill step, the rate of
matrix products on this device is used instead.
"""

from __future__ import annotations

import enum
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvrecall.block import SHARED, BlockKey, Namespace, Tenant, TierName
from kvrecall.engines.base import HANDOVER, HINT, Miss, Reason
from kvrecall.engines.vllm.compat.shims import said_of_return
from kvrecall.nicety import nicety
from kvrecall.pool.base import ArenaHandle
from kvrecall.pool.hints import Hint, hint_of

if TYPE_CHECKING:
    from kvrecall.engines.vllm.connector.load import PrefixLoad
    from kvrecall.engines.vllm.connector.traces import RequestTrace

LOOK_EVERY_S = 0.002
"""The pool is asked at most so often for blocks whose tier has not answered."""

TailHash = Callable[[Any, int], bytes]
"""``(request, tokens)``: hash of the first ``tokens`` tokens, which end inside a block."""

TRIVIAL_S = 0.02
"""Loads expected to take less are always made: they cannot lose anything."""

_LEAST_PATIENCE_S = 0.05
"""Minimum patience of a wait: a disk that is busy for a moment must not shorten hits."""

_MEMORY = 0.9  # weight of the past in running averages
_MIN_STEP_TOKENS = 32  # smaller steps are decoding, and tell nothing of prefill
_MOST_TIMED = 64  # steps whose time is still to be reported
_PROBE_SHARE = 0.05  # share of the computing time that a probe of a slow tier may cost
_PROBE_EVERY = 4  # a tier that is passed over is tried again so often
_PROBE_AFTER_S = 5.0  # and when nothing was loaded from it for so long
_RISK_SHARE = 0.08  # share of the computing time at stake that may be waited in vain


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, and how many working steps had begun by then."""

    seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How many leading blocks to load, and how many seconds to wait for them *beyond* the time that
    the arrived ones have saved (``gained_seconds``).

    A load from a medium that is as fast as expected is thus awaited to its end, however long it
    takes; one that stalls, at whatever point, costs at most ``patience_s`` more than computing.
    """

    blocks: int
    patience_s: float
    load_s: float = 0.0
    compute_s: float = 0.0


class LoadCostModel:
    """Expected costs of one engine. Owned by its scheduler side; not thread-safe."""

    def __init__(
        self,
        block_tokens: int,
        block_bytes: float,
        deadline_s: float,
        least_token_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``deadline_s``: the longest wait for any load. ``least_token_seconds``: the assumed cost
        of a prompt token until one was computed; 0: unknown."""
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._deadline_s = deadline_s
        self._clock = clock
        self._timed: dict[int, tuple[int, int]] = {}
        self._steps = 0
        self._bandwidth: dict[TierName, float] = {}
        self._seen_at: dict[TierName, float] = {}
        self._prefill = _PrefillModel(least_token_seconds)
        self._passed_over = 0

    # ---- time ---------------------------------------------------------------------------

    @nicety("the estimate of costs")
    def step_begins(self, works: bool, prompt_tokens: int = 0, depth: int = 0) -> int | None:
        """A step, of so many prompt tokens at which mean position. Returns a number if the workers
        are to time it."""
        self._steps += works
        if prompt_tokens < _MIN_STEP_TOKENS:
            return None
        self._timed[self._steps] = prompt_tokens, depth
        if len(self._timed) > _MOST_TIMED:  # their reports were lost
            del self._timed[next(iter(self._timed))]
        return self._steps

    @nicety("the estimate of costs")
    def step_took(self, number: int, seconds: float) -> None:
        """``seconds``: of the device. What a further rank reports of the same step is ignored."""
        work = self._timed.pop(number, None)
        if work is not None:
            self.saw_step(*work, seconds)

    def mark(self) -> Mark:
        return Mark(self._clock(), self._steps)

    def elapsed(self, mark: Mark) -> float:
        """Seconds since ``mark``, whatever the engine did."""
        return self._clock() - mark.seconds

    def idle_since(self, mark: Mark) -> bool:
        """Whether the engine has computed nothing since ``mark``."""
        return mark.steps == self._steps

    # ---- what was seen ------------------------------------------------------------------

    def saw_step(self, tokens: int, depth: int, seconds: float) -> None:
        """A step computed ``tokens`` prompt tokens whose mean position was ``depth``."""
        if tokens >= _MIN_STEP_TOKENS and seconds > 0:
            self._prefill.saw(tokens, depth, seconds)

    @nicety("the estimate of costs")
    def saw_load(self, tier: TierName, blocks: float, seconds: float) -> None:
        """``blocks`` blocks arrived from ``tier`` within ``seconds`` of the request, queues
        included. Blocks that did not arrive in time lower the bandwidth."""
        self._seen_at[tier] = self._clock()
        rate = max(blocks, 0.1) * self._block_bytes / max(seconds, 1e-6)
        known = self._bandwidth.get(tier)
        if known is None or not known / 2 <= rate <= 2 * known:
            self._bandwidth[tier] = rate  # a tier that stalls, or has recovered: believed at once
        else:
            self._bandwidth[tier] = _MEMORY * known + (1 - _MEMORY) * rate

    # ---- what follows -------------------------------------------------------------------

    @nicety(
        "the estimate of costs",
        lambda self, tiers, *_, **__: LoadPlan(len(tiers), self._deadline_s),
    )
    def plan(
        self,
        tiers: Sequence[TierName],
        start_block: int,
        weight: float = 1.0,
        last: float = 1.0,
    ) -> LoadPlan:
        """The plan for a found prefix, ``tiers[i]`` holding block ``start_block + i``. ``weight``:
        bytes to load for a block, as a share of its bytes. ``last``: the share of the last block's
        tokens that the prefix has.

        Chooses the length that minimises loading it plus computing the rest. Unknown costs count as
        zero to load and infinite to compute, so that they become known.
        """
        if not self._prefill.known:
            return LoadPlan(len(tiers), self._deadline_s)
        loads = [weight * self.load_seconds(tier) for tier in tiers]
        computes = [self.compute_seconds(start_block + i) for i in range(len(tiers))]
        computes[-1:] = [last * seconds for seconds in computes[-1:]]
        left = sum(computes)
        best, best_cost, spent = 0, left, 0.0
        for index, (load, compute) in enumerate(zip(loads, computes, strict=True)):
            spent += load
            left -= compute
            if spent + left <= best_cost or spent <= TRIVIAL_S:
                best, best_cost = index + 1, spent + left
        if best < len(tiers) and self._is_time_to_probe(tiers[best]):
            patience_s = max(_LEAST_PATIENCE_S, _PROBE_SHARE * sum(computes))
            best += 1
            return LoadPlan(best, patience_s, sum(loads[best:]), sum(computes[best:]))
        worth = sum(c for c, tier in zip(computes, tiers, strict=True) if tier is not TierName.HOST)
        patience_s = min(self._deadline_s, max(_RISK_SHARE * worth, _LEAST_PATIENCE_S))
        return LoadPlan(best, patience_s, sum(loads[best:]), sum(computes[best:]))

    def _is_time_to_probe(self, tier: TierName) -> bool:
        """Whether to load from a slow tier nevertheless, to notice its recovery."""
        self._passed_over += 1
        unheard_s = self._clock() - self._seen_at.get(tier, 0.0)
        return self._passed_over % _PROBE_EVERY == 0 or unheard_s >= _PROBE_AFTER_S

    @nicety("the estimate of costs", 0.0)
    def gained_seconds(self, tiers: Sequence[TierName], start_block: int) -> float:
        """Computing time saved by blocks from below the host; ``tiers`` as in ``plan``."""
        return sum(
            self.compute_seconds(start_block + place)
            for place, tier in enumerate(tiers)
            if tier is not TierName.HOST and self._prefill.known
        )

    def load_seconds(self, tier: TierName) -> float:
        """Expected seconds to load one block; 0 for a tier without measurements."""
        rate = self._bandwidth.get(tier)
        return self._block_bytes / rate if rate else 0.0

    def compute_seconds(self, block: int) -> float:
        """Expected seconds to compute the ``block``-th block of a sequence."""
        depth = (block + 0.5) * self._block_tokens
        return self._block_tokens * self._prefill.seconds_per_token(depth)


class _PrefillModel:
    """Seconds per prompt token as ``base + slope * depth``, by running least squares; ``least``
    until the first measurement (0: unknown)."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0 or self._least > 0

    def saw(self, tokens: int, depth: float, seconds: float) -> None:
        cost = seconds / tokens
        sums = (1.0, depth, cost, depth * depth, depth * cost)
        old = (self._weight, self._x, self._y, self._xx, self._xy)
        new = [_MEMORY * a + b for a, b in zip(old, sums, strict=True)]
        self._weight, self._x, self._y, self._xx, self._xy = new

    def seconds_per_token(self, depth: float) -> float:
        """Neither negative nor falling with depth."""
        if not self._weight:
            return self._least
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if spread > 1.0:
            slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        return max(mean_y + slope * (depth - mean_x), mean_y * 0.1)


class Cut(NamedTuple):
    """Where the scheduler side ended a hit, in tokens of the prompt, and why; no ``reason``: the
    block ``key`` did not arrive, and the pool knows why."""

    at: int
    reason: Reason | None
    details: Mapping[str, object]
    key: BlockKey | None = None


class Handover(enum.Enum):
    """The state of a promise."""

    WAIT = "wait"
    KEPT = "kept"
    LATE = "late"


def receipt(namespace: Namespace | None, tokens: int, hinted: str = "") -> dict[str, Any]:
    """What a prefill instance passes to a decode instance through the router: how many tokens of
    the prompt are in the pool or on their way; and which pool has recorded the request's hint, if
    it has one (``pool_id``). Empty if there are no such tokens."""
    if namespace is None or tokens <= 0:
        return {}
    told = {"tokens": tokens, "namespace": namespace.digest.hex()}
    return {HANDOVER: {**told, "hinted": hinted} if hinted else told}


def pool_id(arena: ArenaHandle) -> str:
    """Names a pool, equally for all engines that use it at the same time."""
    return hashlib.blake2b(repr(replace(arena, seat=0)).encode(), digest_size=8).hexdigest()


def hint_of_request(request: Any) -> tuple[Hint | None, bool]:
    """What the client of a request says about its return, and whether it said something that is
    ignored, because its form is wrong. In this order: ``kv_transfer_params``, an action of vLLM's
    ``kv_hints``, a ``session_id``, by which a request is one of several."""
    params = request.kv_transfer_params
    given = [params[HINT]] if isinstance(params, Mapping) and HINT in params else []
    session, hints = said_of_return(request)
    given += [payload for kind, payload in hints if kind == HINT]
    try:
        if given:
            return hint_of(given[0]), False
    except ValueError:
        return None, True
    return (Hint(returns=True), False) if session else (None, False)


def request_of(sequence: str) -> str:
    """The request of a sequence: vLLM calls the n-th of several ``n_request``, and one alone as its
    request."""
    number, _, request = sequence.partition("_")
    return request if number.isdecimal() and request else sequence


@dataclass(slots=True)
class Promise:
    """Leading tokens of a prompt whose blocks a prefill instance's receipt says are in the pool, or
    on their way. The decode instance waits for them ``patience_s`` seconds from the first ``look``
    on, and never within a step; only blocks that it finds itself count, whatever pool is between
    the two. ``hinted``: the pool that has recorded the request's hint; "": none."""

    tokens: int
    namespace: str
    hinted: str
    patience_s: float
    clock: Callable[[], float]
    is_over: bool = False
    _until: float | None = None
    _next: float = 0.0

    @classmethod
    def of(
        cls, params: object, unit: int, patience_s: float, clock: Callable[[], float]
    ) -> Promise | None:
        """The promise in a request's ``kv_transfer_params``, in whole ``unit`` tokens; None without
        a receipt, or with an invalid one (they come from outside)."""
        given = params.get(HANDOVER) if isinstance(params, Mapping) else None
        if not isinstance(given, Mapping):
            return None
        tokens, namespace = given.get("tokens"), given.get("namespace")
        if type(tokens) is not int or tokens < unit or not isinstance(namespace, str):
            return None
        hinted = given.get("hinted")
        hinted = hinted if isinstance(hinted, str) else ""
        return cls(tokens // unit * unit, namespace, hinted, patience_s, clock)

    def look(self, wanted: int, found: Callable[[], int]) -> Handover:
        """Whether ``wanted`` tokens are there; ``found`` queries the pool, but not at every
        call."""
        now = self.clock()
        if self._until is None:
            self._until = now + self.patience_s
        if now < self._next and now < self._until:
            return Handover.WAIT
        self._next = now + LOOK_EVERY_S
        if found() >= wanted:
            self.is_over = True
            return Handover.KEPT
        if now < self._until:
            return Handover.WAIT
        self.is_over = True
        return Handover.LATE


@dataclass(slots=True)
class RequestState:
    """The scheduler side's state of a request. Owned by ``RecallScheduler``.

    ``namespace`` is None if the request is not pooled, or not yet ``settled``: its namespace is
    being determined. ``promise``: a prefill instance's, for its blocks. ``first_lookup_at``: when
    they were first looked up in a tier beyond this host (seconds of the scheduler side's clock).
    ``load``: from a match until the engine has given it device blocks. ``computes``: it loads no
    block, because a load failed or is audited. ``incomplete_loads``: of a hit that needs several KV
    groups. ``hashes_per_block``, ``group_namespaces``: by KV group; ``chain``: the group whose
    blocks are the chain; ``hash_tokens``: tokens of each of vLLM's hashes; ``tail_hash``: of tokens
    between two of them. ``saved``: leading blocks of the chain that are in the pool or on their
    way, ``hanging``: blocks beside them; ``tails``: tokens inside a block of the chain at which a
    hit can end, and whether it is saved that far; ``seen``: by group, how many blocks were
    considered; ``boundaries``: by group of recurrent layers, tokens at which its state is saved;
    ``closed``: no more of it can be saved; ``passes``: steps until it tries to reserve again, and
    ``passes_next`` after the last refusal. ``touched``: the pool knows that its chain is in use,
    and ``hanging_touched``: the blocks beside it, which only a complete lookup tells; ``hinted``:
    it knows the request's hint, too.
    ``reported``: the API process knows the sources of its prompt. ``cut``: the scheduler side ended
    its hit; ``lacks``: a block beside the chain without which the hit is shorter than the chain, of
    the group ``lacks_kind``; ``miss``: why the rest was computed; ``learnt``: its tokens that the
    memory of chains has, of them in ``segment`` those that others had not before; ``root``: the
    name of its beginning there. ``rests_until``: the tick of
    the scheduler side at which it has work for it again; 0: it does not rest. ``trace``: what is
    noted for its spans; None unless it is traced.
    """

    request: Any
    hashes_per_block: tuple[int, ...]
    tenant: Tenant = SHARED
    chain: int = 0
    hash_tokens: int = 0
    tail_hash: TailHash | None = None
    namespace: Namespace | None = None
    group_namespaces: tuple[Namespace, ...] = ()
    settled: bool = False
    promise: Promise | None = None
    first_lookup_at: float | None = None
    next_lookup_at: float = 0.0
    load: PrefixLoad | None = None
    computes: bool = False
    incomplete_loads: int = 0
    trace: RequestTrace | None = None
    saved: int = 0
    hanging: list[BlockKey] = field(default_factory=list)
    tails: dict[int, bool] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    boundaries: dict[int, set[int]] = field(default_factory=dict)
    closed: bool = False
    passes: int = 0
    passes_next: int = 0
    open_stores: set[int] = field(default_factory=set)
    touched: bool = False
    hanging_touched: bool = False
    hinted: bool = False
    reported: bool = False
    cut: Cut | None = None
    lacks: BlockKey | None = None
    lacks_kind: str = ""
    miss: Miss | None = None
    learnt: int | None = None
    segment: int = 0
    root: BlockKey | None = None
    rests_until: int = 0
    device_tokens: int = 0
    recalled: Counter[TierName] = field(default_factory=Counter)
    _keys: dict[int, list[BlockKey]] = field(default_factory=dict)
    _tail_hashes: dict[int, bytes] = field(default_factory=dict)

    @property
    def has_media(self) -> bool:
        """Whether its prompt contains images, sound or other media."""
        return bool(getattr(self.request, "mm_features", None))

    def keys(self, count: int, group: int | None = None, first: int = 0) -> list[BlockKey]:
        """Keys of the first ``count`` blocks of a KV group (the chain), or of as many as are hashed
        by now, from block ``first`` on."""
        if self.namespace is None:
            return []
        group = self.chain if group is None else group
        known = self._keys.setdefault(group, [])
        step, namespace = self.hashes_per_block[group], self.group_namespaces[group]
        hashes = self.request.block_hashes
        last = len(known) * step
        if known and (last > len(hashes) or known[-1] != namespace.key(hashes[last - 1])):
            known.clear()  # vLLM has replaced tokens of a session
        if len(known) < count:
            for end in range((len(known) + 1) * step, min(count * step, len(hashes)) + 1, step):
                known.append(namespace.key(hashes[end - 1]))
        return known[first:count]

    def key_at(self, tokens: int, group: int | None = None) -> BlockKey | None:
        """Key of the block of a KV group (the chain) that ends with the first ``tokens`` tokens, at
        its own end or inside it. None if they are not hashed by now."""
        if self.namespace is None:
            return None
        namespace = self.group_namespaces[self.chain if group is None else group]
        count, beside = divmod(tokens, self.hash_tokens)
        hashes = self.request.block_hashes
        if count > len(hashes) or tokens > self.request.num_tokens:
            return None
        if not beside:
            return namespace.key(hashes[count - 1])
        if self.tail_hash is None:
            return None
        if tokens not in self._tail_hashes:
            self._tail_hashes[tokens] = self.tail_hash(self.request, tokens)
        return namespace.tail_key(self._tail_hashes[tokens])

    def sources(self) -> dict[str, int]:
        """Prompt tokens by source of their KV."""
        counts = {str(tier): self.recalled[tier] for tier in TierName}
        counts[str(TierName.DEVICE)] = self.device_tokens
        counts["computed"] = max(0, self.request.num_prompt_tokens - sum(counts.values()))
        return counts
