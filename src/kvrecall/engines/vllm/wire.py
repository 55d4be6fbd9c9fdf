"""The messages between the scheduler side and the worker side of the connector: at start a rank's
shard of a block, then orders and reports step by step.

vLLM pickles orders and reports once per step, so they are small and plain; they pickle as one
MessagePack, which takes a sixth of the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvrecall.engines.vllm.compat.config import ALONE, GroupKind, KvGroup, Sharing
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.engines.vllm.identity.changes import LoadedAdapter, adapters_of
from kvrecall.engines.vllm.identity.loaded import LoadedModel
from kvrecall.pool.base import ArenaHandle

ORIGIN_BYTES = 8
"""At the end of every record: the origin of its writer, see ``audit``."""

ALL_BLOCKS = 1 << 62

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Arena -> device for one request, which waits until every rank has reported it. Without
    ``copies`` the load fails: vLLM took another number of tokens than it was offered."""

    request_id: str
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """Device -> arena, after this step's forward pass; ``origin`` goes behind each record."""

    store_id: int
    copy: Copy
    origin: bytes


@dataclass(frozen=True, slots=True)
class Comparison:
    """Device blocks that this step completes, to be compared with records of the arena.
    ``starts_over``: requests have loaded blocks for which these vouch: if they differ, or cannot be
    compared, or are none, all running requests start over."""

    number: int
    request_id: str
    copy: Copy
    starts_over: bool


@dataclass(frozen=True, slots=True)
class Deviation:
    """What a comparison found.

    ``blocks``: how many were compared; ``unequal``: in how many a byte differed. ``times``: the
    largest deviation of a layer, as a multiple of its bound, in ``layer``; ``relative``: that
    deviation itself. ``exact``: any unequal byte is too much.
    """

    blocks: int = 0
    unequal: int = 0
    times: float = 0.0
    relative: float = 0.0
    layer: str = ""
    exact: bool = False

    @property
    def within(self) -> bool:
        """Whether the deviation is within the bound of the same model."""
        return self.unequal == 0 or (self.times <= 1.0 and not self.exact)

    def plus(self, other: Deviation, same_blocks: bool = False) -> Deviation:
        """Both together. ``same_blocks``: they are of the same blocks on different ranks."""
        worst = max(self, other, key=lambda one: one.times)
        blocks, unequal = self.blocks + other.blocks, self.unequal + other.unequal
        if same_blocks:
            blocks = max(self.blocks, other.blocks)
            unequal = max(self.unequal, other.unequal)
        exact = self.exact or other.exact
        return Deviation(blocks, unequal, worst.times, worst.relative, worst.layer, exact)


@dataclass(frozen=True, slots=True)
class Departure:
    """Middle blocks of a sequence leave the device; they are in the arena at ``offsets``. They
    follow those that left before, the first of which was block ``init`` of the sequence.
    ``block_ids``: their device blocks until the step writes. ``slots``: additional device blocks
    for the sequence to recall into."""

    request_id: str
    init: int
    block_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence whose prefix was found in the pool begins with its middle blocks left there, from
    block ``init`` on, at ``offsets`` of the arena. ``slots``: as of a ``Departure``."""

    request_id: str
    init: int
    offsets: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OffloadOrders:
    """What retrieval attention must know of partially offloaded sequences. Executed before the step
    writes any device block: ``ended`` sequences first, then ``arrivals``, then ``departures``.
    ``rows``: sequences of this step, by the device block in which the last of the step's tokens is
    written, which no other sequence writes."""

    departures: list[Departure]
    rows: dict[int, str]
    ended: list[str]
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass(slots=True)
class StepOrders(KVConnectorMetadata):
    """The scheduler side's orders for one step.

    ``releases``: finished requests whose device blocks are held until the stores ordered so far
    have left the device. ``stores_first``: the device completes all stores before it overwrites
    anything (a request was preempted or its blocks may be reused). ``record_bytes``: of a block's
    KV over all ranks, by KV group. ``computes``: whether the step computes anything.
    """

    arena: ArenaHandle
    loads: list[LoadOrder] = field(default_factory=list)
    stores: list[StoreOrder] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    stores_first: bool = False
    comparisons: list[Comparison] = field(default_factory=list)
    record_bytes: tuple[int, ...] = (0,)
    offload: OffloadOrders | None = None
    timed: int | None = None
    computes: bool = True

    def __reduce__(self) -> tuple[Any, ...]:
        return _orders_of, (_pack(self),)


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):
    """What the workers finished: how many ranks completed, and which failed, each store.
    ``compared``: by number, how many ranks have compared, and what they found. ``refuted``:
    requests that have loaded blocks which this engine would not have computed. ``lost``: requests
    whose offloaded blocks are unreachable. The step's results for both are meaningless. ``stuck``:
    requests whose loads may never end, so that their device blocks may still be written; once;
    they are reported as failed if they end. ``timed``:
    the device's seconds for steps, by the orders' numbers. ``load_rank_seconds``: of all ranks
    that loaded, which do so at the same time. ``copied``: the device's seconds for the loads of
    requests, where requests are traced. ``reloaded``: the model has loaded weights by itself since
    the last report; ``adapters``: those that were loaded, ``swapped``: of them those whose content
    is another than before."""

    stored: dict[int, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    compared: dict[int, tuple[int, Deviation]] = field(default_factory=dict)
    refuted: set[str] = field(default_factory=set)
    timed: dict[int, float] = field(default_factory=dict)
    load_rank_seconds: float = 0.0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    stored_bytes: int = 0
    store_seconds: float = 0.0
    copied: dict[str, float] = field(default_factory=dict)
    reloaded: bool = False
    adapters: dict[int, LoadedAdapter] = field(default_factory=dict)
    swapped: set[int] = field(default_factory=set)
    stuck: set[str] = field(default_factory=set)

    def __reduce__(self) -> tuple[Any, ...]:
        return _report_of, (_pack(self),)

    @property
    def starts_over(self) -> bool:
        """Whether running requests may have used KV that this engine would not have computed."""
        return bool(self.refuted or self.reloaded or self.swapped)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        """Sums the reports of two ranks."""
        assert isinstance(other, StepReport)
        compared = dict(self.compared)
        for number, (ranks, found) in other.compared.items():
            before, known = compared.get(number, (0, Deviation()))
            compared[number] = ranks + before, known.plus(found, same_blocks=True)
        return StepReport(
            dict(Counter(self.stored) + Counter(other.stored)),
            self.failed | other.failed,
            self.lost | other.lost,
            compared,
            self.refuted | other.refuted,
            _slowest(self.timed, other.timed),
            self.load_rank_seconds + other.load_rank_seconds,
            self.loaded_bytes + other.loaded_bytes,
            max(self.load_seconds, other.load_seconds),
            self.stored_bytes + other.stored_bytes,
            max(self.store_seconds, other.store_seconds),
            _slowest(self.copied, other.copied),
            self.reloaded or other.reloaded,
            adapters_of([self.adapters, other.adapters]),
            self.swapped | other.swapped,
            self.stuck | other.stuck,
        )


def _slowest(one: Mapping[K, float], other: Mapping[K, float]) -> dict[K, float]:
    return {key: max(one.get(key, 0.0), other.get(key, 0.0)) for key in {**one, **other}}


def _plain(number: Any) -> Any:
    return number.item()


_pack = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_ORDERS = msgspec.msgpack.Decoder(StepOrders)
_REPORT = msgspec.msgpack.Decoder(StepReport)


def _orders_of(packed: bytes) -> StepOrders:
    return _ORDERS.decode(packed)


def _report_of(packed: bytes) -> StepReport:
    return _REPORT.decode(packed)


@dataclass(frozen=True, slots=True)
class ShardLayer:
    """One layer's part of a block of its KV group on one rank."""

    name: str
    page_bytes: int
    layout: str  # logical shape of a block, strides, dtype; of one head, if there are ``heads``
    group: int = 0
    heads: int = 0  # KV heads whose bytes follow each other; 0: they are interleaved
    by_token: bool = False  # each token's bytes are together, and the layout is that of all ranks


@dataclass(frozen=True, slots=True)
class Shard(KVConnectorHandshakeMetadata):
    """One rank's part of every block, sent once at start. ``kernel`` names the attention backend
    and the instruction set its bytes are packed for. ``copies_in_step``: stores are complete when
    the step that ordered them returns. ``token_seconds``: computing a prompt token takes this rank
    about as long, or longer. ``model``: the model that the rank has loaded; None if its worker does
    not expose it. ``sharing``: of blocks with the other ranks of its stage.
    ``numa_node``: of its device, where it is known. ``overhead_bytes``: of the gate of retrieval
    attention, the greatest of all ranks'; 0 without retrieval."""

    layers: tuple[ShardLayer, ...]
    kernel: str
    copies_in_step: bool
    token_seconds: float = 0.0
    model: LoadedModel | None = None
    sharing: Sharing = ALONE
    numa_node: int | None = None
    overhead_bytes: int = 0

    def nbytes(self, group: int = 0) -> int:
        """Bytes of one block of a KV group on this rank."""
        return sum(layer.page_bytes for layer in self.layers if layer.group == group)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """A KV group on the scheduler side. ``block_bytes``: of a block over all ranks, the origin
    included."""

    group: KvGroup
    block_bytes: int

    @property
    def kind(self) -> GroupKind:
        return self.group.kind

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.group.block_size

    @property
    def record_bytes(self) -> int:
        """Bytes of a block's KV, before the origin."""
        return self.block_bytes - ORIGIN_BYTES


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about the engine for the scheduler side, settled when all ranks have reported their
    shards. ``groups``: the KV groups in vLLM's order. ``hash_block_size``: tokens.
    ``copies_in_step``: stores are off the device when their step returns. ``recalls``: whether
    blocks may be loaded into it; if not it only saves. ``least_token_seconds``: computing a prompt
    token takes about as long, or longer; 0: unknown. ``rank_share``: of a block's bytes, the
    most that one rank loads. ``exact_blocks``: number of blocks of a
    sequence that have the same KV however it is decoded: retrieval attention is approximate.
    ``match_unit``: tokens of which a hit is a multiple, where hits may end inside blocks.
    ``has_experts``: a token takes some of a layer's weights only.
    ``recovers``: a step that fails does not end the engine; vLLM aborts all requests, and the
    workers' reports of that step come with the next.

    ``chain``: the group whose blocks are a request's chain: the first that needs the whole prefix,
    or the first of all; ``block_size``: tokens of its blocks. ``alignment``: tokens of which a
    boundary is a multiple if every group's blocks end there; ``unit``: if a hit may end there.
    ``has_states``: whether a group is of recurrent layers."""

    groups: tuple[GroupFacts, ...]
    hash_block_size: int
    ranks: int
    copies_in_step: bool
    recalls: bool = True
    only_writes: bool = False
    least_token_seconds: float = 0.0
    rank_share: float = 1.0
    exact_blocks: int = ALL_BLOCKS
    match_unit: int | None = None
    recovers: bool = False
    has_experts: bool = False
    chain: int = field(init=False)
    block_size: int = field(init=False)
    alignment: int = field(init=False)
    unit: int = field(init=False)
    has_states: bool = field(init=False)

    def __post_init__(self) -> None:
        full = (i for i, group in enumerate(self.groups) if group.kind is GroupKind.FULL)
        sizes = [group.block_size for group in self.groups]
        chain = next(full, 0)
        object.__setattr__(self, "chain", chain)
        object.__setattr__(self, "block_size", sizes[chain])
        object.__setattr__(self, "alignment", math.lcm(*sizes))
        object.__setattr__(self, "unit", self.match_unit or math.lcm(*sizes))
        kinds = {group.kind for group in self.groups}
        object.__setattr__(self, "has_states", GroupKind.STATE in kinds)

    @property
    def block_bytes(self) -> float:
        """Bytes that the pool takes for the tokens of one block of the chain, in all groups."""
        size = self.block_size
        return sum(group.block_bytes * size / group.block_size for group in self.groups)

    @property
    def frees_while_running(self) -> bool:
        """Whether the engine may take blocks from a running request."""
        return any(facts.group.frees for facts in self.groups)

    @classmethod
    def of_one(
        cls, block_size: int, block_bytes: int, frees: bool = False, **more: Any
    ) -> EngineFacts:
        """Of an engine with one group of full attention; ``more``: other fields."""
        group = KvGroup(GroupKind.FULL, block_size, 0, frees)
        more = {"hash_block_size": block_size, "ranks": 1, "copies_in_step": True, **more}
        return cls((GroupFacts(group, block_bytes),), **more)
