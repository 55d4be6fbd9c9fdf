"""The fields of MindIE's config.json, from their declaration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kvrecall.config import bounds_of
from kvrecall.server.mindie.schema import MindieConfig, Plugins, effect_of
from kvrecall_lab.reference.markdown import code, table

_HEAD = """# MindIE's config.json

Every field that `kvrecall serve --config` and `kvrecall config check` know. A field that is not
listed is an error; one "without effect" is accepted. See [For MindIE users](../mindie.md).
"""
_TITLES = ("field", "here", "what it does", "allowed", "default")


def page() -> str:
    parts = [_HEAD]
    for name, section in _sections("", MindieConfig):
        rows = [
            (
                code(field),
                effect_of(declared).value,
                declared.description or "",
                _allowed(declared),
                _default(declared),
            )
            for field, declared in section.model_fields.items()
            if not _inner(declared)
        ]
        if rows:
            parts.append(f"## {name or 'The file'}\n\n{table(_TITLES, rows)}")
    return "\n".join(parts)


def _sections(name: str, section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Each section with its path, outermost first."""
    yield name, section
    for field, declared in section.model_fields.items():
        if inner := _inner(declared):
            yield from _sections(f"{name}.{field}".lstrip("."), inner)


def _inner(declared: FieldInfo) -> type[BaseModel] | None:
    """The section in a field or its list items; plugin_params is one text."""
    kinds = [declared.annotation, *get_args(declared.annotation)]
    kinds += [inner for kind in kinds for inner in get_args(kind)]
    found = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
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


def _default(declared: FieldInfo) -> str:
    if declared.default is PydanticUndefined:
        return "required"
    return code(_json(declared.default))


def _json(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: ""}[value]
    if isinstance(value, str):
        return f'"{value}"'
    return "" if isinstance(value, BaseModel) else f"{value}"
