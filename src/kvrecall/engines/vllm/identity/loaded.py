"""The effect of a configuration on the loaded model: its code, its switches, its rope caches.

``max_model_len`` alone says nothing about KV: for most models another limit changes no byte, for
some it flips a switch (Phi-3's long rope factors, Llama 4's attention temperature). The namespace
therefore describes the loaded modules, not the limits that they were built from.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import nn

_VERSIONED = frozenset(("vllm", "torch", "kvrecall"))
"""Packages whose code the engine's version identifies, which the namespace holds anyway."""

_LIMITS = re.compile(r"(^|_)(max|num)_|_len$|_tokens$|capacity|workspace|world|rank|device")
"""Attributes that hold sizes of buffers or places in a parallel group: they shape no byte."""

_SHARDS = re.compile(r"^tp_size$|partition|^q_size$|^kv_size$")
"""Attributes that hold sizes of a rank's part of a layer; the architecture has those of the
whole."""

_COPIES = re.compile(r"^output_sizes?$")
"""Likewise, of projections that count a KV head as often as there are ranks that have it."""

_STATE = frozenset("training compiled first_compile was_aot_compile_fn_loaded_from_disk".split())
"""PyTorch's mode, and attributes by which vLLM's compiler keeps note of what it has done: others
after a start that compiles than after one that finds its compiled functions on disk."""

_LAYER = re.compile(r"(.*?\.)?(layers|h|blocks)\.\d+(?=\.|$)")

_TABLES = re.compile(r"cos|sin|freq|rope|rotary|scale|alibi|slope|temperature")
"""Buffers computed from the configuration. Others come from the checkpoint, or are scratch space
whose content means nothing."""

_ADAPTERS = "vllm.lora."
"""Layers that serve adapters wrap those of the model, and change nothing for requests without."""

_MOST_FILES = 2000


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Digests, equal where the loaded models make the same KV of the same weights.

    ``code``: Python files of modules that are not vLLM's. ``switches``: numbers and flags, by
    module, those of a layer together. ``tables``: rope caches, KV scales and the like, by name.
    """

    code: str
    switches: tuple[tuple[str, str], ...]
    tables: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, model: nn.Module) -> LoadedModel:
        switches = {path: _digest(found) for path, found in _by_layer(_switches(model)).items()}
        tables = sorted(_tables(model))
        return cls(_digest(_code(model)), tuple(sorted(switches.items())), tuple(tables))


def together(models: Sequence[LoadedModel]) -> str:
    """The model that these ranks have loaded parts of, in digests: equal for any parallel sizes, if
    the parts agree in what they have in common."""
    parts = {
        "code": sorted({model.code for model in models}),
        "switches": sorted({each for model in models for each in model.switches}),
        "tables": sorted({each for model in models for each in model.tables}),
    }
    return ", ".join(f"{name}: {_digest(part)}" for name, part in parts.items())


def _by_layer(switches: Iterable[tuple[str, object]]) -> dict[str, dict[str, object]]:
    """The switches of each layer, and of each other module."""
    found: dict[str, dict[str, object]] = {}
    for name, value in switches:
        layer = _LAYER.match(name)
        found.setdefault(layer.group() if layer else name, {})[name] = value
    return found


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return blake3(text.encode()).hexdigest(16)


def _switches(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Public numbers, flags and types of every module, and its class."""
    for path, module in model.named_modules():
        kind = type(module)  # a missing layer: another pipeline stage has it
        if kind.__module__.startswith(_ADAPTERS) or kind.__name__ == "PPMissingLayer":
            continue
        path = path.replace(".base_layer", "")
        yield path, kind.__qualname__
        for name, value in vars(module).items():
            is_copied = hasattr(module, "num_kv_head_replicas") and _COPIES.search(name)
            if is_copied or name in _STATE or _LIMITS.search(name) or _SHARDS.search(name):
                continue
            if not name.startswith("_") and (plain := _plain(value)) is not None:
                yield f"{path}.{name}", plain


def _plain(value: object) -> object:
    """A number, flag or type, or a short list of them, as JSON has it; None of anything else."""
    if isinstance(value, list | tuple):
        parts = [_plain(one) for one in value[:1025]]
        return None if len(parts) > 1024 or None in parts else parts
    if isinstance(value, torch.dtype):
        return str(value)
    return value if isinstance(value, bool | int | float) else None


def _tables(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, buffer in model.named_buffers():
        if _TABLES.search(name.rsplit(".", 1)[-1]):
            plain = buffer.detach().cpu().contiguous()
            content = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
            shape = f"{plain.dtype} {tuple(plain.shape)}"
            yield name.replace(".base_layer", ""), f"{shape} {blake3(content).hexdigest(16)}"


def _code(model: nn.Module) -> Mapping[str, str]:
    """Digests of the Python files that classes of the model come from, and of those beside them;
    the version of transformers."""
    found: dict[str, str] = {}
    seen: set[Path] = set()
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    for name in sorted(names):
        package = name.split(".", 1)[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        if package in _VERSIONED or package in sys.stdlib_module_names or file is None:
            continue
        if package == "transformers":
            found[package] = str(getattr(sys.modules[package], "__version__", ""))
            continue
        folder = Path(file).parent
        is_alone = "." not in name and Path(file).name != "__init__.py"
        files = [Path(file)] if is_alone else sorted(folder.rglob("*.py"))[:_MOST_FILES]
        for path in [path for path in files if path not in seen]:
            seen.add(path)
            key = f"{package}/{path.relative_to(folder)}"
            found[key] = blake3(path.read_bytes()).hexdigest(16)
    return found
