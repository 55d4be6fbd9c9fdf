"""Which of vLLM's settings shape the bytes of KV: a decision for each field and variable.

The tables are in fields.toml. The namespace contains the value of every setting that is
``Fate.IN_NAMESPACE`` there. A setting that the tables do not know, because a newer vLLM added
it, is treated likewise: an upgrade may cost hits, but never causes wrong ones.
test_fields.py fails for a setting of the installed vLLM without a decision.
docs/reference/identity.md has the tables, generated from here.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import tomllib
import types
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs

from kvrecall.engines.vllm.identity.weights import draft_model
from kvrecall.environment import TUNED_CONFIGS


class Fate(enum.Enum):
    """How a setting enters a block's identity. The value is the text for people."""

    IN_NAMESPACE = "in the namespace by its value"
    ADAPTER = "in the namespaces of LoRA adapters"
    PARTS = "decided field by field"
    LOADED_MODEL = "read off the loaded model"
    FILES = "identified by the content of files"
    BLOCK_HASH = "carried by vLLM's block hash"
    NAMESPACE_OTHERWISE = "in the namespace in another form"
    NO_EFFECT = "no effect on KV"


@dataclass(frozen=True, slots=True)
class Decision:
    """The fate of settings, and their common reason."""

    fate: Fate
    reason: str


def _decision(text: str) -> Decision:
    """A decision that the tables write as ``FATE: reason``."""
    fate, _, reason = " ".join(text.split()).partition(": ")
    return Decision(Fate[fate], reason)


_DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_NAMED = {name: _decision(text) for name, text in _DATA["decisions"].items()}
UNKNOWN, PARTS = _NAMED["UNKNOWN"], _NAMED["PARTS"]

Table = Mapping[Decision, Sequence[str]]
"""Names of settings by the decision they share."""


def _table(rows: Mapping[str, str]) -> Table:
    return {_NAMED.get(key) or _decision(key): names.split() for key, names in rows.items()}


TABLE: Mapping[str, Table] = {name: _table(rows) for name, rows in _DATA["fields"].items()}
"""Fields of the configurations reachable from ``VllmConfig``, by class and decision."""

ENVIRONMENT: Table = _table(_DATA["environment"])
"""Variables of ``vllm.envs`` and those its ``compile_factors`` adds, by decision."""

LIBRARIES: Sequence[str] = _DATA["libraries"].split()
"""Variables outside ``vllm.envs`` by which vLLM's models and the libraries below it choose kernels
and precision. In the namespace when set."""

HASHED_ALL_THE_SAME: Mapping[str, Sequence[str]] = {
    " ".join(row["reason"].split()): row["fields"].split() for row in _DATA["hashed_all_the_same"]
}
"""Why vLLM's ``compute_hash`` holds fields whose fate here is ``NO_EFFECT``."""

OTHER_VERSIONS: Mapping[str, Sequence[str]] = {
    versions: names.split() for versions, names in _DATA["other_versions"].items()
}
"""Decided settings that only some of the supported versions have, by these versions."""

ELSEWHERE: Mapping[str, str] = _DATA["elsewhere"]
"""Configurations of vLLM that no field of ``VllmConfig`` contains, and what represents them."""


def ingredients(vllm_config: Any) -> dict[str, str]:
    """Fields in the namespace, ``Class.field`` to canonical text, for an engine's configuration.

    Holds the values that are not the defaults of the installed vLLM and a digest of these defaults:
    equal results mean equal values of all fields. The same in every process and on every machine
    for the same configuration.
    """
    return _fields(vllm_config, Fate.IN_NAMESPACE)


def adapter_ingredients(vllm_config: Any) -> dict[str, str]:
    """Like ``ingredients``, for the blocks of LoRA adapters.

    Empty without LoRA. Blocks of the base model are shared with engines that serve no adapters.
    """
    if vllm_config.lora_config is None:
        return {}
    return _fields(vllm_config, Fate.ADAPTER) | _variables(Fate.ADAPTER)


def environment() -> dict[str, str]:
    """Environment variables in the namespace, as ``ingredients`` has fields."""
    set_below = {name: os.environ[name] for name in LIBRARIES if name in os.environ}
    return _variables(Fate.IN_NAMESPACE) | set_below


def unrepeatable(vllm_config: Any) -> str:
    """Why no other engine can compute this one's KV; empty if one can."""
    if vllm_config.weight_transfer_config is not None:
        return "weight_transfer_config replaces the weights while the engine runs"
    media = vllm_config.model_config.multimodal_config
    is_fp8 = media is not None and media.mm_encoder_attn_dtype == "fp8"
    if is_fp8 and media.mm_encoder_fp8_scale_path is None:
        return (
            "mm_encoder_attn_dtype fp8 without mm_encoder_fp8_scale_path takes its scales from "
            "the media served so far"
        )
    return ""


def _fields(root: Any, fate: Fate) -> dict[str, str]:
    """The fields of one fate from a configuration and its parts."""
    found: dict[str, str] = {}
    defaults: dict[str, str] = {}
    labels: set[str] = set()

    def visit(config: Any, label: str) -> None:
        """Adds a configuration's fields, their names beginning with ``label``."""
        labels.add(label)
        kind = type(config).__name__
        decided = decisions(kind)
        for field in dataclasses.fields(config):
            name, key = f"{kind}.{field.name}", f"{label}.{field.name}"
            decision, value = decided.get(field.name, UNKNOWN), getattr(config, field.name, None)
            if decision is PARTS and not (value is None or dataclasses.is_dataclass(value)):
                decision = UNKNOWN
            if decision is PARTS and value is not None:
                visit_part(value, key, name)
            elif decision.fate is fate:
                text, usual = canonical(taken(name, value)), ""
                if (default := _default(field)) is not _NONE:
                    usual = canonical(taken(name, default))
                if decision is not UNKNOWN:
                    defaults[name] = usual
                if default is _NONE or text != usual:
                    found[key] = text

    def visit_part(part: Any, key: str, name: str) -> None:
        """Adds the fields of a part, and the part itself where being there means something."""
        if name == "VllmConfig.speculative_config" and draft_model(root) is None:
            return
        kind, counts = type(part).__name__, _COUNTS_ITSELF.get(name)
        if fate is Fate.IN_NAMESPACE and counts is not None and counts(root):
            found[key] = kind
        visit(part, kind if kind not in labels else key)

    def taken(name: str, value: Any) -> Any:
        return _TAKEN_AS[name](value, root) if name in _TAKEN_AS else value

    visit(root, "VllmConfig")
    return found | {"defaults of fields": _digest(defaults)}


def decisions(class_name: str) -> dict[str, Decision]:
    """The decision for each field of a configuration class, by the field's name."""
    return _by_name(TABLE.get(class_name, {}))


def _by_name(table: Table) -> dict[str, Decision]:
    return {name: decision for decision, names in table.items() for name in names}


_NONE = object()


def _default(field: Any) -> Any:
    """The default of a dataclass's field, ``_NONE`` without one."""
    default, factory = field.default, field.default_factory
    if hasattr(default, "default_factory"):  # pydantic.Field
        default, factory = default.default, default.default_factory or dataclasses.MISSING
    if factory is not dataclasses.MISSING:
        return factory()
    is_absent = default is dataclasses.MISSING or type(default).__name__ == "PydanticUndefinedType"
    return _NONE if is_absent else default


def _digest(texts: Mapping[str, str]) -> str:
    text = json.dumps(texts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _is_moe(root: Any) -> bool:
    return bool(root.parallel_config.is_moe_model)


_PLAIN_TYPES = (bool, int, float, str, list, tuple, dict, types.NoneType)


def _without_checks(value: Any, root: Any) -> Any:
    """Inductor's settings without assertions, which follow the log level, and without passes,
    which other fields name."""
    return {
        name: setting
        for name, setting in value.items()
        if not name.endswith("_asserts") and isinstance(setting, _PLAIN_TYPES)
    }


def _content(value: Any, root: Any) -> Any:
    """The content of a file, or of the settings in a folder, in place of the path."""
    if value is None or not Path(value).exists():
        return None
    path = Path(value)
    if path.is_dir():
        return _digest({file.name: file.read_text() for file in path.glob("*.json")})
    return _digest({"": path.read_text()})


def _sorted(value: Any, root: Any) -> Any:
    return value if value is None else sorted(value)


_TAKEN_AS: Mapping[str, Callable[[Any, Any], Any]] = {
    "CacheConfig.kv_cache_dtype_skip_layers": _sorted,
    "CompilationConfig.inductor_compile_config": _without_checks,
    "LoadConfig.model_loader_extra_config": lambda value, root: dict(value).get("pattern"),
    "LoRAConfig.max_loras": lambda value, root: value if TUNED_CONFIGS in os.environ else None,
    "LoRAConfig.target_modules": _sorted,
    "MultiModalConfig.limit_per_prompt": lambda value, root: sorted(
        name for name, options in value.items() if options.count == 0
    ),
    "MultiModalConfig.mm_encoder_fp8_scale_path": _content,
    "ParallelConfig.data_parallel_size": lambda value, root: value if _is_moe(root) else 1,
    "ParallelConfig.nnodes": lambda value, root: (
        1 if value == 1 else root.parallel_config.nnodes_within_dp
    ),
}
"""Replacements for fields whose value contains too much: limits, paths, secrets, order."""

_COUNTS_ITSELF: Mapping[str, Callable[[Any], bool]] = {
    "AttentionConfig.hisparse_config": lambda root: True,
    # Experts that serve adapters have kernels of their own, for requests without adapter too.
    "VllmConfig.lora_config": _is_moe,
    "VllmConfig.weight_transfer_config": lambda root: True,
}
"""Parts whose fields may all be defaults, and when their presence shapes KV."""


def _variables(fate: Fate) -> dict[str, str]:
    getters, decided = envs.environment_variables, _by_name(ENVIRONMENT)
    known = [name for name in getters if name in decided and decided[name].fate is fate]
    unknown = [name for name in getters if name not in decided]
    if fate is not Fate.IN_NAMESPACE:
        unknown = []
    elif unknown:
        kept = envs.compile_factors()  # what vLLM itself treats as changing computation
        unknown = [name for name in unknown if name in kept]
    found, defaults = {}, {}
    for name in known + unknown:
        text, default = _read(name, getters[name])
        if name in decided:
            defaults[name] = default
        if text != default:
            found[name] = text
    return found | {"defaults of variables": _digest(defaults)}


def _read(name: str, getter: Callable[[], Any]) -> tuple[str, str]:
    """A variable's value and its value where nothing is set, both as canonical text."""
    try:
        values = getter(), _where_nothing_is_set(getter)()
        value, unset = [_content(v, None) for v in values] if name == TUNED_CONFIGS else values
        return canonical(value), canonical(unset)
    except (ValueError, OSError, TypeError):
        # vLLM refuses such a value when it comes to need it.
        return os.environ.get(name, ""), ""


def _where_nothing_is_set(getter: Any) -> Callable[[], Any]:
    """The same function with another ``os`` in its globals, in whose environment nothing is set."""
    if not isinstance(getter, types.FunctionType):
        return lambda: None
    bare = types.SimpleNamespace(
        environ={}, getenv=lambda name, default=None: default, path=os.path, cpu_count=os.cpu_count
    )
    names = {**getter.__globals__, "os": bare}
    rest = getter.__name__, getter.__defaults__, getter.__closure__
    return types.FunctionType(getter.__code__, names, *rest)


def canonical(value: Any) -> str:
    """A value as text that is equal in every process: no address, no order of a set. What has no
    such text is its type's name."""
    try:
        plain = _plain(value)
    except RecursionError:
        plain = _name_of(type(value))
    return plain if isinstance(plain, str) else json.dumps(plain, sort_keys=True)


def _plain(value: Any) -> Any:
    """The value as JSON has it. Enumerations come first, as some are numbers too."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, Mapping):
        return {canonical(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Set):
        return sorted((_plain(one) for one in value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return _name_of(value)
    if dataclasses.is_dataclass(value):
        parts = {f.name: _plain(getattr(value, f.name, None)) for f in dataclasses.fields(value)}
        return {type(value).__name__: parts}
    hashed = getattr(value, "compute_hash", None)
    name = _name_of(type(value))
    return f"{name} {hashed()}" if callable(hashed) else name


def _name_of(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def as_markdown() -> str:
    """All decisions as Markdown tables, for docs/reference/identity.md."""
    libraries = Decision(Fate.IN_NAMESPACE, "Read outside `vllm.envs`; counts when set.")
    tables = {**TABLE, "variables": ENVIRONMENT, "variables of libraries": {libraries: LIBRARIES}}
    found: dict[Decision, list[str]] = {}
    for config, table in tables.items():
        for decision, names in table.items():
            listed = ", ".join(f"`{name}`" for name in names)
            found.setdefault(decision, []).append(f"{config}: {listed}")
    lines = []
    for fate in (one for one in Fate if one is not Fate.PARTS):
        title = fate.value[0].upper() + fate.value[1:]
        rows = [f"| {one.reason} | {'; '.join(found[one])} |" for one in found if one.fate is fate]
        lines += [f"## {title}", "", "| why | settings |", "|---|---|", *rows, ""]
    return "\n".join(lines)
