"""Run by ``test_sglang.py``, with SGLang's packages on the path."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvrecall.engines.sglang import RecallStorage
from kvrecall.errors import ConfigError
from kvrecall.testing.blocks import wait_until
from tests.service.service import Service

LAYERS, TOKENS, HEADS, DIM, PAGES = 3, 16, 2, 8, 12
HASHES = [f"{n:064x}" for n in range(PAGES)]


class HostPool:
    """SGLang's host memory of an MHA model: the methods that a backend calls, with the shapes and
    the pointers of ``MHATokenToKVPoolHost`` (which does not import without its GPU packages)."""

    def __init__(self, layout: str = "layer_first", dtype: torch.dtype = torch.bfloat16) -> None:
        self.layout, self.dtype, self.page_size = layout, dtype, TOKENS
        self.size = PAGES * TOKENS
        by_layer = (2, LAYERS, self.size, HEADS, DIM)
        by_page = (2, self.size, LAYERS, HEADS, DIM)
        self.kv_buffer = torch.randn(by_layer if layout == "layer_first" else by_page).to(dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        window = slice(index, index + TOKENS)
        by_layer = self.layout == "layer_first"
        page = self.kv_buffer[:, :, window] if by_layer else self.kv_buffer[:, window]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * LAYERS * TOKENS * HEADS * DIM, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self.get_data_page(index, flat=False)
        page.copy_(data_page.reshape(page.shape))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        item = self.dtype.itemsize
        base, half = self.kv_buffer.data_ptr(), self.kv_buffer[0].numel() * item
        pointers = []
        for index in indices.tolist()[::TOKENS]:
            if self.layout == "layer_first":
                row = HEADS * DIM * item
                starts = [base + index * row + n * self.size * row for n in range(LAYERS)]
            else:
                starts = [base + index * LAYERS * HEADS * DIM * item]
            for start in starts:
                pointers += [start, start + half]
        each = (1 if self.layout == "layer_first" else LAYERS) * TOKENS * HEADS * DIM * item
        return pointers, [each] * len(pointers)


def config(section: dict[str, Any], **changes: Any) -> HiCacheStorageConfig:
    extra = {
        "backend_name": "kvrecall",
        "module_path": "kvrecall.engines.sglang",
        "class_name": "RecallStorage",
        "interface_v1": 1,
        "kvrecall": {"host_size": "8MiB", "revision": "r1", **section},
    }
    values: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0,
        "attn_cp_size": 1, "is_mla_model": False, "enable_storage_metrics": False,
        "is_page_first_layout": False, "model_name": "m", "extra_config": extra,
    }  # fmt: skip
    return HiCacheStorageConfig(**{**values, **changes})


def backend(section: dict[str, Any], pool: Any = None, **changes: Any) -> RecallStorage:
    """A backend as SGLang's controller makes it."""
    pool = pool or HostPool()
    made = StorageBackendFactory.create_backend("dynamic", config(section, **changes), pool)
    assert isinstance(made, RecallStorage)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {"disk_path": str(tmp_path / "disk"), "disk_size": "32MiB"}


@pytest.fixture
def storage() -> Iterator[RecallStorage]:
    made = backend({})
    yield made
    made.close()


def indices(pages: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first * TOKENS, (first + pages) * TOKENS)


# -- the interface ------------------------------------------------------------------------------


def public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"}


@pytest.mark.parametrize("name", sorted(public(HiCacheStorage)))
def test_every_method_takes_what_sglang_gives(name: str) -> None:
    theirs = inspect.signature(getattr(HiCacheStorage, name)).parameters.values()
    ours = inspect.signature(getattr(RecallStorage, name)).parameters.values()
    assert [p.name for p in ours] == [p.name for p in theirs]
    must = inspect.Parameter.empty
    assert [p.default is must for p in ours] == [p.default is must for p in theirs]


def test_nothing_is_left_abstract() -> None:
    assert not RecallStorage.__abstractmethods__
    inherited = {name for name in public(HiCacheStorage) if name not in vars(RecallStorage)}
    assert inherited == {"get_stats", "on_host_pools_registered"}


# -- flat pages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8])
def test_flat_pages(dtype: torch.dtype) -> None:
    pool = HostPool(dtype=dtype) if dtype != torch.uint8 else HostPool(dtype=torch.float32)
    pool.kv_buffer = pool.kv_buffer.to(dtype)
    pool.dtype = dtype
    storage = backend({}, pool)
    storage._form = "flat"
    values = [pool.get_data_page(n * TOKENS) for n in range(5)]
    assert not storage.exists(HASHES[0])
    assert storage.batch_set(HASHES[:5], values)
    assert storage.batch_exists(HASHES[:7]) == 5
    assert storage.exists(HASHES[4])
    targets = [pool.get_dummy_flat_data_page() for _ in range(6)]
    got = storage.batch_get(HASHES[:6], targets)
    assert got[5] is None
    for value, found, target in zip(values, got, targets, strict=False):
        assert found is target
        assert torch.equal(found, value)
    storage.close()


def test_one_page(storage: RecallStorage) -> None:
    value = torch.randn(2, 3, 4)
    assert storage.get("k", torch.zeros(2, 3, 4)) is None
    assert storage.set("k", value)
    assert storage.set("k", value), "again"
    into = torch.zeros(4, 3, 2).permute(2, 1, 0)
    assert not into.is_contiguous()
    assert storage.get("k", into) is into
    assert torch.equal(into, value)
    assert storage.get("k", torch.zeros(5)) is None, "another size"
    assert storage.get("k") is None
    assert not storage.set("k2")
    storage.clear()
    assert storage.get("k", torch.zeros(2, 3, 4)) is None


# -- pages by pieces ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_pages_by_pieces_come_to_other_places(layout: str) -> None:
    pool = HostPool(layout)
    storage = backend({}, pool)
    assert storage.batch_set_v1(HASHES[:4], indices(4)) == [True] * 4
    assert storage.batch_exists(HASHES) == 4
    before = pool.kv_buffer.clone()
    extra = HiCacheStorageExtraInfo(prefix_keys=HASHES[:1])
    found = storage.batch_get_v1(HASHES[1:6], indices(5, first=6), extra)
    assert found == [True, True, True, False, False]
    for n in range(3):
        old = HostPool.get_data_page(pool, (1 + n) * TOKENS)
        assert torch.equal(HostPool.get_data_page(pool, (6 + n) * TOKENS), old)
    changed = torch.zeros(PAGES, dtype=torch.bool)
    changed[6:9] = True
    for n in range(PAGES):
        same = torch.equal(pool.get_data_page(n * TOKENS), _page_of(before, pool, n))
        assert same != bool(changed[n])
    storage.close()


def _page_of(buffer: torch.Tensor, pool: HostPool, page: int) -> torch.Tensor:
    now, pool.kv_buffer = pool.kv_buffer, buffer
    try:
        return pool.get_data_page(page * TOKENS)
    finally:
        pool.kv_buffer = now


def test_holes_are_skipped(storage: RecallStorage) -> None:
    storage.batch_set_v1(HASHES[::2], torch.cat([indices(1, n) for n in range(0, PAGES, 2)]))
    found = storage.batch_get_v1(HASHES, indices(PAGES))
    assert found == [n % 2 == 0 for n in range(PAGES)]


# -- several pools ------------------------------------------------------------------------------


def test_side_pools(storage: RecallStorage) -> None:
    mamba = HostPool(dtype=torch.float32)
    storage.register_mem_host_pool_v2(mamba, PoolName.MAMBA)
    storage.batch_set_v1(HASHES[:6], indices(6))
    some = PoolTransfer(name=PoolName.MAMBA, keys=HASHES[2:4], host_indices=indices(2, first=2))
    assert storage.batch_set_v2([some]) == {PoolName.MAMBA: [True, True]}

    def ask(policy: PoolHitPolicy, last: int) -> Any:
        keys = [PoolTransfer(name=PoolName.MAMBA, keys=["x"] * last, hit_policy=policy)]
        return storage.batch_exists_v2(HASHES, keys)

    trailing = ask(PoolHitPolicy.TRAILING_PAGES, 1)
    assert (trailing.kv_hit_pages, trailing.restorable_prefix_pages) == (4, [3, 4])
    assert ask(PoolHitPolicy.TRAILING_PAGES, 2).restorable_prefix_pages == [4]
    assert ask(PoolHitPolicy.ALL_PAGES, 1).kv_hit_pages == 0
    assert storage.batch_exists_v2(HASHES).kv_hit_pages == 6
    expected = mamba.get_data_page(3 * TOKENS).clone()
    want = PoolTransfer(name=PoolName.MAMBA, keys=HASHES[2:5], host_indices=indices(3, first=8))
    assert storage.batch_get_v2([want]) == {PoolName.MAMBA: [True, True, False]}
    assert torch.equal(mamba.get_data_page(9 * TOKENS), expected)
    bad = PoolTransfer(name=PoolName.MAMBA, keys=HASHES[:2], host_indices=indices(1))
    assert storage.batch_get_v2([bad]) == {PoolName.MAMBA: [False, False]}


# -- whose pages --------------------------------------------------------------------------------


def test_a_restart_finds_what_lies_on_disk(disk: dict[str, Any]) -> None:
    pool = HostPool()
    first = backend(disk, pool)
    first.batch_set_v1(HASHES, indices(PAGES))
    first.close()
    original = pool.kv_buffer.clone()
    pool.kv_buffer.zero_()
    second = backend(disk, pool)
    assert second.batch_exists(HASHES) == PAGES
    assert second.batch_get_v1(HASHES, indices(PAGES)) == [True] * PAGES
    assert torch.equal(pool.kv_buffer, original)
    second.close()


@pytest.mark.parametrize(
    ("section", "changes", "layout", "dtype"),
    [
        ({"revision": "r2"}, {}, "layer_first", torch.bfloat16),
        ({}, {"model_name": "other"}, "layer_first", torch.bfloat16),
        ({}, {"pp_rank": 1}, "layer_first", torch.bfloat16),
        ({}, {"tp_rank": 1}, "layer_first", torch.bfloat16),
        ({}, {}, "page_first", torch.bfloat16),
        ({}, {}, "layer_first", torch.float16),
    ],
)
def test_other_pages_do_not_meet(
    disk: dict[str, Any],
    section: dict[str, Any],
    changes: dict[str, Any],
    layout: str,
    dtype: torch.dtype,
) -> None:
    first = backend(disk)
    first.batch_set_v1(HASHES[:3], indices(3))
    first.close()
    second = backend({**disk, **section}, HostPool(layout, dtype), **changes)
    assert second.batch_exists(HASHES[:3]) == 0
    assert second.batch_get_v1(HASHES[:3], indices(3)) == [False] * 3
    second.close()
    again = backend(disk)
    assert again.batch_exists(HASHES[:3]) == 3
    again.close()


def test_ranks_of_an_mla_model_share_their_pages(disk: dict[str, Any]) -> None:
    first = backend(disk, is_mla_model=True, tp_rank=0)
    first.batch_set_v1(HASHES[:3], indices(3))
    first.close()
    second = backend(disk, is_mla_model=True, tp_rank=1)
    assert second.batch_exists(HASHES[:3]) == 3
    second.close()


def test_weights_are_told_by_their_folder(disk: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(secrets.token_bytes(100))
    section = {**disk, "revision": "", "model_path": str(tmp_path)}
    first = backend(section)
    first.batch_set_v1(HASHES[:3], indices(3))
    first.close()
    (tmp_path / "model.safetensors").write_bytes(secrets.token_bytes(100))
    second = backend(section)
    assert second.batch_exists(HASHES[:3]) == 0
    second.close()


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ({"revision": ""}, {}, "identify the model.s weights"),
        ({"revision": "", "model_path": "/nowhere"}, {}, "model_path: .*/nowhere"),
        ({"host_sise": "1GiB"}, {}, "did you mean 'host_size'"),
        ({"disk_path": "HERE/x", "disk_size": "8MiB"}, {"tp_size": 2}, "kvrecall pool serve"),
    ],
)
def test_wrong_settings_are_named(
    tmp_path: Path, section: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    here = {
        name: value.replace("HERE", str(tmp_path)) if isinstance(value, str) else value
        for name, value in section.items()
    }
    with pytest.raises(ConfigError, match=words):
        backend(here, **changes)
    assert not list(tmp_path.iterdir())


def test_no_section() -> None:
    made = config({})
    del made.extra_config["kvrecall"]
    with pytest.raises(ConfigError, match="must be an object"):
        RecallStorage(made, {})


# -- the node's service -------------------------------------------------------------------------


def on_service(service: Service, pool: HostPool) -> RecallStorage:
    made = config({})
    made.extra_config["kvrecall"] = {
        "backend": "service",
        "socket": str(service.socket),
        "revision": "r1",
        "call_timeout": 10.0,
    }
    storage = RecallStorage(made, {})
    storage.register_mem_pool_host(pool)
    return storage


def test_engines_on_one_service_that_dies_and_comes_back(tmp_path: Path) -> None:
    pool = HostPool()
    with Service(tmp_path / "service") as service:
        one, two = on_service(service, pool), on_service(service, pool)
        wait_until(lambda: all(one.batch_set_v1(HASHES[:4], indices(4))))
        wait_until(lambda: two.batch_exists(HASHES) == 4)
        assert two.batch_get_v1(HASHES[:4], indices(4, first=6)) == [True] * 4
        assert torch.equal(pool.get_data_page(9 * TOKENS), pool.get_data_page(3 * TOKENS))
        wait_until(lambda: service.look().stats.tiers[1].blocks == 4)
        service.kill()
        assert one.batch_get_v1(HASHES[:4], indices(4)) == [False] * 4
        assert one.batch_set_v1(HASHES[4:6], indices(2)) == [False] * 2
        service.start()
        wait_until(lambda: one.batch_exists(HASHES) == 4)
        expected = pool.get_data_page(2 * TOKENS).clone()
        wait_until(lambda: one.batch_get_v1(HASHES[:4], indices(4, first=8)) == [True] * 4)
        assert torch.equal(pool.get_data_page(10 * TOKENS), expected)
        one.close()
        two.close()
