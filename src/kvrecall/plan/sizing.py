"""The plan: blocks by tier, what the sessions need, what a tier must deliver, and the settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from kvrecall.config import format_size, setting_of
from kvrecall.errors import ConfigError
from kvrecall.modelconfig import CacheKind
from kvrecall.plan.model import Group, ModelShape, hit_unit
from kvrecall.pool.disk.index import ROW_BYTES
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.simulate.replay import GroupSpec, TierSpec, replay
from kvrecall.simulate.trace import BLOCK_TOKENS, Trace

LINK_BYTES = 4 * 10**6
MOST_LINKS = 512
STEP = 0.01  # of the memory factor
STEP_BYTES = 600 * 10**6  # device memory that a step gives back
MOST_STEPS = 4
_DISK_SHARE = 0.95  # of the disk tier before it evicts


@dataclass(frozen=True, slots=True)
class Site:
    """The machines. Sizes in bytes, of one device and of one host."""

    hosts: int = 1
    devices: int = 1  # a host
    tensor_parallel: int = 1
    device_bytes: int = 0
    memory_factor: float = 0.9
    host_bytes: int = 0
    disk_bytes: int = 0
    remote_bytes: int = 0  # in all
    compressed_to: float = 1.0  # of a block's bytes, on disk and in the remote store

    @property
    def instances(self) -> int:
        """Engines on all hosts."""
        return max(1, self.hosts * self.devices // self.tensor_parallel)


@dataclass(frozen=True, slots=True)
class Use:
    """The load: ``sessions`` of ``context`` tokens whose cache must stay resident.
    ``step_tokens``: how many the engine computes in a step."""

    context: int
    sessions: int
    block_tokens: int
    step_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class CardLinks:
    """Device memory that links between cards take, after Ascend's rules for pooled KV (HCCL), and
    how far to lower the memory factor for them."""

    cards: int
    links: int
    bytes: int
    lower_memory_factor_by: float
    too_many: bool  # more than can stay connected: some are dropped and re-established


def links_of(cards: int, will_grow: bool = False) -> CardLinks:
    """For ``cards`` cards (dies) that pool together. ``will_grow``: more may join later,
    so memory for the maximum number of links is reserved."""
    wanted = max(0, cards - 1)
    links = min(wanted, MOST_LINKS)
    nbytes = links * LINK_BYTES
    steps = MOST_STEPS if will_grow else min(MOST_STEPS, -(-nbytes // STEP_BYTES))
    return CardLinks(cards, links, nbytes, round(steps * STEP, 4), wanted >= MOST_LINKS)


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier of all hosts together, as in the JSON. ``blocks``: of all KV groups. ``tokens``: of
    ``sessions`` of the context, those whose whole context fits in it. ``hit_rate_up_to_here``: on
    the trace, of it and the tiers above it; None without a trace."""

    tier: str
    bytes: int
    blocks: int
    tokens: int
    sessions: int
    hit_rate_up_to_here: float | None = None


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Bytes per second above which loading beats computing, at the prefill rate given (tokens
    per second of one engine): for the first tokens, and for those at the end of the context."""

    prefill_rate: float
    at_start: float
    at_end: float


def device_tier_bytes(shape: ModelShape, site: Site, links: CardLinks) -> int:
    """Device memory left for KV on all hosts. ConfigError if the weights do not fit."""
    if site.device_bytes == 0:
        return 0
    factor = site.memory_factor - links.lower_memory_factor_by
    devices = site.hosts * site.devices
    left = int(devices * site.device_bytes * factor) - site.instances * shape.weight_bytes
    if left <= 0:
        raise ConfigError(
            f"the weights of {format_size(shape.weight_bytes)} do not fit {site.tensor_parallel} "
            f"devices of {format_size(site.device_bytes)} at a memory factor of {factor:.2f}; "
            "use more devices per engine with --tensor-parallel"
        )
    return left


@dataclass(frozen=True, slots=True)
class Sequence:
    """What one session takes: bytes on all devices of an engine while it runs, and bytes and
    records in the pool, where each record lies in a slot."""

    device_bytes: int
    pool_bytes: int
    slot_bytes: int
    records: int


def sequence_of(groups: tuple[Group, ...], use: Use, ranks: int) -> Sequence:
    counts = [group.pool_blocks(use.context) for group in groups]
    numbered = list(zip(groups, counts, strict=True))
    return Sequence(
        ranks * sum(g.device_bytes * g.device_blocks(use.context) for g in groups),
        sum(g.record_bytes * count for g, count in numbered),
        sum(slot_bytes_of(g.record_bytes) * count for g, count in numbered),
        sum(counts),
    )


def hit_bytes(groups: tuple[Group, ...], tokens: int) -> int:
    """Bytes that a hit of ``tokens`` loads."""
    return sum(group.record_bytes * group.needed(tokens) for group in groups)


def tiers_of(shape: ModelShape, site: Site, use: Use, links: CardLinks) -> list[TierPlan]:
    """The tiers that have room, nearest first."""
    groups = shape.groups(use.block_tokens, site.tensor_parallel)
    one = sequence_of(groups, use, site.tensor_parallel)
    below = math.ceil(site.compressed_to * one.slot_bytes)
    on_disk = below + one.records * ROW_BYTES
    device = device_tier_bytes(shape, site, links)
    # Groups share the blocks of a device.
    block = site.tensor_parallel * max(group.device_bytes for group in groups)
    held = sum(group.device_blocks(use.context) for group in groups)
    rooms = (
        ("device", device, site.instances, device // site.instances, block * held, held),
        ("host", site.hosts * site.host_bytes, site.hosts, site.host_bytes, one.slot_bytes,
         one.records),
        ("disk", site.hosts * site.disk_bytes, site.hosts, int(site.disk_bytes * _DISK_SHARE),
         on_disk, one.records),
        ("remote", site.remote_bytes, 1, site.remote_bytes, below, one.records),
    )  # fmt: skip
    return [
        TierPlan(
            name, nbytes, number * (room * records // each),
            number * (room * use.context // each), number * room // each,
        )
        for name, nbytes, number, room, each, records in rooms
        if nbytes > 0
    ]  # fmt: skip


def groups_of_trace(groups: tuple[Group, ...], step_tokens: int) -> tuple[GroupSpec, ...]:
    """What ``kvrecall simulate`` calls these groups: those that are alike as one, with the record
    of a trace's block. Empty if only states are kept."""
    sizes: dict[tuple[CacheKind, int], int] = {}
    for group in groups:
        is_state = group.kind is CacheKind.STATE
        kept = max(1, step_tokens // group.block_tokens) * group.block_tokens  # states, so often
        reach = kept if is_state else group.reach
        nbytes = group.record_bytes
        nbytes = nbytes if is_state else nbytes // group.block_tokens * BLOCK_TOKENS
        key = group.kind, reach
        sizes[key] = sizes.get(key, 0) + nbytes
    if all(kind is CacheKind.STATE for kind, _ in sizes):
        return ()
    specs = [GroupSpec(*key, nbytes) for key, nbytes in sizes.items()]
    return tuple(sorted(specs, key=lambda spec: list(CacheKind).index(spec.kind)))


def with_trace(
    tiers: list[TierPlan],
    trace: Trace,
    policy: str,
    groups: tuple[GroupSpec, ...],
    advance: Callable[[int], None] = lambda _: None,
) -> list[TierPlan]:
    """The tiers with their hit rates on a trace, as one pool for all its requests. ``groups``: of
    ``groups_of_trace``. ``advance(1)`` is called for each request."""
    least = sum(group.nbytes for group in groups)
    small = next((t for t in tiers if t.bytes < least or t.tokens < BLOCK_TOKENS), None)
    if small is not None:
        raise ConfigError(
            f"the {small.tier} tier holds less than a block of the trace (512 tokens)"
        )
    if not groups:
        raise ConfigError("--trace: a model that keeps only states is not simulated")
    if [group.kind for group in groups] == [CacheKind.FULL]:
        specs = [TierSpec(tier.tier, tier.tokens // BLOCK_TOKENS) for tier in tiers]
        outcome = replay(trace, specs, policy, advance)
        read = accumulate(count.read for count in outcome.tiers)
        rates = [hits / outcome.accesses for hits in read]
    else:  # a hit may need records of several tiers: the rate of a pool that ends with the tier
        specs = [TierSpec(tier.tier, tier.bytes) for tier in tiers]
        rates = []
        for count in range(1, len(tiers) + 1):
            seen = advance if count == len(tiers) else lambda _: None
            rates.append(replay(trace, specs[:count], policy, seen, groups).hit_rate)
    pairs = zip(tiers, rates, strict=True)
    return [replace(tier, hit_rate_up_to_here=round(rate, 6)) for tier, rate in pairs]


def break_even(shape: ModelShape, use: Use, prefill_rate: float) -> BreakEven:
    """``prefill_rate``: measured on short prompts. Deeper tokens cost more, and a window or state
    is loaded once however long the hit is, so less bandwidth suffices for them."""
    groups = shape.groups(use.block_tokens)
    shortest = hit_unit(groups)
    slower = shape.flops_per_token(0) / shape.flops_per_token(use.context)
    at_start = hit_bytes(groups, shortest) / shortest * prefill_rate
    return BreakEven(prefill_rate, at_start, shape.full_bytes_per_token * prefill_rate * slower)


def host_bytes_for(needed_bytes: int, hosts: int) -> int:
    """The host tier of each of ``hosts`` that holds ``needed_bytes`` together, in whole GiB, with a
    thirteenth more for digests of retrieval attention: two int8 vectors for 8 and for 64 tokens."""
    return math.ceil(needed_bytes * 14 / 13 / hosts / (1 << 30)) << 30


def settings_of(site: Site, host_bytes: int, several_engines: bool) -> dict[str, object]:
    """A pool.json for each host; ``host_bytes``: of its host tier if ``site`` gives none."""
    settings: dict[str, object] = {"host_size": setting_of(site.host_bytes or host_bytes)}
    if site.disk_bytes:
        settings |= {"disk_path": "/var/lib/kvrecall", "disk_size": setting_of(site.disk_bytes)}
        if site.compressed_to < 1:
            settings["disk_compression"] = "zstd"
    if several_engines:
        settings["socket"] = "/run/kvrecall/pool.sock"
    return settings
