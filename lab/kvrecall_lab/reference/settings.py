"""The settings of pool, remote stores and retrieval attention, and the fields of MindIE's
config.json, from their declarations."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from kvrecall.attention import PREFIX
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.config import File, Marks, Owner, Settings, Size, bounds_of, words_of
from kvrecall.pool.remote.mooncake import settings as mooncake
from kvrecall.pool.remote.objects import ObjectOptions
from kvrecall.server.mindie.schema import Effect, MindieConfig, Plugins, Section, effect_of
from kvrecall_lab.reference.markdown import code, plain, sentence, table

_HEAD = """# Settings

Every setting of a pool, a remote store and retrieval attention. They go into vLLM's
`kv_connector_extra_config` or a pool.json (`kvrecall serve --pool-config`, `kvrecall pool serve
--config`, `configPath` of MindIE's kvPoolConfig); [commands](commands.md) have some as options:
`disk_path` is `--disk-path`. Sizes are `8GiB` (powers of 1024), `8GB` (of 1000) or bytes: on a
command line a size below 1 MiB, and in JSON a number below 64 KiB, needs its unit (`8B`). Ages are
seconds or `90m`, `12h`, `7d`. A setting that is unknown or out of range is an error that names its
place, its value and the allowed values. How large each should be: `kvrecall plan`
([sizing](../plan.md)).
"""
_OWNERS = {
    Owner.POOL: (
        "Of the pool",
        "Valid in the process that has the pool: the engine, or `kvrecall pool serve`. An engine "
        "with `backend` `service` refuses them.",
    ),
    Owner.ENGINE: (
        "Of every engine",
        "Valid in each engine, also in one that uses a pool service. The service has a "
        "`load_deadline` and a `lookup_deadline` of its own, for its transfers.",
    ),
    Owner.CLIENT: (
        "Of engines that use a pool service",
        "Valid with `backend` `service` only. `kvrecall pool serve` itself takes `socket`.",
    ),
}
_TITLES = ("setting", "value", "meaning", "default")


def page() -> str:
    hints = typing.get_type_hints(Settings, include_extras=True)
    parts = [_HEAD]
    for owner, (title, text) in _OWNERS.items():
        rows = [
            (
                code(key),
                _value(words_of(key).kind or type_of(hints[key]), bounds_of(declared.metadata)),
                sentence(declared.description or ""),
                words_of(key).shown,
            )
            for key, declared in Settings.model_fields.items()
            if words_of(key).owner is owner
        ]
        parts.append(f"## {title}\n\n{text}\n\n{table(_TITLES, rows)}")
    return "\n".join([*parts, _objects(), _mooncake(), _retrieval()])


def type_of(hint: Any) -> str:
    """The type of a value, in words."""
    for kind, words in ((Size, "size"), (File, "path"), (Marks, "two numbers")):
        if kind == hint or kind in get_args(hint):
            return words
    if get_origin(hint) is Literal:
        return ", ".join(code(str(choice)) for choice in get_args(hint))
    if get_origin(hint) is dict:
        return "object"
    names = {bool: "true, false", int: "integer", float: "number", str: "text"}
    kinds = [part for part in (hint, *get_args(hint)) if part in names]
    return names[kinds[0]] if kinds else "object"


def _objects() -> str:
    hints = typing.get_type_hints(ObjectOptions, include_extras=True)
    rows = [
        (
            code(name),
            _value(type_of(hints[name]), bounds_of(declared.metadata)),
            sentence(plain(declared.description or "")),
            "required" if declared.is_required() else _shown(declared.default),
        )
        for name, declared in ObjectOptions.model_fields.items()
    ]
    return (
        "## Of `remote`, kind `objects`\n\nBeside `kind` in the object `remote`. See "
        f"[Object stores](../remote.md#object-stores).\n\n{table(_TITLES, rows)}"
    )


def _mooncake() -> str:
    rows = [(code(name), sentence(one.text), one.shown) for name, one in mooncake.OPTIONS.items()]
    return (
        "## Of `remote`, kind `mooncake`\n\nBeside `kind` in the object `remote`. The keys of "
        "Mooncake's mooncake.json may be there or in the file that `config` names; other keys "
        "pass through to Mooncake's client. See [Remote tier](../remote.md).\n\n"
        f"{table(('setting', 'meaning', 'default'), rows)}"
    )


def _retrieval() -> str:
    rows = [
        (
            code(PREFIX + one.metadata["variable"]),
            sentence(one.metadata["text"]),
            one.metadata["allowed"],
            _shown(one.default),
        )
        for one in fields(RetrievalSettings)
    ]
    titles = ("environment variable", "meaning", "allowed", "default")
    return (
        "## Of retrieval attention\n\nEnvironment variables of the engine's processes. Lengths are "
        f"tokens. See [Retrieval attention](../retrieval.md).\n\n{table(titles, rows)}"
    )


def _value(kind: str, bounds: str) -> str:
    return f"{kind}, {bounds}" if bounds else kind


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None or value == {} else f"{value}"


# -- MindIE's config.json --------------------------------------------------------------------

_MINDIE_HEAD = """# MindIE's config.json

The fields of MindIE's configuration file that `kvrecall serve --config` and `kvrecall config check`
know; any other gets a warning. "Partly": some values have no effect or are refused.
How to move a deployment: [For MindIE users](../mindie.md).
"""
_MINDIE_TITLES = ("field", "what it does", "allowed", "default")


def mindie_page() -> str:
    parts = [_MINDIE_HEAD]
    idle: dict[str, dict[str, None]] = {}
    for name, section in _sections("", MindieConfig):
        for field, reason in section.idle.items():
            idle.setdefault(reason, {})[code(field)] = None
        rows: dict[tuple[str, ...], list[str]] = {}
        for field, declared in section.model_fields.items():
            if not _inner(declared):
                text = re.sub(r"^(\w+ plane's) tls\w+", r"\1", declared.description or "")
                partly = "partly: " if effect_of(declared) is Effect.PARTLY else ""
                row = partly + text, _allowed(declared), _default_of(declared)
                rows.setdefault(row, []).append(code(field))
        if rows:
            cells = [(", ".join(names), *row) for row, names in rows.items()]
            parts.append(f"## {name or 'The file'}\n\n{table(_MINDIE_TITLES, cells)}")
    reasons = [(reason, ", ".join(names)) for reason, names in idle.items()]
    parts.append(
        f"## Without effect\n\nWhatever their value is.\n\n{table(('reason', 'fields'), reasons)}"
    )
    return "\n".join(parts)


def _sections(name: str, section: type[Section]) -> Iterator[tuple[str, type[Section]]]:
    """Each section with its path, outermost first."""
    yield name, section
    for field, declared in section.model_fields.items():
        if inner := _inner(declared):
            yield from _sections(f"{name}.{field}".lstrip("."), inner)


def _inner(declared: FieldInfo) -> type[Section] | None:
    """The section in a field or its list items; plugin_params is one text."""
    kinds = [declared.annotation, *get_args(declared.annotation)]
    kinds += [inner for kind in kinds for inner in get_args(kind)]
    found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
    return found[0] if found and found[0] is not Plugins else None


def _allowed(declared: FieldInfo) -> str:
    kinds = [declared.annotation, *get_args(declared.annotation)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return ", ".join(code(_json(choice)) for choice in get_args(kind))
    metadata = list(declared.metadata)
    metadata += [one for kind in kinds for one in getattr(kind, "__metadata__", ())]
    bounds = [m for one in metadata for m in getattr(one, "metadata", [one])]
    return bounds_of(bounds)


def _default_of(declared: FieldInfo) -> str:
    return "required" if declared.is_required() else code(_json(declared.default))


def _json(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: ""}[value]
    if isinstance(value, str):
        return f'"{value}"'
    return "" if isinstance(value, Section) else f"{value}"
