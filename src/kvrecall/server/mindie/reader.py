"""Reads a config.json: every problem with its place, its field, its value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvrecall.config import allowed_by
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import Document, JsonPath, read_json
from kvrecall.server.mindie.schema import MindieConfig


class Problems(ConfigError):
    """What is wrong with a config.json, one line a problem; the message is the first of them."""

    def __init__(self, lines: list[str]) -> None:
        more = f" (and {len(lines) - 1} more: kvrecall config check)" if len(lines) > 1 else ""
        super().__init__(lines[0] + more)
        self.lines = tuple(lines)


def read_config(path: Path) -> tuple[MindieConfig, Document]:
    """The checked configuration in the file and its text's document.

    Raises ConfigError if the text is not JSON, Problems if its content is wrong.
    """
    document = read_json(path)
    return validate(document), document


def validate(document: Document) -> MindieConfig:
    """The configuration in ``document``. Raises Problems."""
    value = document.value
    if not isinstance(value, dict):
        raise Problems([f"{document.where(())}: the file must hold a JSON object {{ ... }}"])
    missing = [name for name in ("ServerConfig", "BackendConfig") if name not in value]
    nested = next((key for key in value if key in ("kvPoolConfig", "ModelDeployConfig")), None)
    if missing and nested is not None:
        raise Problems(
            [
                f"{document.where((nested,))}: {nested} belongs into BackendConfig; this is a "
                f"fragment of a config.json ({', '.join(missing)} missing)"
            ]
        )
    try:
        return MindieConfig.model_validate(value)
    except ValidationError as error:
        raise Problems(list(_lines(error, document))) from error


def problem(document: Document, path: JsonPath, message: str) -> ConfigError:
    """An error about the field at ``path``, in the form of those of ``validate``."""
    return ConfigError(f"{document.where(path)}: {dotted(path)} {message}")


def dotted(path: JsonPath) -> str:
    """``a.b[0].c``"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _lines(error: ValidationError, document: Document) -> Iterator[str]:
    """One line a field, also of a field with several alternatives."""
    told: set[JsonPath] = set()
    for detail in error.errors(include_url=False):
        path = _existing(detail["loc"], detail["type"])
        if path in told:
            continue
        told.add(path)
        yield f"{document.where(path)}: {dotted(path)} {_explained(detail, path, error)}"


def _existing(loc: tuple[int | str, ...], kind: str) -> JsonPath:
    """The path without pydantic's names for alternatives of a union, which end a location."""
    path: list[int | str] = []
    model: Any = MindieConfig
    for part in loc:
        if isinstance(part, str) and not _is_key(model, part) and kind != "extra_forbidden":
            break
        path.append(part)
        model = _below(model, part)
    return tuple(path)


def _is_key(model: Any, part: str) -> bool:
    return isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields


def _below(model: Any, part: int | str) -> Any:
    """The type of the part of a ``model``."""
    if isinstance(part, int):
        return next(iter(get_args(model)), None)
    if not _is_key(model, part):
        return None
    annotation = model.model_fields[part].annotation
    if get_origin(annotation) in (Union, UnionType):
        parts = [kind for kind in get_args(annotation) if kind is not type(None)]
        annotation = parts[0] if len(parts) == 1 else None
    return annotation


def _explained(detail: ErrorDetails, path: JsonPath, error: ValidationError) -> str:
    """What is wrong with the field at ``path``; of a field with alternatives, all that it may
    be."""
    kind = detail["type"]
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return f"is not a field of {dotted(path[:-1]) or 'config.json'}{_suggestion(path)}"
    allowed = [
        allowed_by(other, _declared(path))
        for other in error.errors(include_url=False)
        if _existing(other["loc"], other["type"]) == path
    ]
    return f"is {_shown(detail['input'])}; {' or '.join(dict.fromkeys(allowed))}"


def _declared(path: JsonPath) -> FieldInfo | None:
    model: Any = MindieConfig
    for part in path[:-1]:
        model = _below(model, part)
    return model.model_fields[path[-1]] if path and _is_key(model, str(path[-1])) else None


def _suggestion(path: JsonPath) -> str:
    """The nearest field of the section, or the section that has a field of this name."""
    model: Any = MindieConfig
    for part in path[:-1]:
        model = _below(model, part)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return ""
    key = str(path[-1])
    close = difflib.get_close_matches(key, list(model.model_fields), 1, 0.75)
    if close:
        return f"; did you mean {close[0]}?"
    home = _home(MindieConfig, key, ())
    return f"; it belongs into {home}" if home else ""


def _home(model: type[BaseModel], key: str, path: JsonPath) -> str:
    """The section of the schema that has a field ``key``."""
    if path and key in model.model_fields:
        return dotted(path)
    for name in model.model_fields:
        below = _below(model, name)
        step: JsonPath = (name,)
        if get_origin(below) is list:
            below, step = _below(below, 0), (name, 0)
        if isinstance(below, type) and issubclass(below, BaseModel):
            found = _home(below, key, (*path, *step))
            if found:
                return found
    return ""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
