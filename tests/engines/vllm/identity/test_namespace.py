"""Changing anything that a block's bytes depend on turns a hit into a miss; other changes do not.
Over configurations as vLLM makes them."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvrecall.block import Namespace
from kvrecall.config import PoolConfig
from kvrecall.engines.fingerprint import Memory
from kvrecall.engines.vllm.compat import scheduler
from kvrecall.engines.vllm.compat.config import head_replicas, sharing_of
from kvrecall.engines.vllm.identity import weights
from kvrecall.engines.vllm.identity.changes import Look, RankWeights, adapters_of, digest_of
from kvrecall.engines.vllm.identity.loaded import LoadedModel
from kvrecall.engines.vllm.identity.namespace import Adapters, NamespaceRegistry, namespace_of
from kvrecall.engines.vllm.identity.weights import RunningWeights, Weights
from kvrecall.engines.vllm.wire import Shard, ShardLayer
from kvrecall.pool import Pool
from kvrecall_lab.models import write_model

NOTHING = Memory(None)


@pytest.fixture(autouse=True, scope="module")
def small_cache() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m", "qwen3", hidden=64, layers=2)


def config_of(model: Path, **options: Any) -> Any:
    """vLLM's configuration of an engine that is not started."""
    plain = {"model": str(model), "max_model_len": 1024, "block_size": 32, "dtype": "bfloat16"}
    plain["prefix_caching_hash_algo"] = "sha256_cbor"
    return EngineArgs(**{**plain, **options}).create_engine_config()


class Identified:
    """Everything ``namespace_of`` looks at."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.vllm = config_of(model, **options)
        spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
        group = SimpleNamespace(kv_cache_spec=spec)
        self.kv = SimpleNamespace(kv_cache_groups=[group], kv_tp_replicas=1)
        layers = (ShardLayer("layers.0", 65536, "[2,128,256]"),)
        loaded = LoadedModel("code", (("a", "switches"),), ())
        self.shards = [Shard(layers, "CPU_ATTN/vec", True, 0.0, loaded)]
        self.weights = "0123abc"
        self.replicas = 1  # ranks that have the same KV heads, as a rank sees it in its model

    def digest(self) -> bytes:
        sharing = sharing_of(self.vllm, self.kv, self.replicas)
        shards = [replace(shard, sharing=sharing) for shard in self.shards]
        return namespace_of(self.vllm, self.kv, shards, self.weights).digest


def set_block_size(one: Identified) -> None:
    group = one.kv.kv_cache_groups[0]
    group.kv_cache_spec = replace(group.kv_cache_spec, block_size=64)


def set_shard(**changes: Any) -> Callable[[Identified], None]:
    return lambda one: setattr(one, "shards", [replace(one.shards[0], **changes)])


CHANGES: dict[str, Callable[[Identified], Any]] = {
    "weights": lambda one: setattr(one, "weights", "other"),
    "architecture": lambda one: one.vllm.model_config.hf_config.update({"rope_theta": 1e4}),
    "block size": set_block_size,
    "layout": set_shard(layers=(ShardLayer("layers.0", 65536, "[128,2]"),)),
    "kernel": set_shard(kernel="CPU_ATTN/amx"),
    "code": set_shard(model=LoadedModel("other", (("a", "switches"),), ())),
    "switches": set_shard(model=LoadedModel("code", (("a", "other"),), ())),
    "tables": set_shard(model=LoadedModel("code", (("a", "switches"),), (("b", "other"),))),
    "unseen model": set_shard(model=None),
    "ranks": lambda one: setattr(one.vllm.parallel_config, "tensor_parallel_size", 2),
    "stages": lambda one: setattr(one.vllm.parallel_config, "pipeline_parallel_size", 2),
    "replicas": lambda one: setattr(one.kv, "kv_tp_replicas", 2),
    "heads": set_shard(layers=(ShardLayer("layers.0", 131072, "[2,128,256]", heads=4),)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "kv dtype": {"kv_cache_dtype": "fp8_e5m2"},
    "rope": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
    "hash": {"prefix_caching_hash_algo": "sha256"},
}
SAME: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 8192,
    "served_model_name": "another",
    "gpu_memory_utilization": 0.5,
    "seed": 5,
}


@pytest.fixture(scope="module")
def plain(model: Path) -> bytes:
    return Identified(model).digest()


@pytest.mark.parametrize("change", CHANGES)
def test_every_ingredient_counts(change: str, model: Path, plain: bytes) -> None:
    one = Identified(model)
    assert one.digest() == plain, "the same engine must find its blocks again"
    CHANGES[change](one)
    assert one.digest() != plain


def halves(layers: int, nbytes: int, heads: int, first: int = 0) -> Shard:
    """A rank's shard: so many layers of so many bytes and KV heads each."""
    each = (
        ShardLayer(f"layers.{first + i}", nbytes, "[128,256]", heads=heads) for i in range(layers)
    )
    return Shard(tuple(each), "CPU_ATTN/vec", True, 0.0, LoadedModel("code", (), ()))


def sized(model: Path, shards: list[Shard], tensor: int, stages: int, replicas: int) -> bytes:
    one = Identified(model)
    one.shards = shards
    one.vllm.parallel_config.tensor_parallel_size = tensor
    one.vllm.parallel_config.pipeline_parallel_size = stages
    one.replicas = replicas
    return one.digest()


def test_parallel_sizes_do_not_count_where_heads_lie_one_after_the_other(model: Path) -> None:
    whole = sized(model, [halves(4, 4096, 4)], 1, 1, 1)
    assert sized(model, [halves(4, 2048, 2)] * 2, 2, 1, 1) == whole
    assert sized(model, [halves(4, 1024, 1)] * 8, 8, 1, 2) == whole, "each head on two ranks"
    assert sized(model, [halves(4, 1024, 1)] * 8, 8, 1, 1) != whole, "eight heads"
    stages = [halves(2, 2048, 2, first) for first in (0, 0, 2, 2)]
    assert sized(model, stages, 2, 2, 1) == whole
    assert sized(model, [halves(4, 4096, 4)] * 2, 2, 1, 1) != whole, "eight heads"
    assert sized(model, [halves(4, 2048, 0)] * 2, 2, 1, 1) != whole, "interleaved heads"
    assert sized(model, [halves(4, 2048, 2), halves(4, 2048, 0)], 2, 1, 1) != whole


def with_heads(*replicas: int | tuple[int, ...]) -> nn.Module:
    """Layers whose projections have each of their KV heads on so many ranks; beside them a tower
    for images, with other heads."""
    model = nn.Module()
    model.tower, model.layers = nn.ModuleDict({"qkv": nn.Linear(1, 1)}), nn.ModuleList()
    model.tower["qkv"].num_kv_head_replicas = 1
    for counts in replicas:
        layer = nn.ModuleDict({"attention": nn.ModuleDict()})
        for number, count in enumerate(counts if isinstance(counts, tuple) else (counts,)):
            projection = layer["attention"][f"qkv_{number}"] = nn.Linear(1, 1)
            projection.num_kv_head_replicas = count
        model.layers.append(layer)
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (with_heads(2, 2), 2),
        (with_heads(1, 1), 1),
        (with_heads(2, 4), 1),
        (with_heads((2, 4), (2, 4)), 1),
        (with_heads((2, 2), 2), 2),
        (with_heads((), ()), 1),
        (with_heads(2, ()), 1),
    ],
    ids=["all", "none", "not alike", "unclear", "two projections", "untold", "one untold"],
)
def test_heads_on_several_ranks_are_counted_from_the_model(model: nn.Module, expected: int) -> None:
    names = [f"layers.{number}.attention.attn" for number in range(2)]
    assert head_replicas(model, names) == expected


def test_a_head_counted_once_for_each_of_its_ranks_changes_nothing() -> None:
    def loaded(*sizes: int) -> LoadedModel:
        model = with_heads(1)
        model.layers[0]["attention"]["qkv_0"].output_sizes = list(sizes)
        return LoadedModel.of(model)

    assert loaded(256, 64, 64) == loaded(256, 128, 128)


def turns(model: Path, ranks: int, contexts: int, run: int = 1, by_token: bool = True) -> bytes:
    """Of latent attention in blocks of 64 tokens in all, which so many of the ranks share."""
    one = Identified(model)
    one.vllm.parallel_config.tensor_parallel_size = ranks
    one.vllm.parallel_config.decode_context_parallel_size = contexts
    one.vllm.parallel_config.cp_kv_cache_interleave_size = run
    group = one.kv.kv_cache_groups[0]
    group.kv_cache_spec = replace(
        group.kv_cache_spec, block_size=64 // contexts, num_kv_heads=1, max_tp_shards=1
    )
    one.kv.kv_tp_replicas = ranks if contexts == 1 else 1  # as vLLM counts them
    layer = ShardLayer("layers.0", 4096 // contexts, "[64,32]", heads=1, by_token=by_token)
    model_of_rank = LoadedModel("code", (), ())
    one.shards = [Shard((layer,), "FLASHMLA/", True, 0.0, model_of_rank)] * ranks
    return one.digest()


def test_ranks_that_share_tokens_do_not_count_where_tokens_lie_apart(model: Path) -> None:
    whole = turns(model, 1, 1)
    assert turns(model, 4, 1) == whole
    assert {turns(model, 2, 2), turns(model, 4, 2), turns(model, 4, 4)} == {whole}
    assert {turns(model, 2, 2, run) for run in (16, 32)} == {whole}
    packed = [turns(model, 2, 2, by_token=False), turns(model, 2, 2, 16, by_token=False)]
    assert len({*packed, turns(model, 4, 2, by_token=False), whole}) == 4


@pytest.mark.parametrize("change", OPTIONS)
def test_settings_that_shape_kv_count(change: str, model: Path, plain: bytes) -> None:
    assert Identified(model, **OPTIONS[change]).digest() != plain


def test_settings_that_do_not_shape_kv_share(model: Path, plain: bytes, tmp_path: Path) -> None:
    """Nor the folder's place and name, nor adapters: what is of the base model is shared."""
    copied = shutil.copytree(model, tmp_path / "elsewhere")
    assert Identified(copied, **SAME).digest() == plain
    eager = Identified(model, enforce_eager=True)  # with adapters a CPU compiles nothing
    assert Identified(model, enforce_eager=True, enable_lora=True).digest() == eager.digest()


def test_without_a_look_at_the_model_its_limits_count(model: Path) -> None:
    def blind(**options: Any) -> bytes:
        one = Identified(model, **options)
        set_shard(model=None)(one)
        return one.digest()

    assert blind() == blind()
    assert blind() != blind(max_model_len=2048)


# ---- weights -------------------------------------------------------------------------------


def text_of(config: Any, early: bool = True) -> str:
    found = Weights(config, NOTHING, early)
    assert found.wait(30)
    return found.text()


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "copied")


def change_a_byte(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x99")


def test_weights_by_content_and_by_code_that_is_trusted(model: Path, copied: Path) -> None:
    trusted = {"trust_remote_code": True}
    (copied / "modeling_x.py").write_text("factor = 2\n")
    assert text_of(config_of(model)) == text_of(config_of(copied))
    assert text_of(config_of(model, **trusted)) != text_of(config_of(copied, **trusted))
    change_a_byte(copied)
    assert text_of(config_of(model)) != text_of(config_of(copied))


def test_what_may_change_while_the_engine_loads_is_private(copied: Path) -> None:
    """Without the plug-in that begins before loading, files must be older than the process."""
    assert text_of(config_of(copied), early=False).startswith("private")
    found = Weights(config_of(copied), NOTHING, early=True)
    assert found.wait(30)
    (copied / "extra.safetensors").write_bytes(b"x")
    assert found.text().startswith("private")


def test_unknown_weights_are_private(model: Path) -> None:
    config = config_of(model)
    config.model_config.model = "somebody/some-model"
    texts = {text_of(config), text_of(config)}
    assert len(texts) == 2
    assert all(text.startswith("private") for text in texts)
    config.model_config.model = str(model)
    config.load_config.load_format = "dummy"
    assert text_of(config) == "dummy seed 0"
    config.load_config.load_format = "tensorizer"
    assert text_of(config).startswith("private")


def test_a_hub_name_is_what_lies_in_the_cache(model: Path, tmp_path: Path) -> None:
    """A snapshot of links, as the hub's client writes it."""
    repo = tmp_path / "models--somebody--some-model"
    commit = "0123456789012345678901234567890123456789"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for path in model.iterdir():
        shutil.copy(path, repo / "blobs" / path.name)
        (snapshot / path.name).symlink_to(repo / "blobs" / path.name)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    config = config_of(model)
    want = text_of(config)
    config.model_config.model = "somebody/some-model"
    config.load_config.download_dir = str(tmp_path)
    assert text_of(config) == want


def test_it_begins_before_the_engine_loads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor.abstract import Executor

    class Loads(Executor):
        def _init_executor(self) -> None:
            begun.append(self.vllm_config.instance_id in weights._early)

        def check_health(self) -> None: ...

        def collective_rpc(self, *args: Any, **kwargs: Any) -> Any: ...

    begun: list[bool] = []
    monkeypatch.setattr(Executor, "__init__", Executor.__init__)
    weights.register()
    weights.register()
    Loads(config_of(model))
    transfer = {"kv_connector": "RecallConnector", "kv_role": "kv_both"}
    transfer["kv_connector_module_path"] = "kvrecall.engines.vllm"
    config = config_of(model, kv_transfer_config=transfer)
    Loads(config)
    assert begun == [False, True], "only for engines with our connector"
    found = weights.weights_of(config)
    assert found.wait(30)
    assert not found.text().startswith("private")
    assert scheduler.our_transfer(config) is not None


# ---- the loaded model ----------------------------------------------------------------------


class Rope(nn.Module):
    def __init__(self, base: float = 1e4, limit: int = 512) -> None:
        super().__init__()
        self.base = base
        self.max_position_embeddings = limit
        self.register_buffer("cos_sin_cache", torch.arange(8.0) * base, persistent=False)


class Attention(nn.Module):
    def __init__(self, tuned: bool = False, scale: float = 1.0, limit: int = 512) -> None:
        super().__init__()
        self.attn_temperature_tuning = tuned
        self.max_model_len = limit
        self.prefix = f"somewhere/{limit}"
        self.rope = Rope(limit=limit)
        self.proj = nn.Linear(2, 2)
        self.register_buffer("_k_scale", torch.tensor(scale))
        self.register_buffer("workspace", torch.empty(limit))


def test_the_loaded_model_is_known_by_what_it_does() -> None:
    plain = LoadedModel.of(Attention())
    assert LoadedModel.of(Attention(limit=2048)) == plain
    assert LoadedModel.of(Attention(tuned=True)).switches != plain.switches
    assert LoadedModel.of(Attention(scale=2.0)).tables != plain.tables
    other = Attention()
    other.rope = Rope(base=2e4)
    assert LoadedModel.of(other) != plain
    other = Attention()
    other.rope.cos_sin_cache += 1
    assert LoadedModel.of(other).tables != plain.tables


def test_code_beside_the_engine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(name: str, factor: int) -> LoadedModel:
        folder = tmp_path / name / "outoftree"
        folder.mkdir(parents=True)
        (folder / "helper.py").write_text(f"FACTOR = {factor}\n")
        (folder / "__init__.py").write_text("")
        (folder / "model.py").write_text("import torch\nclass Model(torch.nn.Module): ...\n")
        monkeypatch.syspath_prepend(str(tmp_path / name))
        for module in [module for module in sys.modules if module.startswith("outoftree")]:
            del sys.modules[module]
        import outoftree.model  # type: ignore[import-not-found]

        return LoadedModel.of(outoftree.model.Model())

    one = loaded("a", 1)
    assert loaded("b", 1) == one, "the place means nothing"
    assert loaded("c", 2).code != one.code


# ---- adapters ------------------------------------------------------------------------------


class Loader:
    """A worker's loads of adapters, and what the scheduler side makes of them."""

    def __init__(self, folder: Path, settings: dict[str, str] | None = None) -> None:
        self.rank = RankWeights(NOTHING)
        self.adapters = Adapters(settings or {})
        self.file = folder / "adapter_model.safetensors"

    def write(self, content: bytes) -> None:
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_bytes(content * 100)
        os.utime(self.file, ns=(1, 1))

    def load(self, number: int, meanwhile: bytes = b"", name: str = "style") -> frozenset[int]:
        """Loads it; ``meanwhile``: the file becomes another. Which adapters have another
        content."""
        request = SimpleNamespace(lora_int_id=number, lora_name=name)
        act = (lambda: self.write(meanwhile)) if meanwhile else lambda: None
        self.rank.load_adapter(request, str(self.file.parent), act)
        news = self.rank.news()
        self.adapters.loaded(news.adapters)
        return news.swapped

    def identity(self, number: int) -> str | None:
        return self.adapters.identity(SimpleNamespace(lora_int_id=number))


def test_an_adapter_is_what_was_loaded(tmp_path: Path) -> None:
    one = Loader(tmp_path / "adapter")
    assert not one.adapters.is_known(SimpleNamespace(lora_int_id=1))
    one.write(b"one")
    assert not one.load(1, meanwhile=b"two")
    assert one.identity(1) is None, "it has changed while it was loaded"
    assert one.load(1) == {1}
    first = one.identity(1)
    assert first is not None
    assert not one.load(1), "loaded again, as after others took its place"
    other = Loader(tmp_path / "adapter", {"lora_dtype": "float16"})
    other.load(1)
    assert other.identity(1) not in (None, first)


def test_a_name_that_vllm_hashes_names_one_content(tmp_path: Path) -> None:
    """Under another number, too: the device's blocks of the first would be found."""
    one = Loader(tmp_path / "adapter")
    one.write(b"one")
    assert not one.load(1)
    assert not one.load(2)
    one.write(b"two")
    assert one.load(3) == {3}
    assert not one.load(4, name="another")


def test_ranks_that_have_loaded_other_content_do_not_know_it() -> None:
    assert adapters_of([{1: (1, "a")}, {1: (1, "a")}]) == {1: (1, "a")}
    assert adapters_of([{1: (1, "a")}, {1: (1, "b")}]) == {1: (1, "")}
    assert adapters_of([{1: (2, "a")}, {1: (1, "b")}]) == {1: (2, "a")}
    adapters = Adapters({})
    adapters.loaded({1: (1, "a")})
    adapters.loaded({1: (1, "b")})  # by a rank that was later
    assert adapters.identity(SimpleNamespace(lora_int_id=1)) is None


# ---- weights that change -------------------------------------------------------------------


def test_a_digest_covers_every_byte_of_every_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plain, is_opaque = digest_of([model])
    assert plain is not None
    assert not is_opaque
    assert digest_of([copy.deepcopy(model)]) == (plain, False)
    seen = {plain}
    for parameter in model.parameters():
        flat = parameter.detach().flatten().view(torch.uint8)
        for place in (0, len(flat) - 1):
            flat[place] ^= 1
            seen.add(digest_of([model])[0])
            flat[place] ^= 1
    assert len(seen) == 9
    assert digest_of([model])[0] == plain
    model[0].weight = nn.Parameter(torch.empty(0))
    assert digest_of([model])[1], "a kernel has packed it"
    assert digest_of([model.to("meta")]) == (None, False)


class Ranks:
    """The workers of an engine: what they have, and what they are asked."""

    def __init__(self, tensors: str | None = "one", is_opaque: bool = False) -> None:
        self.has = Look(tensors, is_opaque)
        self.weighed = 0

    def look(self, weigh: bool) -> Look:
        self.weighed += weigh
        return self.has if weigh else replace(self.has, tensors=None)

    def gets(self, tensors: str | None, **more: Any) -> None:
        self.has = replace(self.has, tensors=tensors, **more)


class Running:
    """An engine's weights, and how often they changed."""

    def __init__(self, model: Path, ranks: Ranks) -> None:
        started = Weights(config_of(model), NOTHING, early=True)
        assert started.wait(30)
        self.ranks, self.changes = ranks, 0
        self.adapters: list[int] = []
        self.weights = RunningWeights(
            started, self._count, lambda new, _: self.adapters.extend(new)
        )

    def _count(self) -> None:
        self.changes += 1

    def call(self, method: object, tensors: str | None, **more: Any) -> str:
        """A call after which the workers have these weights; the text of them."""
        kwargs = more.pop("kwargs", {})
        with self.weights.call(self.ranks.look, method, None, (), kwargs):
            self.ranks.gets(tensors, **more)
        return self.text

    @property
    def text(self) -> str:
        while self.weights._now is not None and not self.weights.is_known:
            continue
        return self.weights.text() if self.weights.is_known else ""


def test_the_weights_are_what_the_workers_have(model: Path) -> None:
    one = Running(model, Ranks())
    plain = one.text
    assert one.call("their_own_method", "one") == plain
    assert one.changes == 0
    assert one.ranks.weighed == 2
    assert one.call(print, "two") == "tensors two"
    assert one.call("update_weights", None) == "", "an update is under way"
    assert one.call("finish_weight_update", "three") == "tensors three"
    assert one.changes == 3
    assert one.call("finish_weight_update", "one") == plain, "found again"
    assert one.call("reset_weights", "one") == plain
    assert one.changes == 4


def test_no_news_is_lost_in_a_look(model: Path) -> None:
    """What the workers have loaded since their last report is told once."""
    one = Running(model, Ranks())
    plain = one.text
    one.ranks.gets("one", adapters={3: (1, "a")})
    one.call("their_own_method", "one", adapters={})
    one.ranks.gets("one", adapters={4: (1, "b")})
    with one.weights.waking(one.ranks.look), one.weights.adding(one.ranks.look, "adapter"):
        pass
    assert one.adapters == [3, 4, 4]
    assert (one.text, one.changes) == (plain, 0)
    one.ranks.gets("two", is_reloaded=True)
    with one.weights.adding(one.ranks.look, "adapter"):
        pass
    assert (one.text, one.changes) == ("tensors two", 1)
    other = Running(model, Ranks())
    other.ranks.gets("two", is_reloaded=True)
    other.call("their_own_method", "two", is_reloaded=False)
    assert (other.text, other.changes) == ("tensors two", 1)


def test_a_folder_that_is_loaded_whole_names_the_weights(model: Path, copied: Path) -> None:
    change_a_byte(copied)
    for is_opaque in (False, True):
        one = Running(model, Ranks(is_opaque=is_opaque))
        plain, loaded = one.text, {"is_reloaded": True, "is_whole": True}
        path = {"kwargs": {"weights_path": str(copied)}}
        assert one.call("reload_weights", "two", **loaded, **path) == text_of(config_of(copied))
        assert one.call("reload_weights", "three", is_whole=False, **path) not in (plain, ""), (
            "a part of the model: what the rest is of is not known by the folder"
        )
        path = {"kwargs": {"weights_path": str(model)}}
        assert one.call("reload_weights", "one", is_whole=True, **path) == plain


def test_weights_that_kernels_keep_to_themselves(model: Path) -> None:
    """Their digest is the same after a load of others."""
    one = Running(model, Ranks(is_opaque=True))
    plain = one.text
    assert one.call("their_own_method", "one") == plain
    texts = {plain, one.call("update_weights", "one")}
    assert one.call("their_own_method", "one") in texts, "it has loaded nothing"
    texts.add(one.call("their_own_method", "one", is_reloaded=True))
    assert len(texts) == 3
    assert sum(text.startswith("private") for text in texts) == 2
    assert one.changes == 2


def test_a_load_of_the_models_own_is_noted() -> None:
    rank, model = RankWeights(NOTHING), nn.Linear(2, 2)
    load = rank.loading(model, lambda names: names)
    worker = SimpleNamespace(get_model=lambda: model)
    load({"weight"})
    assert rank.news().is_reloaded
    assert not rank.news().is_reloaded
    assert not rank.look(worker, True).is_whole
    load({"weight", "bias"})
    seen = rank.look(worker, True)
    assert (seen.is_reloaded, seen.is_whole, seen.tensors) == (True, True, digest_of([model])[0])
    assert not rank.look(worker, True).is_whole, "of the last load only"
    worker._weight_update_active = True
    assert rank.look(worker, True).tensors is None


def test_salt_and_adapter_name_are_in_the_hash() -> None:
    """vLLM's part of the identity, as far as the pool relies on it."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(128, sha256_cbor)

    def first_hash(salt: str | None) -> bytes:
        params = SamplingParams(max_tokens=1)
        params.update_from_generation_config({}, eos_token_id=1)
        request = Request("r", list(range(200)), params, None, cache_salt=salt, block_hasher=hasher)
        return bytes(request.block_hashes[0])

    assert first_hash(None) == first_hash(None)
    assert len({first_hash(None), first_hash("red"), first_hash("blue")}) == 3


def test_a_namespace_can_be_read(model: Path) -> None:
    """Two logs tell what differs: the parts are text."""
    one = Identified(model)
    parts = dict(namespace_of(one.vllm, one.kv, one.shards, one.weights).parts)
    assert json.loads(parts["architecture"])["architectures"] == ["Qwen3ForCausalLM"]
    assert json.loads(parts["configuration"])
    assert "switches" in parts["loaded"]


def test_it_does_not_matter_whether_a_start_compiled_or_found_what_it_compiled(model: Path) -> None:
    """vLLM notes it in the model; on a GPU, where it compiles by default, a restart had another
    namespace, and found nothing on disk."""
    vllm = config_of(model, compilation_config={"mode": 3})

    @support_torch_compile(dynamic_arg_dims={"hidden": 0})
    class Backbone(nn.Module):
        def __init__(self, *, vllm_config: Any) -> None:
            super().__init__()
            self.heads = 8

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden

    with set_current_vllm_config(vllm):
        backbone: Any = Backbone(vllm_config=vllm)
    assert not backbone.do_not_compile
    before = LoadedModel.of(backbone)
    for name, now in (
        ("compiled", True),
        ("first_compile", False),
        ("was_aot_compile_fn_loaded_from_disk", True),
    ):
        assert getattr(backbone, name) is not now, "vLLM has it otherwise"
        setattr(backbone, name, now)
    assert LoadedModel.of(backbone) == before
    backbone.heads = 4
    assert LoadedModel.of(backbone) != before


def test_adapters_and_what_is_distrusted_have_names_of_their_own() -> None:
    base = Namespace.of({"test": "1"})
    adapters = Adapters({})
    adapters.loaded({1: (1, "one")})
    plain = SimpleNamespace(lora_request=None)
    styled = SimpleNamespace(lora_request=SimpleNamespace(lora_int_id=1))
    with Pool.open(PoolConfig(1 << 20)) as pool:
        registry = NamespaceRegistry(pool, [("full", 4096)], lambda: base, adapters)

        def names() -> tuple[Namespace | None, Namespace | None]:
            assert all(map(registry.is_settled, (plain, styled)))
            return registry.of(plain), registry.of(styled)

        seen = [names()]
        assert seen[0][0] == base
        adapters.loaded({1: (2, "other")})
        seen.append(names())
        assert seen[1][0] == base
        assert seen[1][1] is not None
        assert seen[1][1].digest in registry.distrust(seen[1][1])
        seen.append(names())
        assert seen[2][0] == base, "an adapter's blocks alone are private"
        registry.turn_private()
        assert not registry.live
        seen.append(names())
        assert seen[3][0] is not None
        registry.distrust(seen[3][0])
        seen.append(names())
        styles = {style for _, style in seen}
        assert len(styles) == len(seen)
        assert None not in styles
        assert len({name for name, _ in seen}) == 3, "a reset is a name of its own each time"
        base = Namespace.of({"test": "2"})
        before = registry.of(plain)
        registry.renew()
        assert names()[0] != before
