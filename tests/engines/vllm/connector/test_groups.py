"""Engines of several KV groups: the scheduler side around vLLM's own block manager, with a real
pool. A device block holds a digest for each token computed into it, so every read of what is not
what the request would have computed there is noticed."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from engines.vllm.connector.test_scheduler import ByName
from kvrecall.block import BlockKey, Namespace, TierName
from kvrecall.config import RecallSettings
from kvrecall.engines.base import HANDOVER
from kvrecall.engines.vllm.compat import config, scheduler
from kvrecall.engines.vllm.compat.config import GroupKind
from kvrecall.engines.vllm.compat.versions import engine_version, minor
from kvrecall.engines.vllm.connector.connector import RecallConnector
from kvrecall.engines.vllm.connector.handover import Promise, receipt
from kvrecall.engines.vllm.connector.hit import BlockRun
from kvrecall.engines.vllm.connector.scheduler import RecallScheduler
from kvrecall.engines.vllm.wire import (
    ORIGIN_BYTES,
    Comparison,
    Deviation,
    EngineFacts,
    GroupFacts,
    StepOrders,
    StepReport,
)
from kvrecall.modelconfig import CacheKind
from kvrecall.plan.model import Group
from kvrecall.pool import Pool
from kvrecall.testing import wait_until

MARK = 8
PLAIN: Any = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
RECORD = 4096 - ORIGIN_BYTES


class Shape(list[KVCacheSpec]):
    """KV groups. ``unit``: tokens after which hits may end inside their blocks; of recurrent layers
    by vLLM's ``prefix_match_unit``, of one group by the pool's."""

    def __init__(self, specs: Sequence[KVCacheSpec], unit: int | None = None) -> None:
        super().__init__(specs)
        self.unit = unit


def full(size: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=size, **PLAIN)


def window(size: int, tokens: int) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=size, sliding_window=tokens, **PLAIN)


def local(size: int, tokens: int) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=tokens, **PLAIN)


def state(size: int) -> KVCacheSpec:
    return MambaSpec(
        block_size=size, shapes=((4, 4),), dtypes=(torch.float32,), mamba_cache_mode="align"
    )


SHAPES = {
    "gemma": Shape([window(16, 40), window(16, 40), full(16)]),
    "sizes": Shape([full(32), window(16, 50)]),
    "windows": Shape([window(16, 40)]),
    "chunks": Shape([local(16, 64), full(16)]),
    "states": Shape([state(32), full(32), state(32)]),
    "finer": Shape([state(64), full(64), state(64)], 16),
}
ONE = Shape([full(64)], 16)
"""Not among the others: the device has no hits inside the blocks of one group."""


class Bench:
    """An engine without a model. ``device``: by block and token, the digest of what was computed
    there; of a state there is one only."""

    def __init__(
        self,
        pool: Pool,
        specs: Sequence[KVCacheSpec],
        blocks: int = 100,
        retention: int | None = None,
        audit: object = "off",
        appraise: str = "load",
    ) -> None:
        init_none_hash(sha256_cbor)
        self.pool = pool
        groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
        cfg = KVCacheConfig(blocks, [], groups, prefix_cache_retention_interval=retention)
        self.kinds = config.kv_groups(cfg)
        unit = getattr(specs, "unit", None)
        hashed = unit if unit and len(specs) > 1 else min(kind.block_size for kind in self.kinds)
        facts = EngineFacts(
            tuple(GroupFacts(kind, RECORD + ORIGIN_BYTES) for kind in self.kinds),
            hash_block_size=hashed,
            ranks=1,
            copies_in_step=True,
            match_unit=unit,
        )
        self.facts = facts
        of_connector = RecallConnector.supports_divergent_local_hybrid_hits.fget
        self.may_diverge = of_connector(SimpleNamespace(_kv_cache_config=cfg))  # type: ignore[misc]
        self.manager = KVCacheManager(cfg, 4096, facts.alignment, facts.hash_block_size)
        is_finer = self.manager.coordinator.enable_partial_hash_hits
        assert is_finer == (unit is not None and len(specs) > 1)
        hashes = CacheConfig(prefix_caching_hash_algo="sha256_cbor")
        self.side = RecallScheduler(
            pool,
            RecallSettings.from_mapping(
                {"host_size": "1MiB", "audit": audit, "load_or_compute": appraise}
            ),
            facts,
            lambda: Namespace.of({"test": "1"}),
            ByName(),
            self.manager.get_block_ids,
            scheduler.first_needed(self.manager),
            scheduler.reachable_blocks(self.manager),
            scheduler.room_for(self.manager),
            scheduler.tail_hash(SimpleNamespace(cache_config=hashes), self.kinds[0].block_size),
        )
        self.device: dict[int, bytearray] = {}
        self.hit: tuple[int, Any] | None = None  # on the device, until the first step takes it
        self.orders: list[StepOrders] = []  # of its steps
        self.hasher = get_request_block_hasher(facts.hash_block_size, sha256_cbor)
        self.names = iter(range(1_000_000))

    def marks(self, group: int, tokens: Sequence[int]) -> list[bytes]:
        """What a group computes for each token, and as the state behind it."""
        digest, marks = f"{group}{self.kinds[group].kind}".encode(), []
        for token in tokens:
            digest = hashlib.blake2b(digest + b"%d" % token, digest_size=MARK).digest()
            marks.append(digest)
        return marks

    def block(self, number: int) -> bytearray:
        """A device block; what was there before anything was computed is no digest."""
        return self.device.setdefault(number, bytearray(b"\xff" * RECORD))

    # ---- an engine's steps ----

    def request(self, prompt: list[int]) -> Request:
        params = SamplingParams(max_tokens=1000)
        params.update_from_generation_config({}, eos_token_id=1)
        request = Request(f"r{next(self.names)}", prompt, params, None, block_hasher=self.hasher)
        self.side.admit(request)
        return request

    def begin(self, prompt: list[int]) -> tuple[Request, int, int]:
        """A request with what the device and the pool have of its prompt: the tokens of each."""
        request = self.request(prompt)
        return request, *self.admit(request)

    def admit(self, request: Request) -> tuple[int, int]:
        """A request that is new, or was preempted, gets what the device and the pool have."""
        self.manager.new_step_starts()
        diverged = False
        if self.may_diverge:
            found = self.manager.get_computed_blocks_for_connector(request)
            hit, on_device, request.shared_prefix_boundary, diverged = found
        else:
            found = self.manager.get_computed_blocks(request)
            hit, on_device, request.shared_prefix_boundary = found
        inside = on_device % self.facts.alignment
        external, _ = self.side.match(request, on_device - inside)
        while external is None:
            external, _ = self.side.match(request, on_device - inside)
        if external <= inside:  # as vLLM's scheduler decides
            external = 0
        else:
            on_device -= inside
            hit = self.manager.truncate_computed_blocks(hit, on_device)
        if diverged and not external:
            hit, on_device, _ = self.manager.get_computed_blocks(request)
        self.hit = (on_device, hit)
        if external:
            got = self.manager.allocate_slots(
                request,
                0,
                *self.hit,
                num_external_computed_tokens=external,
                delay_cache_blocks=True,
            )
            assert got is not None
            self.hit = None
        ids = self.manager.get_block_ids(request.request_id)
        self.side.allocated(request, ids, external)
        request.num_computed_tokens = on_device + external
        if external:
            self._step({})
            self.side.reported(None, {request.request_id}, set())
            self.manager.cache_blocks(request, request.num_computed_tokens)
        return on_device, external

    def preempt(self, request: Request) -> None:
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.hit = None

    def compute(self, request: Request, tokens: int) -> None:
        """The next so many tokens; what they attend to must be what was computed before."""
        start, end = request.num_computed_tokens, request.num_computed_tokens + tokens
        request.status = RequestStatus.RUNNING
        if self.hit is not None:
            on_device, hit = self.hit
            request.num_computed_tokens = 0
            got = self.manager.allocate_slots(request, tokens, on_device, hit)
            request.num_computed_tokens, self.hit = start, None
        else:
            self.check(request, start)
            got = self.manager.allocate_slots(request, tokens)
        assert got is not None
        copies, kept = self.manager.take_kv_cache_block_copies()
        for copy in copies:
            self.device[copy.dst_block_id] = bytearray(self.block(copy.src_block_id))
        self.manager.block_pool.free_blocks(kept)
        for group, kind in enumerate(self.kinds):
            ids = self.manager.get_block_ids(request.request_id)[group]
            size = kind.block_size
            marks = self.marks(group, request.all_token_ids[:end])
            if kind.kind is GroupKind.STATE:
                self.block(ids[-(-end // size) - 1])[:MARK] = marks[-1]
                continue
            for token in range(start, end):
                at = token % size * MARK
                self.block(ids[token // size])[at : at + MARK] = marks[token]
        self._step({request.request_id: tokens})
        request.num_computed_tokens = end
        if end == request.num_tokens:
            request.append_output_token_ids(7)

    def check(self, request: Request, computed: int) -> None:
        """Every block that the next token attends to holds what this request computes there."""
        tables = self.manager.get_block_ids(request.request_id)
        first_needed = scheduler.first_needed(self.manager)
        for group, kind in enumerate(self.kinds):
            if not computed:
                continue
            size = kind.block_size
            marks = self.marks(group, request.all_token_ids[:computed])
            for index in range(first_needed(group, computed), -(-computed // size)):
                block = tables[group][index]
                assert block, (kind, index, computed)
                want = b"".join(marks[index * size : (index + 1) * size])
                if kind.kind is GroupKind.STATE:
                    want = marks[-1]
                assert self.device[block].startswith(want), (kind, index, computed)

    def _step(self, scheduled: dict[str, int]) -> None:
        block_state = SimpleNamespace(
            boundary_state_offloads=self.manager.take_boundary_state_offloads()
        )
        step = SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            kv_connector_block_state=block_state,
        )
        orders = self.side.orders(step, self.pool.arena_handle())
        self.manager.new_step_starts()
        memory = self.pool.arena.memory
        self.orders.append(orders)
        for load in orders.loads:
            assert load.copies, "vLLM took what it was offered"
            for copy in load.copies:
                for block, offset in zip(copy.block_ids, copy.offsets, strict=True):
                    self.device[block] = bytearray(memory[offset : offset + RECORD])
        for store in orders.stores:
            for block, offset in zip(store.copy.block_ids, store.copy.offsets, strict=True):
                memory[offset : offset + RECORD] = self.block(block)
                at = offset + orders.record_bytes[store.copy.group]
                memory[at : at + ORIGIN_BYTES] = store.origin
        self.side.reported(StepReport({s.store_id: 1 for s in orders.stores}), set(), set())

    def prefill(self, request: Request, chunk: int = 1 << 30) -> None:
        """Computes all its tokens in chunks, cut as vLLM's scheduler cuts them for recurrent
        states."""
        size, unit, whole = self.facts.alignment, self.facts.unit, request.num_tokens
        while (start := request.num_computed_tokens) < whole:
            end = min(whole, start + chunk)
            if any(kind.kind is GroupKind.STATE for kind in self.kinds):
                stops = [
                    request.shared_prefix_boundary // size * size,
                    (start // size + 1) * size if start % size else 0,
                    (whole - 1) // size * size,
                    (request.num_prompt_tokens - 1) // unit * unit,
                ]
                if end < whole:
                    stops.append(end // size * size)
                end = min((stop for stop in stops if start < stop < end), default=end)
            self.compute(request, end - start)

    def end(
        self, request: Request, status: RequestStatus = RequestStatus.FINISHED_STOPPED
    ) -> dict[str, Any]:
        """What the engine's reply carries for others."""
        request.status, self.hit = status, None
        states = self.manager.finalize_partial_tail_offloads(request)
        self.manager.remove_skipped_blocks(request.request_id, request.num_computed_tokens)
        tables = self.manager.get_block_ids(request.request_id)
        hold, found = self.side.finished(request, tables, states)
        if hold:  # the blocks are freed when the next step has copied them
            self._step({})
        self.manager.free(request)
        return found

    def run(self, prompt: list[int], answer: int = 0, chunk: int = 1 << 30) -> tuple[int, int]:
        request, on_device, recalled = self.begin(prompt)
        self.prefill(request, chunk)
        for _ in range(answer):
            self.compute(request, 1)
        self.end(request)
        return on_device, recalled

    def forget_device(self) -> None:
        assert self.manager.reset_prefix_cache()


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool.open(RecallSettings.from_mapping({"host_size": "4MiB"}).pool) as pool:
        yield pool


@pytest.fixture(params=list(SHAPES))
def specs(request: pytest.FixtureRequest) -> list[KVCacheSpec]:
    return SHAPES[request.param]


def prompt(tokens: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(500) for _ in range(tokens)]


@pytest.mark.parametrize("retention", [None, 0])
@pytest.mark.parametrize("tokens", [33, 64, 65, 100, 161, 320])
def test_the_pool_recalls_what_the_device_would_have(
    pool: Pool, specs: list[KVCacheSpec], tokens: int, retention: int | None
) -> None:
    bench = Bench(pool, specs, retention=None if len(specs) == 1 else retention)
    bench.run(prompt(tokens))
    on_device, _ = bench.run(prompt(tokens))
    # Before 0.32 vLLM keeps no state inside the last block of a prompt that fills it.
    fills = tokens == 64 and specs is SHAPES["finer"] and minor(engine_version()) < "0.32"
    assert (on_device > 0) is not fills
    bench.forget_device()
    assert bench.run(prompt(tokens)) == (0, on_device)
    assert pool.stats().leases == pool.stats().reserved == 0


def test_the_pool_goes_on_where_the_device_ends(pool: Pool, specs: list[KVCacheSpec]) -> None:
    asked = prompt(320)
    Bench(pool, specs).run(asked)
    whole = Bench(pool, specs).run(asked)[1]
    bench = Bench(pool, specs)
    bench.run(asked[:161])
    on_device, recalled = bench.run(asked)
    assert on_device >= 128
    assert on_device + recalled == whole > on_device


def test_a_state_that_the_device_has_lost_comes_from_the_pool(pool: Pool) -> None:
    """The device has full attention's blocks of the whole prefix, and so has the pool: a hit that
    began behind them would be empty."""
    bench = Bench(pool, SHAPES["states"])
    asked = prompt(161)
    bench.run(asked)
    states = [at for at, kind in enumerate(bench.kinds) if kind.kind is GroupKind.STATE]
    marks = {bench.marks(at, asked[:end])[-1] for at in states for end in (32, 64, 96, 128, 160)}
    lost = {block for block, held in bench.device.items() if bytes(held[:MARK]) in marks}
    assert lost
    bench.manager.block_pool.evict_blocks(lost)
    assert bench.run(asked) == (0, 160)


def test_only_the_needed_blocks_move(pool: Pool, specs: list[KVCacheSpec]) -> None:
    bench = Bench(pool, specs)
    bench.run(prompt(320))
    bench.forget_device()
    _, _, recalled = bench.begin(prompt(320))
    (load,) = bench.orders[-1].loads
    moved = Counter({copy.group: len(copy.block_ids) for copy in load.copies})
    for group, kind in enumerate(bench.kinds):
        whole = -(-recalled // kind.block_size)
        reach = {
            GroupKind.FULL: whole,
            GroupKind.WINDOW: -(-(kind.reach - 1) // kind.block_size),
            GroupKind.STATE: 1,
        }[kind.kind]
        if isinstance(specs[group], ChunkedLocalAttentionSpec):
            reach = whole - recalled // kind.reach * kind.reach // kind.block_size
        assert moved[group] == min(whole, reach), kind


def test_a_hit_ends_where_every_group_can_serve(pool: Pool) -> None:
    bench = Bench(pool, SHAPES["gemma"])
    bench.run(prompt(320))
    bench.forget_device()
    state = next(iter(bench.side.namespaces.groups_of(Namespace.of({"test": "1"}))))
    windows = [one.key for one in pool.host_blocks() if one.key.startswith(state.digest)]
    assert len(windows) == 20
    pool.drop(windows[15:17])
    # The last boundary whose window (3 blocks) has no gap: in front of the dropped blocks.
    assert bench.run(prompt(320)) == (0, 15 * 16)
    bench.forget_device()
    assert bench.run(prompt(320)) == (0, 19 * 16), "they were saved again"


def test_blocks_of_a_hit_that_is_not_worth_its_load_count_as_declined(pool: Pool) -> None:
    """Only the first blocks would load faster than they compute, and no hit ends there."""
    bench = Bench(pool, SHAPES["gemma"], appraise="auto")
    bench.run(prompt(320))
    bench.forget_device()
    bench.side.costs.saw_step(1000, 500, 1e-3)
    bench.side.costs.saw_load(TierName.HOST, 1, 0.02)
    groups = bench.side.namespaces.groups_of(Namespace.of({"test": "1"}))
    windows = [one.key for one in pool.host_blocks() if one.key.startswith(groups[0].digest)]
    pool.drop(windows[:4])
    assert bench.run(prompt(320)) == (0, 0)
    assert bench.side.counters.counts["blocks_declined"] == 19


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "windows"])
def test_shared_prefixes_are_kept_where_they_end(pool: Pool, shape: str) -> None:
    """vLLM's default keeps windows and states only at the end of a prompt. The second request that
    shares a prefix makes the pool keep them where it ends; the third is served from there. Without
    full attention nothing tells where that is."""
    bench = Bench(pool, SHAPES[shape], retention=0)
    shared = prompt(160)
    recalled = []
    for seed in (2, 3, 4):
        recalled.append(bench.run(shared + prompt(100, seed))[1])
        bench.forget_device()
    assert recalled[0] == 0
    assert recalled[2] == 160 // bench.facts.alignment * bench.facts.alignment


def test_the_next_turn_begins_behind_the_answer(pool: Pool) -> None:
    bench = Bench(pool, SHAPES["gemma"], retention=0)
    first = prompt(100)
    bench.run(first, answer=60)
    bench.forget_device()
    turn = [*first, *[7] * 60, *prompt(20, 9)]
    assert bench.run(turn)[1] == 160


@pytest.mark.parametrize(
    ("shape", "loaded", "compared"),
    [
        ("gemma", 128, {0: 1, 1: 1, 2: 1}),
        ("sizes", 96, {0: 1, 1: 2}),
        ("windows", 128, {0: 1}),
        ("chunks", 128, {0: 1, 1: 1}),
        ("states", 0, {0: 1, 1: 4, 2: 1}),
    ],
)
def test_another_engines_blocks_are_compared_in_every_group(
    pool: Pool, shape: str, loaded: int, compared: dict[int, int]
) -> None:
    """Those behind the boundary before the hit's end; all of it where a state is needed."""
    writer = Bench(pool, SHAPES[shape])
    writer.run(prompt(160)[:97])  # which keeps a state there
    writer.run(prompt(160))
    reader = Bench(pool, SHAPES[shape], audit=4096)
    for recalled in (loaded, 128 if shape in ("sizes", "states") else 144):
        request, _, found = reader.begin(prompt(160))
        assert found == recalled
        reader.orders.clear()
        reader.prefill(request)
        comparisons = [one for step in reader.orders for one in step.comparisons]
        assert {one.copy.group: len(one.copy.block_ids) for one in comparisons} == compared
        assert {one.starts_over for one in comparisons} <= {bool(loaded)}
        reader.side.reported(agreement(comparisons), set(), set())
        reader.end(request)
        reader.forget_device()
        compared = {}
    writer.side._auditor._since -= 2.0
    writer.run(prompt(160, 9))
    assert reader.begin(prompt(160, 9))[2] == (loaded or 128), "later; states load for an hour more"


def test_what_a_boundary_needs_is_not_proved_by_earlier_blocks_behind_it(pool: Pool) -> None:
    Bench(pool, SHAPES["gemma"]).run(prompt(160))
    reader = Bench(pool, SHAPES["gemma"], audit=4096)
    request = reader.request(prompt(160))
    ticket = pool.acquire(reader.side._states[request.request_id].keys(1, 2), 1.0)
    pool.arena.array()[pool.poll(ticket).offsets[0] + RECORD + ORIGIN_BYTES - 1] += 1
    pool.release(ticket)
    assert reader.admit(request) == (0, 0)


def test_of_one_hit_in_so_many_the_last_block_of_each_group_is_compared(pool: Pool) -> None:
    bench = Bench(pool, SHAPES["gemma"], audit=2)
    for recalled in (0, 144, 0):
        assert bench.run(prompt(160)) == (0, recalled)
        bench.forget_device()
    compared = [one.copy for step in bench.orders for one in step.comparisons]
    assert [(one.group, len(one.block_ids)) for one in compared] == [(0, 1), (1, 1), (2, 1)]


def agreement(comparisons: Sequence[Comparison]) -> StepReport:
    report = StepReport()
    for one in comparisons:
        _, known = report.compared.get(one.number, (0, Deviation()))
        ranks = sum(each.number == one.number for each in comparisons)
        report.compared[one.number] = ranks, known.plus(Deviation(len(one.copy.block_ids)))
    return report


def test_namespaces_of_one_group_are_those_of_the_engine(pool: Pool) -> None:
    one, several = Bench(pool, [full(16)]), Bench(pool, SHAPES["gemma"])
    one.run(prompt(64))
    assert [name for name, _ in pool.namespaces()] == [Namespace.of({"test": "1"})]
    several.run(prompt(64))
    names = {dict(name.parts).get("group") for name, _ in pool.namespaces()}
    assert names == {None, "0: window of 40 tokens", "1: window of 40 tokens", "2: full"}


def touches_of(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the pool is told of uses, beside the chains."""
    touches: list[dict[str, Any]] = []
    touch = pool.touch

    def watched(keys: Sequence[BlockKey], **others: Any) -> None:
        touches.append(others)
        touch(keys, **others)

    monkeypatch.setattr(pool, "touch", watched)
    return touches


def test_the_pool_learns_where_requests_end(
    pool: Pool, specs: list[KVCacheSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The windows and states from which a conversation goes on: those of the prompt on arrival,
    those of the answer when it is complete."""
    touches = touches_of(pool, monkeypatch)
    bench = Bench(pool, specs)
    bench.run(prompt(345 if specs is SHAPES["finer"] else 320), answer=40)
    prompts_end, answers_end = (touches[at].get("ending", ()) for at in (0, -1))
    if len(specs) == 1:  # the windows are the chain
        assert not prompts_end
        return
    for ending in (prompts_end, answers_end):
        assert ending
        assert pool.locate(ending).blocks == len(ending)
    assert set(prompts_end) != set(answers_end)


@pytest.mark.parametrize("shape", ["gemma", "sizes", "chunks", "states"])
def test_the_pool_keeps_what_the_plan_says(pool: Pool, shape: str) -> None:
    """With vLLM's default retention, of a prompt that takes several steps and its answer."""
    bench = Bench(pool, SHAPES[shape], blocks=400, retention=0)
    bench.run(prompt(1610), answer=100, chunk=320)
    base = Namespace.of({"test": "1"})
    for spec, kind, space in zip(
        SHAPES[shape], bench.kinds, bench.side.namespaces.groups_of(base), strict=True
    ):
        kept = sum(one.key.startswith(space.digest) for one in pool.host_blocks())
        named = "chunk" if isinstance(spec, ChunkedLocalAttentionSpec) else kind.kind
        group = Group(CacheKind(str(named)), kind.reach or 0, 1, kind.block_size, 0, 0)
        # The last of 1,710 tokens is not full, nor is the last of the answer computed.
        assert kept == pytest.approx(group.pool_blocks(1709), abs=1)


def test_windows_of_a_promised_prefix_count_as_used(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request looks for them before they are there, and uses them later."""
    writer, reader = Bench(pool, SHAPES["gemma"]), Bench(pool, SHAPES["gemma"])
    request = Request("r", prompt(160), SamplingParams(), None, block_hasher=reader.hasher)
    request.kv_transfer_params = receipt(Namespace.of({"test": "1"}), 144)
    reader.side.admit(request)
    assert reader.side.match(request, 0) == (None, False)
    writer.run(prompt(160))
    touches = touches_of(pool, monkeypatch)
    wait_until(lambda: reader.side.match(request, 0) == (144, True))
    assert sum(len(one.get("hanging", ())) for one in touches) == 2 * 3


def test_loads_that_would_wait_for_each_other_are_not_admitted_together(pool: Pool) -> None:
    """vLLM preempts only what runs, so requests that are loaded and have no room to go on would
    hold their blocks forever."""
    specs = [local(32, 256), local(32, 256), local(32, 256), full(32)]
    for seed in (1, 2, 3):
        Bench(pool, specs).run(prompt(651, seed))
    bench = Bench(pool, specs, blocks=100)
    first, _, recalled = bench.begin(prompt(651, 1))
    assert recalled == 640
    second, _, recalled = bench.begin(prompt(651, 2))
    assert recalled == 640
    free = bench.manager.block_pool.get_num_free_blocks()
    third = Request("third", prompt(651, 3), SamplingParams(), None, block_hasher=bench.hasher)
    assert free >= 32, "the load itself would fit"
    for _ in range(3):
        assert bench.side.match(third, 0) == (None, False)
    bench.prefill(first)
    bench.end(first)
    assert bench.side.match(third, 0) == (640, True)
    bench.prefill(second)
    bench.end(second)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [*SHAPES, "one"])
def test_two_engines_on_a_pool_too_small(shape: str, seed: int) -> None:
    """Conversations that fork and grow. Requests of both engines are preempted and aborted at any
    moment; every block that one reads is what it would have computed."""
    draw, specs = random.Random(seed), SHAPES.get(shape, ONE)
    retention = draw.choice([None, 0]) if len(specs) > 1 else None
    recalled = Counter[str]()
    size = ("160KiB", "400KiB")[seed % 2]
    with Pool.open(RecallSettings.from_mapping({"host_size": size}).pool) as pool:
        benches = [Bench(pool, specs, blocks=120, retention=retention) for _ in range(2)]
        running: list[Request | None] = [None, None]
        prompts = [prompt(200, seed), *(prompt(draw.randrange(20, 200), n) for n in range(3))]
        for number in range(400):
            at = draw.randrange(2)
            bench, request = benches[at], running[at]
            if request is None:
                asked = draw.choice(prompts[:1] if draw.random() < 0.4 else prompts)
                if draw.random() < 0.6:
                    fork = draw.choice([33, 64, 100, draw.randrange(10, 200), len(asked)])
                    asked = asked[:fork] + prompt(draw.randrange(1, 80), number)
                if len(asked) < 260:
                    prompts.append(asked)
                request, _, came = bench.begin(asked)
                running[at] = request
                recalled["begun"] += came
            elif (chance := draw.random()) < 0.1:
                bench.preempt(request)
                bench.forget_device()
                recalled["resumed"] += bench.admit(request)[1]
            elif chance < 0.2:
                bench.end(request, RequestStatus.FINISHED_ABORTED)
                running[at] = None
            elif chance < 0.3 or request.num_tokens > 400:
                prompts.append(list(request.all_token_ids)[:260])
                bench.end(request)
                running[at] = None
                if draw.random() < 0.5:
                    bench.forget_device()
            else:
                bench.prefill(request, draw.choice([32, 48, 96, 1 << 30]))
        for bench, request in zip(benches, running, strict=True):
            if request is not None:
                bench.end(request)
        assert pool.stats().leases == pool.stats().reserved == 0
    assert recalled["begun"] > 0
    assert recalled["resumed"] > 0


@pytest.mark.parametrize(
    "others",
    [
        [window(16, 56), window(16, 56), full(16)],
        [full(16), window(16, 40), window(16, 40)],
        [window(16, 40), full(16)],
        [full(16)],
    ],
    ids=["another window", "another order", "fewer groups", "full attention"],
)
def test_engines_of_other_groups_find_nothing(pool: Pool, others: list[KVCacheSpec]) -> None:
    """Even if nothing else in their namespaces differed."""
    Bench(pool, SHAPES["gemma"]).run(prompt(320))
    reader = Bench(pool, others)
    assert reader.run(prompt(320)) == (0, 0)
    reader.forget_device()
    assert reader.run(prompt(320))[1] == 304


# ---- hits that end inside blocks ------------------------------------------------------------


@pytest.mark.parametrize("beyond", [0, 1, 15])
def test_of_240_common_tokens_240_are_recalled(pool: Pool, beyond: int) -> None:
    bench = Bench(pool, Shape([full(128)], 16))
    common = prompt(240)
    bench.run([*common, *prompt(beyond, 2)])
    bench.forget_device()
    assert bench.run([*common, *prompt(60, 3)]) == (0, 240)


@pytest.mark.parametrize("tokens", [16, 17, 33, 64, 65, 100, 128, 161, 320])
def test_one_group_is_recalled_to_the_last_unit(pool: Pool, tokens: int) -> None:
    bench = Bench(pool, ONE)
    bench.run(prompt(tokens))
    bench.forget_device()
    assert bench.run(prompt(tokens)) == (0, (tokens - 1) // 16 * 16)


def test_a_block_that_is_saved_whole_serves_hits_inside_it(pool: Pool) -> None:
    """No record of its own is made for the end of a prompt that fills its blocks."""
    bench = Bench(pool, ONE)
    bench.run(prompt(128))
    assert len(pool.host_blocks()) == 2
    bench.forget_device()
    assert bench.run(prompt(128)) == (0, 112)


@pytest.mark.parametrize("shape", ["one", "finer"])
def test_an_answer_is_gone_on_from_where_the_engine_can(pool: Pool, shape: str) -> None:
    """Of one group from the answer's end. With recurrent layers from the end of the prompt, where
    the device keeps a state: inside a block that was saved whole later."""
    bench = Bench(pool, SHAPES.get(shape, ONE), retention=0 if shape == "finer" else None)
    first = prompt(100)
    bench.run(first, answer=60)
    turn = [*first, *[7] * 60, *prompt(20, 9)]
    asked = Request("r", turn, SamplingParams(), None, block_hasher=bench.hasher)
    _, on_device, _ = bench.manager.get_computed_blocks(asked)
    assert on_device == (96 if shape == "finer" else 128)
    bench.forget_device()
    assert bench.run(turn)[1] == (96 if shape == "finer" else 160)


def test_a_forked_prompt_shares_up_to_the_tail(pool: Pool) -> None:
    bench = Bench(pool, SHAPES["finer"])
    bench.run(prompt(110))
    bench.forget_device()
    fork = [*prompt(100), *prompt(80, 3)]
    assert bench.run(fork) == (0, 96)
    bench.forget_device()
    assert bench.run(fork) == (0, 176)
    bench.forget_device()
    assert bench.run(prompt(110)) == (0, 96), "what is behind a tail is nobody's"


def test_a_request_that_ends_at_its_tail_leaves_it(pool: Pool) -> None:
    """vLLM hands the state over when the request ends: no later step has put it aside."""
    bench = Bench(pool, SHAPES["finer"])
    request, _, _ = bench.begin(prompt(110))
    bench.compute(request, 64)
    bench.compute(request, 32)
    bench.end(request, RequestStatus.FINISHED_ABORTED)
    bench.forget_device()
    assert bench.run(prompt(110)) == (0, 96)


@pytest.mark.parametrize("shape", ["one", "finer"])
def test_a_tail_is_promised_and_awaited(pool: Pool, shape: str) -> None:
    specs = SHAPES.get(shape, ONE)
    prefill = Bench(pool, specs)
    request, _, _ = prefill.begin(prompt(110))
    prefill.prefill(request)
    receipt = prefill.end(request)
    decode = Bench(pool, specs)
    promised = Promise.of(receipt, decode.facts.unit, 1.0)
    assert promised is not None
    assert promised.tokens == 96 if shape == "finer" else 110 // 16 * 16
    assert decode.run(prompt(110)) == (0, 96)


@pytest.mark.parametrize("shape", ["gemma", "windows"])
def test_drafts_hide_no_block_of_a_window(
    pool: Pool, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that drafts seemed to complete is saved when tokens do."""
    bench = Bench(pool, SHAPES[shape])
    request, *_ = bench.begin(prompt(29))
    bench.prefill(request)
    step = bench._step
    monkeypatch.setattr(bench, "_step", lambda tokens: step(dict.fromkeys(tokens, 4)))
    bench.compute(request, 1)  # and three drafts, which are rejected
    monkeypatch.undo()
    bench.compute(request, 1)
    assert bench.orders[-1].stores == []
    bench.compute(request, 1)
    groups = {store.copy.group for store in bench.orders[-1].stores}
    assert groups == {*range(len(bench.kinds))}


def test_a_part_of_a_run_hangs_on_the_block_before_it() -> None:
    above, *keys = (BlockKey(bytes([number]) * 40) for number in range(5))
    run = BlockRun(0, 4, tuple(keys), (TierName.HOST,) * 4, above, tail=9)
    parts = [run.part(0, 2), run.part(2, 4)]
    assert [part.parent for part in parts] == [above, keys[1]]
    assert [(part.first, part.keys, part.tail) for part in parts] == [
        (4, (keys[0], keys[1]), None),
        (6, (keys[2], keys[3]), 9),
    ]
    beside = BlockRun(0, 4, tuple(keys), (TierName.HOST,) * 4, None, (above, None, above, None))
    assert (beside.part(1, 3).parent, beside.part(1, 3).parents) == (None, (None, above))


def test_a_hit_inside_a_block_needs_the_tail_of_every_group(pool: Pool) -> None:
    specs = Shape([state(64), full(64), full(64)], 16)
    assert Bench(pool, specs).run(prompt(110)) == (0, 0)
    assert Bench(pool, specs).run(prompt(110)) == (0, 96)
    bench = Bench(pool, specs)
    request = bench.request(prompt(110))
    of_request = bench.side.state_of(request.request_id)
    assert of_request is not None
    tail = of_request.key_at(96, 2)
    assert tail is not None
    pool.drop([tail])
    assert bench.admit(request) == (0, 64)


@pytest.mark.parametrize(
    ("specs", "tokens", "promised"),
    [(Shape([full(16), window(32, 64)]), 60, 32), (SHAPES["states"], 65, 64)],
)
def test_what_is_promised_ends_where_every_group_can(
    pool: Pool, specs: Shape, tokens: int, promised: int
) -> None:
    bench = Bench(pool, specs)
    request, _, _ = bench.begin(prompt(tokens))
    bench.prefill(request)
    assert bench.end(request)[HANDOVER]["tokens"] == promised
    assert Bench(pool, specs).run(prompt(tokens)) == (0, promised)


@pytest.mark.parametrize("shape", ["one", "finer"])
def test_tails_of_another_engine_are_read_once_it_is_proved(pool: Pool, shape: str) -> None:
    """Whole blocks and states are compared; behind the KV of a tail there may be any bytes."""
    specs = SHAPES.get(shape, ONE)
    Bench(pool, specs).run(prompt(110))
    reader = Bench(pool, specs, audit=4096)
    assert reader.run(prompt(110)) == (0, 0)
    compared = Counter[int]()
    for one in (one for each in reader.orders for one in each.comparisons):
        compared[one.copy.group] += len(one.copy.block_ids)
        reader.side.reported(agreement([one]), set(), set())
    assert compared == ({0: 1, 1: 1, 2: 1} if shape == "finer" else {0: 1})
    reader.forget_device()
    assert reader.run(prompt(110)) == (0, 96)
    assert pool.stats().leases == pool.stats().reserved == 0


def test_the_sources_of_a_prompt_know_a_tail_on_the_device(pool: Pool) -> None:
    """The connector is shown whole blocks of the device's hit only."""
    bench = Bench(pool, SHAPES["finer"])
    bench.run(prompt(110))
    request, on_device, _ = bench.begin(prompt(110))
    assert on_device == 96
    bench.prefill(request)
    state = bench.side.state_of(request.request_id)
    assert state is not None
    assert state.sources()["device"] == 96
    bench.end(request)


def picture(name: str, offset: int, length: int) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(None, "image", name, place)


def test_a_tails_hash_covers_all_that_a_blocks_does() -> None:
    """The oracle: the hash that vLLM makes of the same tokens as one block."""
    init_none_hash(sha256_cbor)
    fields = SimpleNamespace(cache_config=CacheConfig(prefix_caching_hash_algo="sha256_cbor"))
    of = scheduler.tail_hash(fields, 64)
    adapter = LoRARequest("adapter", 1, "/nowhere")
    seen = set()
    for tail in (16, 48):
        for salt in (None, "a", "b"):
            for lora in (None, adapter):
                for media in ([], [picture("one", 8, 70)], [picture("two", 8, 70)]):
                    extras = {"mm_features": media, "lora_request": lora, "cache_salt": salt}
                    made, whole = (
                        Request(
                            "r",
                            prompt(128 + 63),
                            SamplingParams(),
                            None,
                            block_hasher=get_request_block_hasher(size, sha256_cbor),
                            **extras,
                        )
                        for size in (64, tail)
                    )
                    first = of(made, tail)
                    assert first == whole.block_hashes[0]
                    seen |= {first, of(made, 64 + tail), of(made, 128 + tail)}
    assert len(seen) == 2 * 3 * 2 * 3 * 3
