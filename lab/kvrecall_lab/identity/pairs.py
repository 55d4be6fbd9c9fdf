"""The pairs: two engines that differ in one respect, and whether their KV is the same.

The engines of ``EQUAL`` share blocks, those of ``OTHER`` differ in identity, and those of
``BLIND`` have none (see ``kvrecall_lab.identity.engines``) and rely on the audit.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrecall.bench.model import Tensors
from kvrecall_lab.identity.setups import EXTENSION, WORKER, Setup, Shelf
from kvrecall_lab.models.variants import (
    ADAPTER,
    LONG_ROPE_FROM,
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
Make = Callable[[Shelf], Two]

_FEW_BLOCKS = 3


class Kv(enum.StrEnum):
    """What the second engine computes for the first one's prompts."""

    EQUAL = "equal"  # equal: it must recall what the first has saved
    OTHER = "other"  # different: it must recall nothing of it


@dataclass(frozen=True, slots=True)
class Pair:
    """``make``: writes the two engines' files. ``blocks``: whole blocks of a prompt.

    ``tells``: whether replies differ where KV does; a block of another size holds the same keys and
    values in another order, and two precisions may differ by no more than a split prompt does.
    ``audited``: the pair exists as a blind pair, too. ``saves_first``: the second engine saves
    prompts of its own before it requests those of the first. ``pools``: the second engine's own
    prompts are pooled.
    """

    name: str
    about: str
    kv: Kv
    make: Make
    blocks: int = 6
    tells: bool = True
    audited: bool = False
    blind: bool = False
    saves_first: bool = False
    pools: bool = True


_PAIRS: list[Pair] = []


def _pair(kv: Kv, about: str, **more: Any) -> Callable[[Make], Make]:
    """Makes a pair, named after the decorated function, which writes its engines' files. ``more``:
    fields of ``Pair``."""

    def register(make: Make) -> Make:
        name = make.__name__.strip("_").replace("_", "-")
        _PAIRS.append(Pair(name, about, kv, make, **more))
        return make

    return register


def _two(first: Path, second: Path, **options: Any) -> Two:
    """Engines that run two models by the same options."""
    return Setup.of(first, **options), Setup.of(second, **options)


# ---- equal KV -------------------------------------------------------------------------------


@_pair(Kv.EQUAL, "the same engine, started again")
def _restart(shelf: Shelf) -> Two:
    return _two(shelf.model(), shelf.model())


@_pair(Kv.EQUAL, "the model's folder copied to another place")
def _copied(shelf: Shelf) -> Two:
    source = shelf.model()
    return _two(source, shelf.get("elsewhere/copy", write_changed, source))


@_pair(Kv.EQUAL, "a folder of links to the files, as in the hub's cache")
def _linked(shelf: Shelf) -> Two:
    source = shelf.model()
    return _two(source, shelf.get("links", write_links, source))


@_pair(Kv.EQUAL, "README, chat template and tokenizer settings changed")
def _readme(shelf: Shelf) -> Two:
    source = shelf.model()

    def write(path: Path) -> None:
        write_changed(path, source)
        (path / "README.md").write_text("# Another card\n")
        (path / "chat_template.jinja").write_text("{{ messages }}")
        settings = path / "tokenizer_config.json"
        settings.write_text(settings.read_text().replace("<|pad|>", "<|im_start|>"))

    return _two(source, shelf.get("readme", write))


@_pair(Kv.EQUAL, "code in the folder changed that is not run")
def _dead_code(shelf: Shelf) -> Two:
    return _two(_with_code(shelf, 1, needed=False), _with_code(shelf, 2, needed=False))


@_pair(Kv.EQUAL, "a folder with code that is run, copied")
def _code_copied(shelf: Shelf) -> Two:
    source = _with_code(shelf, 1)
    copy = shelf.get("elsewhere/turned", write_changed, source)
    return _two(source, copy, trust_remote_code=True)


@_pair(Kv.EQUAL, "requests of an adapter, engine restarted")
def _adapter_restart(shelf: Shelf) -> Two:
    engine = _adapting(shelf).with_adapter("style", _lora(shelf, 1))
    return engine, engine


@_pair(Kv.EQUAL, "a model that sees, started again")
def _pictures(shelf: Shelf) -> Two:
    engine = _seeing(shelf, _of_llama(shelf, "blip2", write_blip2))
    return engine, engine


@_pair(
    Kv.EQUAL,
    "Phi-3 with max_model_len 1024 and 2048, both beyond its original length",
    blocks=_FEW_BLOCKS,
)
def _longrope_both_long(shelf: Shelf) -> Two:
    return _phi3_of_lengths(shelf, 2 * LONG_ROPE_FROM, 4 * LONG_ROPE_FROM)


# ---- weights that change in a running engine ------------------------------------------------


@_pair(Kv.EQUAL, "weights reloaded from a folder, and an engine that was started with it")
def _reload_to(shelf: Shelf) -> Two:
    other = _with_other_matrix(shelf)
    return Setup.of(other), _reloaded(Setup.of(shelf.model()), other)


@_pair(Kv.EQUAL, "weights reloaded from a folder, and the first ones again")
def _reload_and_back(shelf: Shelf) -> Two:
    engine = Setup.of(shelf.model())
    return engine, _reloaded(engine, _with_other_matrix(shelf), shelf.model())


@_pair(Kv.EQUAL, "slept at level 1, which keeps the weights")
def _sleep(shelf: Shelf) -> Two:
    engine = Setup.of(shelf.model(), worker_cls=WORKER)
    return engine, engine.then(sleep=1)


@_pair(Kv.EQUAL, "slept at level 2, and the same weights loaded again")
def _sleep_deep(shelf: Shelf) -> Two:
    engine = Setup.of(shelf.model(), worker_cls=WORKER)
    return engine, _reloaded(engine.then(sleep=2), shelf.model())


@_pair(Kv.EQUAL, "an adapter's files overwritten after it was loaded")
def _adapter_overwritten(shelf: Shelf) -> Two:
    return _loading(shelf)


@_pair(Kv.OTHER, "weights reloaded from another folder")
def _reload(shelf: Shelf) -> Two:
    engine = Setup.of(shelf.model())
    return engine, _reloaded(engine, _with_other_matrix(shelf))


@_pair(Kv.OTHER, "weights handed over as tensors, by a method of a worker's extension")
def _hand_over(shelf: Shelf) -> Two:
    engine = Setup.of(shelf.model(), worker_extension_cls=EXTENSION)
    handed = {"path": str(_with_other_matrix(shelf))}
    return engine, engine.then(call="hand_over", arguments=handed)


@_pair(Kv.OTHER, "one norm written by a method of a worker's extension", tells=False)
def _norm_written(shelf: Shelf) -> Two:
    engine = Setup.of(shelf.model(), worker_extension_cls=EXTENSION)
    return engine, engine.then(call="scale_norm", arguments={"factor": 4.0})


@_pair(Kv.OTHER, "weights that the model loads by itself between two steps")
def _hand_over_unseen(shelf: Shelf) -> Two:
    engine = Setup.of(shelf.model(), worker_extension_cls=EXTENSION)
    handed = {"path": str(_with_other_matrix(shelf)), "steps": 1}
    return engine, engine.then(call="hand_over_later", arguments=handed)


@_pair(Kv.OTHER, "slept at level 1, and other weights loaded")
def _sleep_changed(shelf: Shelf) -> Two:
    engine = Setup.of(shelf.model(), worker_cls=WORKER)
    return engine, _reloaded(engine.then(sleep=1), _with_other_matrix(shelf))


@_pair(Kv.OTHER, "an adapter replaced in place while a request of it runs")
def _adapter_in_place(shelf: Shelf) -> Two:
    engine, loaded = _loading(shelf)
    return engine, loaded.then(adapter=engine.adapter)


@_pair(Kv.OTHER, "embeddings, and the same rows of which every other is a token", pools=False)
def _embeddings(shelf: Shelf) -> Two:
    engine = Setup.of(shelf.model(), enable_prompt_embeds=True)
    return engine.with_embeddings(0), engine.with_embeddings(2)


# ---- other KV -------------------------------------------------------------------------------


@_pair(
    Kv.OTHER,
    "one input norm and one key norm in a file of 230 MB",
    blocks=_FEW_BLOCKS,
    audited=True,
)
def _small_tensor(shelf: Shelf) -> Two:
    source = shelf.model("qwen3", hidden=1024, layers=10, heads=16, kv_heads=4)

    def change(weights: Tensors) -> None:
        weights["model.layers.4.input_layernorm.weight"] *= 1.5
        weights["model.layers.6.self_attn.k_norm.weight"] *= 1.25

    return _two(source, shelf.get("small-tensor", write_changed, source, change))


@_pair(Kv.OTHER, "one matrix", audited=True)
def _matrix(shelf: Shelf) -> Two:
    return _two(shelf.model(), _with_other_matrix(shelf))


@_pair(Kv.OTHER, "weights rewritten in place, size and time kept")
def _rewritten(shelf: Shelf) -> Two:
    source = shelf.model()
    place = shelf.get("rewritten", write_changed, source)
    return _in_turn(Setup.of(place), place, source, _with_other_matrix(shelf))


@_pair(Kv.OTHER, "the index file names the other of two shards", audited=True)
def _index(shelf: Shelf) -> Two:
    sources = {"a": shelf.model(), "b": _with_other_matrix(shelf)}
    return _two(*(shelf.get(f"index-{name}", write_indexed, sources, name) for name in sources))


@_pair(Kv.OTHER, "code in the folder that is run", audited=True)
def _code(shelf: Shelf) -> Two:
    return _two(_with_code(shelf, 1), _with_code(shelf, 2), trust_remote_code=True)


@_pair(
    Kv.OTHER,
    f"Phi-3 with max_model_len {LONG_ROPE_FROM} and {4 * LONG_ROPE_FROM}",
    blocks=_FEW_BLOCKS,
    audited=True,
)
def _longrope(shelf: Shelf) -> Two:
    return _phi3_of_lengths(shelf, LONG_ROPE_FROM, 4 * LONG_ROPE_FROM)


@_pair(Kv.OTHER, "scales of fp8 KV in the checkpoint", audited=True)
def _kv_scales(shelf: Shelf) -> Two:
    first, second = (
        shelf.get(f"kv-scales-{scale}", write_kv_scales, shelf.model(), scale)
        for scale in (1.0, 0.05)
    )
    return _two(first, second, kv_cache_dtype="fp8")


@_pair(Kv.OTHER, "an adapter of the same name, other weights", audited=True)
def _adapter(shelf: Shelf) -> Two:
    return _adapters_in_one_place(shelf, _lora(shelf, 1), _lora(shelf, 2))


@_pair(Kv.OTHER, "one row of an adapter's file of 70 MB, name and path kept")
def _adapter_row(shelf: Shelf) -> Two:
    """A large adapter file; most of it is a note in its header, because with a rank for that size
    vLLM would take minutes per prompt on a CPU."""

    def write(path: Path, factor: float) -> None:
        def change(weights: Tensors) -> None:
            weights["base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"][3] *= factor

        write_changed(path, _lora(shelf, 1), change, file=ADAPTER, note_bytes=70 << 20)

    first = shelf.get("adapter-large", write, 1.0)
    return _adapters_in_one_place(shelf, first, shelf.get("adapter-large-row", write, 20.0))


@_pair(Kv.OTHER, "mm_processor_kwargs of a model that sees", audited=True)
def _image_options(shelf: Shelf) -> Two:
    model = _of_llama(shelf, "blip2", write_blip2)
    return _seeing(shelf, model), _seeing(shelf, model, mm_processor_kwargs={"do_normalize": False})


@_pair(Kv.OTHER, "preprocessor_config.json rewritten in place")
def _image_file(shelf: Shelf) -> Two:
    source = _of_llama(shelf, "blip2", write_blip2)

    def write(path: Path) -> None:
        write_changed(path, source)
        settings = path / "preprocessor_config.json"
        settings.write_text(settings.read_text().replace("0.5", "0.4"))

    place = shelf.get("blip2-rewritten", write_changed, source)
    other = shelf.get("blip2-other-pixels", write)
    return _in_turn(_seeing(shelf, place), place, source, other)


@_pair(
    Kv.OTHER,
    "Llama 4 without and with tuned attention temperature (override_generation_config)",
    audited=True,
)
def _temperature(shelf: Shelf) -> Two:
    model = _of_llama(shelf, "llama4", write_llama4)
    tuned = {"attn_temperature_tuning": True}
    return Setup.of(model), Setup.of(model, override_generation_config=tuned)


@_pair(Kv.OTHER, "Llama 4 with max_model_len to and beyond 32768, where vLLM tunes the temperature")
def _temperature_length(shelf: Shelf) -> Two:
    model = _of_llama(shelf, "llama4", write_llama4)
    return Setup.of(model, max_model_len=32768), Setup.of(model, max_model_len=32896)


# ---- one model by two sets of options -------------------------------------------------------


def _rope(**parameters: object) -> dict[str, Any]:
    return {"hf_overrides": {"rope_parameters": {"rope_theta": 1e6, **parameters}}}


_AUDITED = {"audited": True}
_OPTIONS: tuple[tuple[str, Kv, str, dict[str, Any], dict[str, Any], dict[str, Any]], ...] = (
    ("length", Kv.EQUAL, "Qwen3 with max_model_len 1024 and 2048",
     {"max_model_len": 1024}, {"max_model_len": 2048}, {}),
    ("batching", Kv.EQUAL, "other max_num_seqs and max_num_batched_tokens",
     {}, {"max_num_seqs": 2, "max_num_batched_tokens": 256}, {}),
    ("rope-theta", Kv.OTHER, "hf_overrides of rope_theta",
     {}, _rope(rope_type="default", rope_theta=1e4), _AUDITED),
    ("rope-scaling", Kv.OTHER, "hf_overrides of the rope scaling",
     {}, _rope(rope_type="linear", factor=4.0), {}),
    ("dtype", Kv.OTHER, "float32 and bfloat16", {"dtype": "float32"}, {"dtype": "bfloat16"},
     {"tells": False}),
    ("dtype-half", Kv.OTHER, "float16 and bfloat16, equally large",
     {"dtype": "float16"}, {"dtype": "bfloat16"}, {"audited": True, "tells": False}),
    ("kv-dtype", Kv.OTHER, "KV in the model's dtype and in fp8", {}, {"kv_cache_dtype": "fp8"}, {}),
    ("kv-dtype-fp8", Kv.OTHER, "KV in fp8_e4m3 and fp8_e5m2, equally large",
     {"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"}, _AUDITED),
    ("block-size", Kv.OTHER, "blocks of 128 and of 64 tokens",
     {"block_size": 128}, {"block_size": 64}, {"tells": False}),
)  # fmt: skip


def _by_options(first: dict[str, Any], second: dict[str, Any]) -> Make:
    return lambda shelf: (
        Setup.of(shelf.model(), **first),
        Setup.of(shelf.model(), **second),
    )


for _name, _kv, _about, _first, _second, _more in _OPTIONS:
    _PAIRS.append(Pair(_name, _about, _kv, _by_options(_first, _second), **_more))

EQUAL = tuple(pair for pair in _PAIRS if pair.kv is Kv.EQUAL)
OTHER = tuple(pair for pair in _PAIRS if pair.kv is Kv.OTHER)
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


def _in_turn(engine: Setup, place: Path, first: Path, second: Path) -> Two:
    """The same engine over one folder, which holds the files of ``first``, then of ``second``."""
    return engine.with_content(place, first), engine.with_content(place, second)


def _adapters_in_one_place(shelf: Shelf, first: Path, second: Path) -> Two:
    """Adapters that vLLM's block hash does not distinguish: it holds only name and path."""
    place = shelf.get(f"place-of-{first.name}", write_changed, first)
    return _in_turn(_adapting(shelf).with_adapter("style", place), place, first, second)


def _reloaded(engine: Setup, *folders: Path) -> Setup:
    for folder in folders:
        arguments = {"weights_path": str(folder)}
        engine = engine.then(call="reload_weights", arguments=arguments)
    return engine


def _loading(shelf: Shelf) -> Two:
    """An engine of an adapter, and one that has loaded it before its files became another's."""
    first = _lora(shelf, 1)
    place = shelf.get("adapter-replaced", write_changed, first)
    engine = _adapting(shelf).with_adapter("style", place).with_content(place, first)
    loaded = engine.then(adapter=engine.adapter).then(place=place, source=_lora(shelf, 2))
    return engine, loaded


def _adapting(shelf: Shelf) -> Setup:
    return Setup.of(shelf.model(), enable_lora=True, max_lora_rank=8)


def _lora(shelf: Shelf, seed: int) -> Path:
    return shelf.get(f"adapter-{seed}", write_lora, shelf.model(), seed=seed)


def _of_llama(shelf: Shelf, name: str, write: Callable[[Path, Path], Path]) -> Path:
    return shelf.get(name, write, shelf.model("llama"))


def _phi3_of_lengths(shelf: Shelf, first: int, second: int) -> Two:
    model = _of_llama(shelf, "phi3", write_phi3)
    return Setup.of(model, max_model_len=first), Setup.of(model, max_model_len=second)


def _seeing(shelf: Shelf, model: Path, **options: Any) -> Setup:
    picture = shelf.get("picture.png", write_picture)
    return Setup.of(model, limit_mm_per_prompt={"image": 1}, **options).with_images(picture)


def _with_code(shelf: Shelf, places: int, needed: bool = True) -> Path:
    name = f"{'turned' if needed else 'dead'}-{places}"
    return shelf.get(name, write_code, shelf.model(), places, needed=needed)


def _with_other_matrix(shelf: Shelf) -> Path:
    def change(weights: Tensors) -> None:
        matrix = weights["model.layers.1.self_attn.k_proj.weight"]
        weights["model.layers.1.self_attn.k_proj.weight"] = matrix.flip(0)

    return shelf.get("other-matrix", write_changed, shelf.model(), change)
