"""Which of vLLM's settings shape the bytes of KV: a decision for each field and variable.

The tables are in fields.toml. The namespace contains the value of every setting that is
``Fate.IN_NAMESPACE`` there. A setting that the tables do not know, because a newer vLLM added
it, is treated likewise: an upgrade may cost hits, but never causes wrong ones.
test_fields.py fails for a setting of the installed vLLM without a decision.
docs/identity.md has the tables, generated from here.
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
    PARTS = "decided field by field, below"
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
    fate, _, reason = _line(text).partition(": ")
    return Decision(Fate[fate], reason)


def _line(text: str) -> str:
    return " ".join(text.split())


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
    _line(row["reason"]): row["fields"].split() for row in _DATA["hashed_all_the_same"]
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
    return _Walk(vllm_config, Fate.IN_NAMESPACE).result()


def adapter_ingredients(vllm_config: Any) -> dict[str, str]:
    """Like ``ingredients``, for the blocks of LoRA adapters.

    Empty without LoRA. Blocks of the base model are shared with engines that serve no adapters.
    """
    if vllm_config.lora_config is None:
        return {}
    return _Walk(vllm_config, Fate.ADAPTER).result() | _variables(Fate.ADAPTER)


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


class _Walk:
    """Gathers the fields of one fate from a configuration and its parts."""

    def __init__(self, root: Any, fate: Fate) -> None:
        self._root = root
        self._fate = fate
        self._found: dict[str, str] = {}
        self._defaults: dict[str, str] = {}
        self._labels: set[str] = set()

    def result(self) -> dict[str, str]:
        self._config(self._root, "VllmConfig")
        return self._found | {"defaults of fields": _digest(self._defaults)}

    def _config(self, config: Any, label: str) -> None:
        """Adds a configuration's fields, their names beginning with ``label``."""
        self._labels.add(label)
        decided = decisions(type(config).__name__)
        for field in dataclasses.fields(config):
            decision = decided.get(field.name, UNKNOWN)
            name = f"{type(config).__name__}.{field.name}"
            value = getattr(config, field.name, None)
            if decision is PARTS and not (value is None or dataclasses.is_dataclass(value)):
                decision = UNKNOWN
            if decision is PARTS:
                self._part(value, f"{label}.{field.name}", name)
            elif decision.fate is self._fate:
                self._add(f"{label}.{field.name}", name, value, field, decision is not UNKNOWN)

    def _part(self, part: Any, key: str, name: str) -> None:
        """Adds the fields of a part, and the part itself where being there means something."""
        is_draft = name == "VllmConfig.speculative_config"
        if part is None or (is_draft and draft_model(self._root) is None):
            return
        kind = type(part).__name__
        counts = _COUNTS_ITSELF.get(name)
        if self._fate is Fate.IN_NAMESPACE and counts is not None and counts(self._root):
            self._found[key] = kind
        self._config(part, kind if kind not in self._labels else key)

    def _add(self, key: str, name: str, value: Any, field: Any, known: bool) -> None:
        take = _TAKEN_AS.get(name, _as_it_is)
        text = canonical(take(value, self._root))
        default = _default(field)
        default_text = "" if default is _NONE else canonical(take(default, self._root))
        if known:
            self._defaults[name] = default_text
        if default is _NONE or text != default_text:
            self._found[key] = text


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


def _as_it_is(value: Any, root: Any) -> Any:
    return value


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
    take = _content if name == TUNED_CONFIGS else _as_it_is
    try:
        value, unset = take(getter(), None), take(_where_nothing_is_set(getter)(), None)
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
    """All decisions as Markdown tables, for docs/identity.md."""
    lines = ["| Configuration | Decision | Why | Fields |", "|---|---|---|---|"]
    for config, table in TABLE.items():
        for decision, names in table.items():
            why = f"{decision.fate.value} | {decision.reason}"
            lines.append(f"| `{config}` | {why} | {_code(names)} |")
    lines += ["", "| Decision | Why | Variables |", "|---|---|---|"]
    for decision, names in ENVIRONMENT.items():
        lines.append(f"| {decision.fate.value} | {decision.reason} | {_code(names)} |")
    below = "in the namespace when set | Read by libraries or outside `vllm.envs`."
    lines.append(f"| {below} | {_code(LIBRARIES)} |")
    lines += ["", "| Hashed by vLLM, without effect here | Why |", "|---|---|"]
    lines += [f"| {_code(names)} | {reason} |" for reason, names in HASHED_ALL_THE_SAME.items()]
    lines += ["", "| Configuration outside `VllmConfig` | Represented by |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in ELSEWHERE.items()]
    return "\n".join(lines) + "\n"


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
