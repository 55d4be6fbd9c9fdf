"""The pairs: two engines that differ in one thing, and whether their KV is the same.

The engines of ``EQUAL`` share, those of ``OTHER`` are told apart by their identity, and those of
``BLIND`` have none (see ``blindfold``) and leave it to the audit.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrecall.lab.identity.setups import Setup, Shelf
from kvrecall.lab.models import (
    ADAPTER,
    LONG_ROPE_FROM,
    Tensors,
    write_blip2,
    write_changed,
    write_code,
    write_indexed,
    write_kv_scales,
    write_links,
    write_llama4,
    write_lora,
    write_phi3,
    write_picture,
)

Two = tuple[Setup, Setup]

_BLOCKS = 6
_FEW_BLOCKS = 3


class Kv(enum.StrEnum):
    """What the second engine computes for the first one's prompts."""

    EQUAL = "equal"  # the same: it must recall what the first has saved
    OTHER = "other"  # something else: it must recall nothing of it


@dataclass(frozen=True, slots=True)
class Pair:
    """``make``: writes what the two engines need. ``blocks``: whole blocks of a prompt.

    ``tells``: whether replies differ where KV does; a block of another size holds the same keys and
    values in another order. ``audited``: there is a blind pair of it too. ``saves_first``: the
    second engine saves prompts of its own before it asks for those of the first.
    """

    name: str
    about: str
    kv: Kv
    make: Callable[[Shelf], Two]
    blocks: int = _BLOCKS
    tells: bool = True
    audited: bool = False
    blind: bool = False
    saves_first: bool = False


def _plain(shelf: Shelf, **options: Any) -> Setup:
    return Setup.of(shelf.model(), **options)


def _options(
    architecture: str, first: dict[str, Any], second: dict[str, Any]
) -> Callable[[Shelf], Two]:
    """One model, two sets of options."""

    def make(shelf: Shelf) -> Two:
        model = shelf.model(architecture)
        return Setup.of(model, **first), Setup.of(model, **second)

    return make


# ---- equal KV -------------------------------------------------------------------------------


def _restart(shelf: Shelf) -> Two:
    return _plain(shelf), _plain(shelf)


def _copied(shelf: Shelf) -> Two:
    source = shelf.model()
    return Setup.of(source), Setup.of(
        shelf.get("elsewhere/copy", lambda path: write_changed(path, source))
    )


def _linked(shelf: Shelf) -> Two:
    source = shelf.model()
    return Setup.of(source), Setup.of(shelf.get("links", lambda path: write_links(path, source)))


def _readme(shelf: Shelf) -> Two:
    source = shelf.model()

    def write(path: Path) -> None:
        write_changed(path, source)
        (path / "README.md").write_text("# Another card\n")
        (path / "chat_template.jinja").write_text("{{ messages }}")
        settings = path / "tokenizer_config.json"
        settings.write_text(settings.read_text().replace("<|pad|>", "<|im_start|>"))

    return Setup.of(source), Setup.of(shelf.get("readme", write))


def _dead_code(shelf: Shelf) -> Two:
    first, second = (_with_code(shelf, places, needed=False) for places in (1, 2))
    return Setup.of(first), Setup.of(second)


def _code_copied(shelf: Shelf) -> Two:
    source = _with_code(shelf, 1)
    copy = shelf.get("elsewhere/turned", lambda path: write_changed(path, source))
    return Setup.of(source, trust_remote_code=True), Setup.of(copy, trust_remote_code=True)


def _adapter_restart(shelf: Shelf) -> Two:
    engine = _plain(shelf, enable_lora=True, max_lora_rank=8)
    engine = engine.with_adapter("style", _adapter(shelf, 1))
    return engine, engine


def _pictures(shelf: Shelf) -> Two:
    engine = _seeing(shelf, _blip2(shelf))
    return engine, engine


def _both_long(shelf: Shelf) -> Two:
    first, second = (2 * LONG_ROPE_FROM, 4 * LONG_ROPE_FROM)
    model = _phi3(shelf)
    return Setup.of(model, max_model_len=first), Setup.of(model, max_model_len=second)


EQUAL = (
    Pair("restart", "the same engine, started again", Kv.EQUAL, _restart),
    Pair("copied", "the model's folder copied to another place", Kv.EQUAL, _copied),
    Pair("linked", "a folder of links to the files, as in the hub's cache", Kv.EQUAL, _linked),
    Pair("readme", "README, chat template and tokenizer settings changed", Kv.EQUAL, _readme),
    Pair(
        "length",
        "Qwen3 with max_model_len 1024 and 2048",
        Kv.EQUAL,
        _options("qwen3", {"max_model_len": 1024}, {"max_model_len": 2048}),
    ),
    Pair(
        "batching",
        "other max_num_seqs and max_num_batched_tokens",
        Kv.EQUAL,
        _options("qwen3", {}, {"max_num_seqs": 2, "max_num_batched_tokens": 256}),
    ),
    Pair("dead-code", "code in the folder changed that is not run", Kv.EQUAL, _dead_code),
    Pair("code-copied", "a folder with code that is run, copied", Kv.EQUAL, _code_copied),
    Pair("adapter-restart", "requests of an adapter, engine restarted", Kv.EQUAL, _adapter_restart),
    Pair("pictures", "a model that sees, started again", Kv.EQUAL, _pictures),
    Pair(
        "longrope-both-long",
        "Phi-3 with max_model_len 1024 and 2048, both beyond its original length",
        Kv.EQUAL,
        _both_long,
        _FEW_BLOCKS,
    ),
)


# ---- other KV -------------------------------------------------------------------------------


def _small_tensor(shelf: Shelf) -> Two:
    source = _large(shelf)

    def change(weights: Tensors) -> None:
        weights["model.layers.4.input_layernorm.weight"] *= 1.5
        weights["model.layers.6.self_attn.k_norm.weight"] *= 1.25

    other = shelf.get("small-tensor", lambda path: write_changed(path, source, change))
    return Setup.of(source), Setup.of(other)


def _matrix(shelf: Shelf) -> Two:
    source = shelf.model()
    return Setup.of(source), Setup.of(_with_other_matrix(shelf, source))


def _rewritten(shelf: Shelf) -> Two:
    source = shelf.model()
    place = shelf.get("rewritten", lambda path: write_changed(path, source))
    other = _with_other_matrix(shelf, source)
    engine = Setup.of(place)
    return engine.with_content(place, source), engine.with_content(place, other)


def _index(shelf: Shelf) -> Two:
    source = shelf.model()
    sources = {"a": source, "b": _with_other_matrix(shelf, source)}
    first = shelf.get("index-a", lambda path: write_indexed(path, sources, "a"))
    second = shelf.get("index-b", lambda path: write_indexed(path, sources, "b"))
    return Setup.of(first), Setup.of(second)


def _code(shelf: Shelf) -> Two:
    first, second = (_with_code(shelf, places) for places in (1, 2))
    return Setup.of(first, trust_remote_code=True), Setup.of(second, trust_remote_code=True)


def _longrope(shelf: Shelf) -> Two:
    model = _phi3(shelf)
    short, long = LONG_ROPE_FROM, 4 * LONG_ROPE_FROM
    return Setup.of(model, max_model_len=short), Setup.of(model, max_model_len=long)


def _rope(**parameters: object) -> dict[str, Any]:
    return {"hf_overrides": {"rope_parameters": {"rope_theta": 1e6, **parameters}}}


def _kv_scales(shelf: Shelf) -> Two:
    source = shelf.model()
    first = shelf.get("kv-scales-1", lambda path: write_kv_scales(path, source, 1.0))
    second = shelf.get("kv-scales-2", lambda path: write_kv_scales(path, source, 0.05))
    return Setup.of(first, kv_cache_dtype="fp8"), Setup.of(second, kv_cache_dtype="fp8")


def _adapter_content(shelf: Shelf) -> Two:
    engine = _plain(shelf, enable_lora=True, max_lora_rank=8)
    return _in_one_place(shelf, engine, _adapter(shelf, 1), _adapter(shelf, 2))


def _adapter_row(shelf: Shelf) -> Two:
    """A rank that makes a file so large by itself takes vLLM minutes a prompt on a CPU, so most of
    it is a note in its header."""
    source = _adapter(shelf, 1)

    def write(path: Path, factor: float) -> None:
        def change(weights: Tensors) -> None:
            weights["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"][3] *= factor

        write_changed(path, source, change, file=ADAPTER, note_bytes=70 << 20)

    first = shelf.get("adapter-large", lambda path: write(path, 1.0))
    second = shelf.get("adapter-large-row", lambda path: write(path, 20.0))
    engine = _plain(shelf, enable_lora=True, max_lora_rank=8)
    return _in_one_place(shelf, engine, first, second)


def _in_one_place(shelf: Shelf, engine: Setup, first: Path, second: Path) -> Two:
    """Adapters that are one to vLLM's block hash: it holds an adapter's name and path."""
    place = shelf.get(f"place-of-{first.name}", lambda path: write_changed(path, first))
    engine = engine.with_adapter("style", place)
    return engine.with_content(place, first), engine.with_content(place, second)


def _image_options(shelf: Shelf) -> Two:
    model = _blip2(shelf)
    return _seeing(shelf, model), _seeing(shelf, model, mm_processor_kwargs={"do_normalize": False})


def _image_file(shelf: Shelf) -> Two:
    source = _blip2(shelf)

    def write(path: Path) -> None:
        write_changed(path, source)
        settings = path / "preprocessor_config.json"
        settings.write_text(settings.read_text().replace("0.5", "0.4"))

    place = shelf.get("blip2-rewritten", lambda path: write_changed(path, source))
    other = shelf.get("blip2-other-pixels", write)
    engine = _seeing(shelf, place)
    return engine.with_content(place, source), engine.with_content(place, other)


def _temperature(shelf: Shelf) -> Two:
    model = _llama4(shelf)
    tuned = {"attn_temperature_tuning": True}
    return Setup.of(model), Setup.of(model, override_generation_config=tuned)


def _temperature_length(shelf: Shelf) -> Two:
    model = _llama4(shelf)
    return Setup.of(model, max_model_len=32768), Setup.of(model, max_model_len=32896)


OTHER = (
    Pair(
        "small-tensor",
        "one input norm and one key norm in a file of 230 MB",
        Kv.OTHER,
        _small_tensor,
        _FEW_BLOCKS,
        audited=True,
    ),
    Pair("matrix", "one matrix", Kv.OTHER, _matrix, audited=True),
    Pair("rewritten", "weights rewritten in place, size and time kept", Kv.OTHER, _rewritten),
    Pair("index", "the index file names the other of two shards", Kv.OTHER, _index, audited=True),
    Pair("code", "code in the folder that is run", Kv.OTHER, _code, audited=True),
    Pair(
        "longrope",
        f"Phi-3 with max_model_len {LONG_ROPE_FROM} and {4 * LONG_ROPE_FROM}",
        Kv.OTHER,
        _longrope,
        _FEW_BLOCKS,
        audited=True,
    ),
    Pair(
        "rope-theta",
        "hf_overrides of rope_theta",
        Kv.OTHER,
        _options("qwen3", {}, _rope(rope_type="default", rope_theta=1e4)),
        audited=True,
    ),
    Pair(
        "rope-scaling",
        "hf_overrides of the rope scaling",
        Kv.OTHER,
        _options("qwen3", {}, _rope(rope_type="linear", factor=4.0)),
    ),
    Pair(
        "dtype",
        "float32 and bfloat16",
        Kv.OTHER,
        _options("qwen3", {"dtype": "float32"}, {"dtype": "bfloat16"}),
    ),
    Pair(
        "dtype-half",
        "float16 and bfloat16, equally large",
        Kv.OTHER,
        _options("qwen3", {"dtype": "float16"}, {"dtype": "bfloat16"}),
        audited=True,
    ),
    Pair(
        "kv-dtype",
        "KV in the model's dtype and in fp8",
        Kv.OTHER,
        _options("qwen3", {}, {"kv_cache_dtype": "fp8"}),
    ),
    Pair(
        "kv-dtype-fp8",
        "KV in fp8_e4m3 and fp8_e5m2, equally large",
        Kv.OTHER,
        _options("qwen3", {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}),
        audited=True,
    ),
    Pair("kv-scales", "scales of fp8 KV in the checkpoint", Kv.OTHER, _kv_scales, audited=True),
    Pair(
        "adapter",
        "an adapter of the same name, other weights",
        Kv.OTHER,
        _adapter_content,
        audited=True,
    ),
    Pair(
        "adapter-row",
        "one row of an adapter's file of 70 MB, name and path kept",
        Kv.OTHER,
        _adapter_row,
    ),
    Pair(
        "image-options",
        "mm_processor_kwargs of a model that sees",
        Kv.OTHER,
        _image_options,
        audited=True,
    ),
    Pair("image-file", "preprocessor_config.json rewritten in place", Kv.OTHER, _image_file),
    Pair(
        "temperature",
        "Llama 4 without and with tuned attention temperature (override_generation_config)",
        Kv.OTHER,
        _temperature,
        audited=True,
    ),
    Pair(
        "temperature-length",
        "Llama 4 with max_model_len to and beyond 32768, where vLLM tunes the temperature",
        Kv.OTHER,
        _temperature_length,
    ),
    Pair(
        "block-size",
        "blocks of 128 and of 64 tokens",
        Kv.OTHER,
        _options("qwen3", {"block_size": 128}, {"block_size": 64}),
        tells=False,
    ),
)

BLIND = (
    *(
        replace(pair, name=f"audit-{pair.name}", about=f"no identity, {pair.about}", blind=True)
        for pair in OTHER
        if pair.audited
    ),
    Pair(
        "audit-saves-first",
        "no identity, one matrix; the second engine saves before it has a hit",
        Kv.OTHER,
        _matrix,
        blind=True,
        saves_first=True,
    ),
)

PAIRS = (*EQUAL, *OTHER, *BLIND)


# ---- what several pairs need ----------------------------------------------------------------


def _large(shelf: Shelf) -> Path:
    """A Qwen3 of 230 MB."""
    return shelf.model("qwen3", hidden=1024, layers=10, heads=16, kv_heads=4)


def _phi3(shelf: Shelf) -> Path:
    source = shelf.model("llama")
    return shelf.get("phi3", lambda path: write_phi3(path, source))


def _llama4(shelf: Shelf) -> Path:
    source = shelf.model("llama")
    return shelf.get("llama4", lambda path: write_llama4(path, source))


def _blip2(shelf: Shelf) -> Path:
    source = shelf.model("llama")
    return shelf.get("blip2", lambda path: write_blip2(path, source))


def _seeing(shelf: Shelf, model: Path, **options: Any) -> Setup:
    picture = shelf.get("picture.png", lambda path: write_picture(path, 1))
    return Setup.of(model, limit_mm_per_prompt={"image": 1}, **options).with_images(picture)


def _with_code(shelf: Shelf, places: int, needed: bool = True) -> Path:
    source = shelf.model()
    name = f"{'turned' if needed else 'dead'}-{places}"
    return shelf.get(name, lambda path: write_code(path, source, places, needed=needed))


def _with_other_matrix(shelf: Shelf, source: Path) -> Path:
    def change(weights: Tensors) -> None:
        matrix = weights["model.layers.1.self_attn.k_proj.weight"]
        weights["model.layers.1.self_attn.k_proj.weight"] = matrix.flip(0)

    return shelf.get("other-matrix", lambda path: write_changed(path, source, change))


def _adapter(shelf: Shelf, seed: int) -> Path:
    base = shelf.model()
    return shelf.get(f"adapter-{seed}", lambda path: write_lora(path, base, seed=seed))
