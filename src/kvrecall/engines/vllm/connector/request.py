"""A request on the scheduler side: its identity, and one record for each part that writes to it.

A request *matches* (which leading blocks does the pool have?), *waits* (for blocks that a prefill
instance promised, for a store's answer, for blocks on their way into the arena), *loads* (the
workers copy, leases hold the blocks) and is then an ordinary request of the engine.
``RecallScheduler`` moves it from one state to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvrecall.block import SHARED, BlockKey, Namespace, Tenant, TierName
from kvrecall.engines.base import HINT, Miss, Reason
from kvrecall.engines.vllm.compat.versions import said_of_return
from kvrecall.engines.vllm.connector.handover import Promise, Wait
from kvrecall.pool.hints import Hint, hint_of

TailHash = Callable[[Any, int], bytes]
"""``(request, tokens)``: hash of the first ``tokens`` tokens, which end inside a block."""

_NO_TAIL = None, b""


class Missing(NamedTuple):
    """A block beside the chain without which a hit is shorter than the chain; its group's kind."""

    key: BlockKey
    kind: str


class Truncation(NamedTuple):
    """Where the scheduler side ended a hit, in tokens of the prompt, and why; no ``reason``: the
    block ``key`` did not arrive, and the pool knows why."""

    at: int
    reason: Reason | None
    details: Mapping[str, object]
    key: BlockKey | None = None


@dataclass(slots=True)
class LoadRecord:
    """Written by ``RecallScheduler``. ``lookup``: the wait for a tier beyond this host.
    ``promise``: a prefill instance's, for its blocks. ``computes``: it loads no block, because a
    load failed or is audited. ``retries``: loads of a hit of several KV groups that were
    incomplete. ``touched``: the pool knows that its chain is in use, ``dependents_touched``: and
    the blocks beside it, which only a complete lookup tells; ``hinted``: it knows the request's
    hint, too. ``is_told``: the API process knows the sources of its prompt: ``device_tokens``,
    ``recalled``."""

    lookup: Wait
    promise: Promise | None = None
    computes: bool = False
    retries: int = 0
    touched: bool = False
    dependents_touched: bool = False
    hinted: bool = False
    is_told: bool = False
    device_tokens: int = 0
    recalled: Counter[TierName] = field(default_factory=Counter)


@dataclass(slots=True)
class SaveRecord:
    """Written by ``Saver``. ``blocks``: leading blocks of the chain that are in the pool or on
    their way, ``dependents``: blocks beside them; ``tails``: tokens inside a block of the chain at
    which a hit can end, and whether it is saved that far; ``seen``: by group, how many blocks were
    considered; ``boundaries``: by group of recurrent layers, tokens at which its state is saved;
    ``closed``: no more of it can be saved; ``passes``: steps until it tries to reserve again, and
    ``passes_next`` after the last refusal. ``open``: stores of its blocks that are under way."""

    blocks: int = 0
    dependents: list[BlockKey] = field(default_factory=list)
    tails: dict[int, bool] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    boundaries: dict[int, set[int]] = field(default_factory=dict)
    closed: bool = False
    passes: int = 0
    passes_next: int = 0
    open: set[int] = field(default_factory=set)


@dataclass(slots=True)
class MissRecord:
    """Written by ``MissExplainer``. ``truncation``: the scheduler side ended its hit; ``missing``:
    a block of another group did; ``miss``: why the rest was computed; ``learnt``: its tokens that
    the memory of chains has, of them in ``segment`` those that others had not before; ``root``: the
    name of its beginning there."""

    truncation: Truncation | None = None
    missing: Missing | None = None
    miss: Miss | None = None
    learnt: int | None = None
    segment: int = 0
    root: BlockKey | None = None


@dataclass(frozen=True, slots=True)
class BlockHashes:
    """How vLLM hashes the requests of an engine. ``per_block``: hashes of a block, by KV group;
    ``tokens`` of each; ``chain``: the group whose blocks are the chain; ``of_tail``: hashes tokens
    between two of them; None: no hit ends there."""

    per_block: tuple[int, ...]
    tokens: int
    chain: int = 0
    of_tail: TailHash | None = None


@dataclass(slots=True)
class RequestState:
    """The scheduler side's state of a request. ``namespace`` is None if the request is not pooled,
    or not yet ``settled``: its namespace is being determined. ``group_namespaces``: by KV group.
    Written by ``RecallScheduler``, but for the records of others."""

    request: Any
    hashes: BlockHashes
    loading: LoadRecord
    tenant: Tenant = SHARED
    namespace: Namespace | None = None
    group_namespaces: tuple[Namespace, ...] = ()
    settled: bool = False
    saving: SaveRecord = field(default_factory=SaveRecord)
    missed: MissRecord = field(default_factory=MissRecord)
    _keys: dict[int, list[BlockKey]] = field(default_factory=dict)
    _tails: dict[int, tuple[object, bytes]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        name: str = self.request.request_id
        return name

    @property
    def has_media(self) -> bool:
        """Whether its prompt contains images, sound or other media."""
        return bool(getattr(self.request, "mm_features", None))

    def keys(self, count: int, group: int | None = None, first: int = 0) -> list[BlockKey]:
        """Keys of a group's (the chain's) first ``count`` blocks hashed by now, from ``first``."""
        if self.namespace is None:
            return []
        group = self.hashes.chain if group is None else group
        known = self._keys.setdefault(group, [])
        step, namespace = self.hashes.per_block[group], self.group_namespaces[group]
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
        namespace = self.group_namespaces[self.hashes.chain if group is None else group]
        count, beside = divmod(tokens, self.hashes.tokens)
        hashes = self.request.block_hashes
        if count > len(hashes) or tokens > self.request.num_tokens:
            return None
        if not beside:
            return namespace.key(hashes[count - 1])
        if self.hashes.of_tail is None:
            return None
        ids = self.request.all_token_ids[tokens - beside : tokens]
        hashed = hashes[count - 1] if count else None, ids
        if self._tails.get(tokens, _NO_TAIL)[0] != hashed:  # or vLLM has replaced them
            self._tails[tokens] = hashed, self.hashes.of_tail(self.request, tokens)
        return namespace.tail_key(self._tails[tokens][1])

    def sources(self) -> dict[str, int]:
        """Prompt tokens by source of their KV."""
        counts = {str(tier): self.loading.recalled[tier] for tier in TierName}
        counts[str(TierName.DEVICE)] = self.loading.device_tokens
        counts["computed"] = max(0, self.request.num_prompt_tokens - sum(counts.values()))
        return counts


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
        self._awake.pop(request_id, None)
        self._until.pop(request_id, None)


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
