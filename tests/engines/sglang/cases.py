"""Run by ``test_storage.py``, with SGLang's packages on the path."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import secrets
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pool.service.service import Service
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.mem_cache import utils as of_sglang
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.runtime_context import RuntimeContext
from sglang.srt.server_args import ServerArgs

from kvrecall.block import Namespace
from kvrecall.engines.sglang import RecallStorage, identity
from kvrecall.engines.sglang import storage as room
from kvrecall.errors import ConfigError
from kvrecall.testing import wait_until

LAYERS, TOKENS, HEADS, DIM, PAGES = 3, 16, 2, 8, 12
HASHES = [f"{n:064x}" for n in range(PAGES)]


SERVER = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
SERVER |= {"model_path": "an/id-of-the-hub", "kv_cache_dtype": "bfloat16", "lora_paths": []}


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings of SGLang's server, which resolves them on a GPU only."""
    settings = dict(SERVER)
    monkeypatch.setattr(RuntimeContext, "resolved_server_args_dict", lambda _: settings)
    return settings


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
    before = [pool.get_data_page(n * TOKENS).clone() for n in range(PAGES)]
    extra = HiCacheStorageExtraInfo(prefix_keys=HASHES[:1])
    found = storage.batch_get_v1(HASHES[1:6], indices(5, first=6), extra)
    assert found == [True, True, True, False, False]
    for n in range(3):
        assert torch.equal(pool.get_data_page((6 + n) * TOKENS), before[1 + n])
    for n in range(PAGES):
        same = torch.equal(pool.get_data_page(n * TOKENS), before[n])
        assert same != (6 <= n < 9)
    storage.close()


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


def store(section: dict[str, Any], pool: HostPool | None = None, **changes: Any) -> None:
    """A server stores three pages, and ends."""
    first = backend(section, pool, **changes)
    assert first.batch_set_v1(HASHES[:3], indices(3)) == [True] * 3
    first.close()


def meets(section: dict[str, Any], pool: HostPool | None = None, **changes: Any) -> bool:
    """Whether a server with the present settings finds what the first one has stored."""
    found = backend(section, pool, **changes)
    try:
        there = found.batch_exists(HASHES[:3])
        assert found.batch_get_v1(HASHES[:3], indices(3)) == [there == 3] * 3
        return bool(there == 3)
    finally:
        found.close()


def test_a_restart_finds_what_lies_on_disk(disk: dict[str, Any]) -> None:
    pool = HostPool()
    store(disk, pool)
    original = pool.kv_buffer.clone()
    pool.kv_buffer.zero_()
    assert meets(disk, pool)
    stored = slice(0, 3 * TOKENS)
    assert torch.equal(pool.kv_buffer[:, :, stored], original[:, :, stored])


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
    store(disk)
    assert not meets({**disk, **section}, HostPool(layout, dtype), **changes)
    assert meets(disk)


def adapter(folder: Path, content: bytes) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return str(folder)


FOLDERS = ("speculative_draft_model_path", "uno_lora_path", "kt_weight_path")
SHAPING = [
    ("kv_cache_dtype", "fp8_e5m2"),
    ("json_model_override_args", '{"rope_theta": 1}'),
    ("quantization", "fp8"),
    ("model_loader_extra_config", '{"load_in_4bit": true}'),
    ("dtype", "float16"),
    ("attention_backend", "triton"),
    ("context_length", 131072),
    ("speculative_draft_kv_cache_dtype", "fp8_e4m3"),
    ("mamba_ssm_dtype", "bfloat16"),
    ("enable_lora", True),
]
FREE = [
    ("port", 31000), ("host", "0.0.0.0"), ("api_key", "secret"), ("log_level", "debug"),
    ("max_running_requests", 7), ("random_seed", 5), ("hicache_size", 99), ("nccl_port", 9),
    ("chat_template", "x"), ("enable_metrics", True), ("ssl_keyfile_password", "secret"),
    ("hicache_storage_backend_extra_config", "{}"), ("node_rank", 1), ("watermark_key", 5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SHAPING)
def test_a_setting_that_shapes_kv_is_in_the_keys(
    disk: dict[str, Any], server: dict[str, Any], name: str, value: Any
) -> None:
    pool = HostPool(dtype=torch.uint8)
    store(disk, pool)
    assert meets(disk, pool)
    assert server[name] != value
    server[name] = value
    assert not meets(disk, pool)


def test_settings_that_shape_nothing_are_not(
    disk: dict[str, Any], server: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store(disk)
    for name, value in FREE:
        assert server[name] != value
        server[name] = value
    assert meets(disk)
    assert not any(identity._NO_INFLUENCE.fullmatch(name) for name, _ in SHAPING)
    monkeypatch.setattr(room.sglang, "__version__", "0.5.24")
    assert not meets(disk), "the version is"


@pytest.mark.parametrize("name", [*FOLDERS, "quantization_param_path", "lora_paths"])
def test_the_content_of_files_that_settings_name_is_in_the_keys(
    disk: dict[str, Any], server: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """SGLang's id of an adapter that a server starts with is of its name and path alone."""

    def told(content: bytes) -> Any:
        if name == "quantization_param_path":
            (tmp_path / "scales.json").write_bytes(content)
            return str(tmp_path / "scales.json")
        folder = adapter(tmp_path / "other", content)
        if name != "lora_paths":
            return folder
        return [LoRARef(LoRARef.deterministic_id("a", folder), "a", folder)]

    server[name] = told(b"one")
    store(disk)
    assert meets(disk)
    server[name] = told(b"two, under the same name")
    assert not meets(disk)
    server[name] = [{"lora_path": "hub/id"}] if name == "lora_paths" else "hub/id"
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}.*hub/id.*local file"):
        backend(disk)


def test_adapters_salts_and_classes_of_requests_have_keys_of_their_own() -> None:
    """By the seed that SGLang gives each chain, hashed as its own C++ does, which takes long to
    compile."""
    whose = [(None, None), ("adapter", None), (None, "adapter"), ("a", "b"), ("ab", None), ("", "")]
    tokens = list(range(2 * TOKENS))
    namespace = Namespace.of({"a": "b"})
    keys = set()
    for extra_key, salt in whose:
        seed = of_sglang.storage_namespace_seed(extra_key, salt)
        digest = bytes.fromhex(seed or "")
        for page in (tokens[:TOKENS], tokens[TOKENS:]):
            digest = hashlib.sha256(digest + struct.pack(f"<{TOKENS}I", *page)).digest()
            keys.add(identity.key_of(namespace, digest.hex()))
    assert len(keys) == 2 * len(whose)


def test_a_version_that_hashes_tokens_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(of_sglang, "storage_namespace_seed")
    monkeypatch.delitem(sys.modules, "kvrecall.engines.sglang.storage")
    with pytest.raises(ImportError, match=r"hashes a page's tokens only.*use SGLang 0.5.20"):
        importlib.import_module("kvrecall.engines.sglang.storage")


def test_ranks_of_an_mla_model_share_their_pages(disk: dict[str, Any]) -> None:
    store(disk, is_mla_model=True, tp_rank=0)
    assert meets(disk, is_mla_model=True, tp_rank=1)


def test_weights_are_told_by_their_folder(disk: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(secrets.token_bytes(100))
    section = {**disk, "revision": "", "model_path": str(tmp_path)}
    store(section)
    (tmp_path / "model.safetensors").write_bytes(secrets.token_bytes(100))
    assert not meets(section)


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


def test_what_cannot_be_identified_is_refused(
    tmp_path: Path, server: dict[str, Any], disk: dict[str, Any]
) -> None:
    server["load_format"] = "dummy"
    with pytest.raises(ConfigError, match="--load-format: 'dummy'"):
        backend(disk)
    server["load_format"] = "auto"
    server["model_path"] = adapter(tmp_path / "served", b"one")
    with pytest.raises(ConfigError, match=r"model_path: .*is not what the server loads"):
        backend({**disk, "revision": "", "model_path": adapter(tmp_path / "copy", b"two")})


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
