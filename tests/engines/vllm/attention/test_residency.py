"""Offloaded sequences: what their slots hold, and attention that reads blocks in place."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engines.vllm.attention.sequences import BLOCK, Bench, Sequence, shape_of
from kvrecall.attention.selection import slots_of, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention import host_selection
from kvrecall.engines.vllm.attention.base import CHECKSUM_BYTES, AttentionParameters
from kvrecall.engines.vllm.attention.cpu import attend, halves, schedule
from kvrecall.engines.vllm.attention.offloaded import (
    NearArena,
    OffloadedSequence,
    Records,
    checksums_of_layer,
    digests_of_layer,
)
from kvrecall.engines.vllm.attention.step import OffloadedRow
from kvrecall.engines.vllm.wire import Arrival, Departure, OffloadOrders
from kvrecall.pool.arena import Arena
from kvrecall.pool.slots import ALIGNMENT, slot_bytes_of

SETTINGS = RetrievalSettings(
    init_tokens=100,
    local_tokens=300,
    dense_boundary=0,
    offload_boundary=0,
    gate=False,
    least_blocks=1,
)


MAPPED: list[NearArena] = []


@pytest.fixture(autouse=True)
def unmapped() -> Iterator[None]:
    """The arenas are unmapped after each test."""
    yield
    while MAPPED:
        MAPPED.pop().close()


LAYER_AT = 256
"""Where in a record the layer's page begins."""


def offload(
    bench: Bench, sequence: Sequence, tokens: int, gone: int, settings: RetrievalSettings
) -> OffloadedSequence:
    """Offloads the first ``gone`` middle blocks: their device blocks are wiped."""
    split = split_of(tokens, BLOCK, settings)
    ids = sequence.block_ids[split.init : split.init + gone]
    rows = bench.cache.view(len(bench.cache), -1).view(torch.uint8)
    page = rows.shape[1]
    arena = Arena.create(gone * (page + ALIGNMENT) + 512)
    offsets = tuple(at * (page + ALIGNMENT) for at in range(gone))
    for offset, block in zip(offsets, ids.tolist(), strict=True):
        begin = offset + LAYER_AT
        arena.array()[begin : begin + page] = rows[block].numpy()
    records = Records(arena.array(), {"layer": LAYER_AT}, arena.handle())
    begins, slots = np.array(offsets, dtype=np.int64), torch.empty(0, dtype=torch.int32)
    near = NearArena(records, {"layer": bench.cache})
    MAPPED.append(near)
    offloaded = OffloadedSequence("one", split.init, begins, slots, records, near)
    bench.layer.digest(bench.cache, bench.freshness.take_stale(ids))
    bench.layer.depart(offloaded, ids, bench.cache)
    bench.cache[ids] = float("nan") if bench.cache.is_floating_point() else 0x7F  # NaN, too
    return offloaded


SHAPES = {
    "float32": shape_of(),
    "bfloat16": shape_of(dtype=torch.bfloat16),
    "fp8": shape_of(dtype=torch.bfloat16, fp8=torch.float8_e4m3fn),
    "sinks": shape_of(sinks=True),
}
SINKS = torch.tensor([5.0, 6.0, 7.0, 8.0])


@pytest.mark.parametrize(
    ("kind", "tokens", "stay"),
    [
        ("float32", 769, 0),
        ("float32", 4097, 1),
        ("bfloat16", 1000, 1),
        ("bfloat16", 1153, 0),
        ("fp8", 769, 1),
        ("fp8", 4097, 0),
        ("sinks", 1000, 0),
        ("sinks", 1153, 1),
    ],
)
def test_blocks_read_in_place_give_the_same_bits(kind: str, tokens: int, stay: int) -> None:
    torch.manual_seed(tokens)
    shape = SHAPES[kind]
    settings = replace(SETTINGS, topk_share=0.3)
    eighths = (0.5, 2.0) if shape.fp8 else ()
    terms = AttentionParameters(shape.head_dim**-0.5, 0.0, SINKS if shape.sinks else None, *eighths)
    bench = Bench(shape, settings, 100, terms)
    sequence = bench.sequence(tokens)
    queries = [torch.randn_like(sequence.query) for _ in range(4)]
    want = [bench.decode(replace(sequence, query=query)) for query in queries]
    dense = whole(bench, sequence, tokens)
    gone = split_of(tokens, BLOCK, settings).middle - stay
    offloaded = offload(bench, sequence, tokens, gone, settings)
    got = bench.decode_offloaded(sequence, offloaded, *queries)
    assert torch.equal(torch.stack(got), torch.stack(want))
    table = sequence.block_ids.to(torch.int32)
    row = OffloadedRow(offloaded, slice(0, 1), table, tokens, False)
    got = bench.whole(row, sequence.query[None], bench.cache, terms)
    assert torch.equal(got, dense)
    assert bench.activity.blocks_in_place > 0


@pytest.mark.parametrize("share", [0.3, 0.02])
def test_pytorch_selects_what_compiled_code_does(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of blocks on the device, and of some that have left it, by narrowing and without."""
    torch.manual_seed(1)
    settings = replace(SETTINGS, topk_share=share)
    bench = Bench(shape_of(), settings, 100)
    sequence = bench.sequence(6000)
    want = bench.decode(sequence)
    offloaded = offload(bench, sequence, 6000, 20, settings)
    monkeypatch.setattr(host_selection, "is_compiled", lambda: False)
    monkeypatch.delattr(host_selection.Search, "run")
    assert torch.equal(bench.decode_offloaded(sequence, offloaded)[0], want)
    assert bench.activity.blocks_in_place > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [769, 1000, 4097])
def test_tokens_computed_over_blocks_in_the_arena_give_the_same_bits(
    tokens: int, dtype: torch.dtype
) -> None:
    """Several tokens at once, as of a prompt's rest, in pieces of awkward lengths."""
    torch.manual_seed(tokens)
    bench = Bench(shape_of(dtype=dtype), SETTINGS, 100)
    sequence = bench.sequence(tokens)
    pieces = [(tokens - 150, 1), (tokens - 149, 22), (tokens - 127, 127)]
    queries = [torch.randn(count, *sequence.query.shape).to(dtype) for _, count in pieces]
    want = [
        whole(bench, sequence, first + count, query)
        for (first, count), query in zip(pieces, queries, strict=True)
    ]
    gone = split_of(tokens - 150, BLOCK, SETTINGS).middle
    offloaded = offload(bench, sequence, tokens - 150, gone, SETTINGS)
    table = sequence.block_ids.to(torch.int32)
    scale = bench.shape.head_dim**-0.5
    for (first, count), query, result in zip(pieces, queries, want, strict=True):
        row = OffloadedRow(offloaded, slice(0, count), table, first + count, True)
        got = bench.whole(row, query, bench.cache, AttentionParameters(scale))
        assert torch.equal(got, result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bounds", "mean"])
@pytest.mark.parametrize("damaged", [(), (0, 131, 1000, -1)])
def test_a_sequence_that_begins_off_the_device_decodes_to_the_same_bits(
    damaged: tuple[int, ...], kind: str, dtype: torch.dtype
) -> None:
    """By the digests in its blocks' records; the device has neither its keys nor its digests. In
    some blocks a byte of the digests is ``damaged``."""
    torch.manual_seed(3)
    settings = replace(SETTINGS, digest=kind)
    bench = Bench(shape_of(dtype=dtype), settings, 100)
    sequence = bench.sequence(3000)
    want = bench.decode(sequence)
    split = split_of(3000, BLOCK, settings)
    ids = sequence.block_ids[split.init : split.local]
    bench.layer.sign(ids)
    parts = [
        bench.cache.view(100, -1).view(torch.uint8),
        bench.layer.digest_rows(bench.cache),
        bench.layer.checksum_rows(bench.cache),
    ]
    record = torch.cat([part[ids].reshape(split.middle, -1) for part in parts], 1).numpy()
    page = parts[0].shape[1]
    for block, byte in enumerate(damaged, start=3):
        record[block, byte if byte < 0 else page + byte] ^= 64
    for part in parts:
        part[ids] = 255  # no numbers
    slot = slot_bytes_of(record.shape[1])
    offsets = tuple(at * slot for at in range(split.middle))
    count = 0 if bench.kernel.on_host else slots_of(split, split.middle, settings)[1]
    arrival = Arrival("one", split.init, offsets, tuple(bench.take(count).tolist()))
    bench.group.register({"layer": bench.cache})
    starts = {"layer": 0, digests_of_layer("layer"): page}
    starts[checksums_of_layer("layer")] = record.shape[1] - CHECKSUM_BYTES
    memory = np.pad(record, ((0, 0), (0, slot - record.shape[1]))).reshape(-1)
    records = Records(memory, starts)
    last = int(sequence.block_ids[-1])
    assert not bench.group.take(OffloadOrders([], {last: "one"}, [], [arrival]), records)
    assert bench.activity.digests_mended == len(damaged)
    offloaded = bench.group.sequence(last)
    assert offloaded is not None
    sequence.block_ids[split.init : split.local] = 0
    assert torch.equal(bench.decode_offloaded(sequence, offloaded)[0], want)
    assert bench.activity.blocks_left == split.middle
    assert bench.activity.bytes_digests == split.middle * (record.shape[1] - page)


@pytest.mark.parametrize("share", [0.2, 0.02])
def test_blocks_from_the_pool_are_chosen_by_the_digests_they_bring(share: float) -> None:
    """At the small share by coarse ones first, of which there is a copy to be kept up to date."""
    settings = replace(SETTINGS, topk_share=share)
    bench = Bench(shape_of(), settings, 100)
    sequence = bench.sequence(6000)
    want = bench.decode(sequence)
    full = sequence.block_ids[:-1]
    bench.layer.sign(full)
    there = bench.take(len(full))
    for part in (
        bench.cache,
        bench.layer.digest_rows(bench.cache),
        bench.layer.checksum_rows(bench.cache),
    ):
        part[there] = part[full]
    bench.group.note_restored(there.tolist())
    before = bench.activity.blocks_digested
    moved = replace(sequence, block_ids=torch.cat([there, sequence.block_ids[-1:]]))
    assert torch.equal(bench.decode(moved), want)
    assert bench.activity.blocks_digested == before


def test_a_sequence_leaves_in_parts_and_its_arena_with_it() -> None:
    bench = Bench(shape_of(), SETTINGS, 100)
    sequence = bench.sequence(3000)
    want = bench.decode(sequence)
    split = split_of(3000, BLOCK, SETTINGS)
    ids = sequence.block_ids[split.init : split.local].tolist()
    bench.group.register({"layer": bench.cache})
    page = bench.cache[0].nbytes
    arena = Arena.create(len(ids) * page)
    arena.array()[:] = bench.cache[ids].view(-1).view(torch.uint8).numpy()
    records = Records(arena.array(), {"layer": 0}, arena.handle())
    offsets = tuple(at * page for at in range(len(ids)))
    last = int(sequence.block_ids[-1])
    first = Departure("one", split.init, tuple(ids[:5]), offsets[:5], ())
    assert bench.group.take(OffloadOrders([first], {last: "one"}, []), None) == {"one"}
    assert bench.group.is_idle, "without the arena nothing left"
    assert not bench.group.take(OffloadOrders([first], {last: "one"}, []), records)
    second = Departure("one", split.init, tuple(ids[5:]), offsets[5:], ())
    assert not bench.group.take(OffloadOrders([second], {last: "one"}, []), records)
    bench.cache[ids] = float("nan")
    offloaded = bench.group.sequence(last)
    assert offloaded is not None
    assert offloaded.count == len(ids)
    assert bench.group.arenas == {arena.handle()}
    assert torch.equal(bench.decode_offloaded(sequence, offloaded)[0], want)
    assert not bench.group.take(OffloadOrders([], {}, ["one"]), records)
    assert bench.group.sequence(last) is None
    assert not bench.group.arenas, "it need not be mapped any longer"


@pytest.mark.parametrize(
    ("further", "slots"), [(1 << 30, [1]), (-4096, []), (32, []), (0, [100]), (0, [-1])]
)
def test_blocks_outside_of_the_arena_or_of_the_cache_are_refused(
    further: int, slots: list[int]
) -> None:
    """They are read and written by address."""
    bench = Bench(shape_of(), SETTINGS, 100)
    offloaded = offload(bench, bench.sequence(1000), 1000, 2, SETTINGS)
    offloaded.offsets += further
    offloaded.slots = torch.tensor(slots, dtype=torch.int32)
    with pytest.raises(IndexError, match="blocks of one lie outside"):
        bench.layer.depart(offloaded, torch.empty(0, dtype=torch.int64), bench.cache)


REACH = 64 << 31
"""Bytes either way from a cache that a block table can name in steps of 64."""
PAGES = 20 * 128 * 1024
"""Bytes of the middle blocks of 3,000 tokens."""


@pytest.mark.parametrize(
    ("near", "far"),
    [(REACH - PAGES - 8192, REACH - PAGES - 4096), (-REACH, -REACH - 4096)],
    ids=["behind", "before"],
)
def test_an_arena_is_read_at_any_distance_that_a_table_can_name(near: int, far: int) -> None:
    """One that is farther from the cache, and cannot be mapped nearer, is refused."""
    torch.manual_seed(0)
    bench = Bench(shape_of(), SETTINGS, 100)
    sequence = bench.sequence(3000)
    want, dense = bench.decode(sequence), whole(bench, sequence, 3000)
    split = split_of(3000, BLOCK, SETTINGS)
    ids = sequence.block_ids[split.init : split.local]
    page = bench.cache[0].nbytes
    assert len(ids) * page <= PAGES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # without reserving memory
    room = np.frombuffer(mmap.mmap(-1, 3 * REACH, flags=flags), dtype=np.uint8)
    middle = 3 * REACH // 2
    cache = torch.from_numpy(room[middle : middle + bench.cache.nbytes]).view(bench.cache.dtype)
    cache = cache.view(bench.cache.shape).copy_(bench.cache)
    group = bench.group
    group.register({"layer": cache})
    last, offsets = int(sequence.block_ids[-1]), tuple(at * page for at in range(len(ids)))
    leaves = Departure("one", split.init, tuple(ids.tolist()), offsets, ())
    orders = OffloadOrders([leaves], {last: "one"}, [])
    bench.layer.digest(cache, bench.freshness.take_stale(ids))
    for distance, lost in ((far, {"one"}), (near, set())):
        memory = room[middle + distance :][: PAGES + 64]
        assert group.take(orders, Records(memory, {"layer": 64})) == lost
        assert group.is_idle == bool(lost)
    blocks = bench.cache[ids].view(len(ids), -1).view(torch.uint8).numpy()
    memory[64 : 64 + blocks.size] = blocks.reshape(-1)
    cache[ids] = float("nan")
    offloaded = group.sequence(last)
    assert offloaded is not None
    bench.cache = cache
    assert torch.equal(bench.decode_offloaded(sequence, offloaded)[0], want)
    row = OffloadedRow(offloaded, slice(0, 1), sequence.block_ids.to(torch.int32), 3000, False)
    got = bench.whole(row, sequence.query[None], cache, bench.terms)
    assert torch.equal(got, dense)


def test_an_arena_far_from_a_cache_is_mapped_near_it() -> None:
    """As from small caches, which are in the heap. Each layer's is served, and its mapping ends."""
    caches = {name: cache_at(at) for name, at in ADDRESSES.items()}
    arena = Arena.create(3 * ALIGNMENT)
    arena.array()[:] = np.arange(3 * ALIGNMENT) % 251
    held = mappings_of(arena)
    records = Records(arena.array(), dict.fromkeys(caches, 0), arena.handle())
    near = NearArena(records, caches)
    bases = near.bases
    assert bases["two"] == bases["three"] != bases["one"]
    for name, base in bases.items():
        assert abs(base - caches[name].data_ptr()) < REACH
        seen = np.ctypeslib.as_array((ctypes.c_uint8 * arena.nbytes).from_address(base))
        assert (seen == arena.array()).all()
    assert mappings_of(arena) > held
    near.close()
    assert mappings_of(arena) == held


ADDRESSES = {"one": 0x1000_0000_0040, "two": 0x2000_0000_0040, "three": 0x2000_0001_0040}


def cache_at(address: int) -> torch.Tensor:
    """Of two blocks, each a page of memory."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    size, both = ctypes.c_size_t(12288), mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    first = ctypes.c_void_p(address - 64)
    assert libc.mmap(first, size, both, flags, -1, ctypes.c_long(0)) == address - 64
    memory = (ctypes.c_uint8 * 8192).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(2, 1, 32, 128)


def mappings_of(arena: Arena) -> int:
    """How often this process has it mapped."""
    return Path("/proc/self/maps").read_text().count(f" {arena.handle().inode} ")


def whole(
    bench: Bench, sequence: Sequence, tokens: int, query: torch.Tensor | None = None
) -> torch.Tensor:
    """Dense attention on the device, of the last tokens, whose queries these are."""
    query = sequence.query[None] if query is None else query
    seq_lens = torch.tensor([tokens], dtype=torch.int32)
    starts = torch.tensor([0, len(query)], dtype=torch.int32)
    return attend(
        bench.shape,
        query,
        halves(bench.cache, whole=True),
        sequence.block_ids.to(torch.int32)[None],
        seq_lens,
        starts,
        schedule(bench.shape, seq_lens, starts, whole=True),
        bench.terms,
    )
