"""Reads a config.json: reports every problem with place, field, value and allowed values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvrecall.config import allowed_by
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import Document, JsonPath, read_json
from kvrecall.server.mindie.schema import JSON_STRINGS, MindieConfig


class Problems(ConfigError):
    """The problems of a config.json, a line each; the error's message is the first of them."""

    def __init__(self, lines: list[str]) -> None:
        more = f" (and {len(lines) - 1} more: kvrecall config check)" if len(lines) > 1 else ""
        super().__init__(lines[0] + more)
        self.lines = tuple(lines)


def read_config(path: Path) -> tuple[MindieConfig, Document]:
    """The checked configuration of the file, and its document with nested JSON opened.

    Raises ConfigError if the text is not JSON, Problems if its content is wrong.
    """
    return validate(read_json(path))


def validate(document: Document) -> tuple[MindieConfig, Document]:
    """The configuration in ``document``, and the document with objects in place of strings that
    contain them. Raises Problems."""
    document = _opened(document)
    value = document.value
    if not isinstance(value, dict):
        raise Problems([f"{document.where(())}: the file must hold a JSON object {{ ... }}"])
    missing = [name for name in ("ServerConfig", "BackendConfig") if name not in value]
    nested = next((key for key in value if key in ("kvPoolConfig", "ModelDeployConfig")), None)
    if missing and nested is not None:
        raise Problems(
            [
                f"{document.where((nested,))}: {nested} belongs in BackendConfig; this is a "
                f"fragment of a config.json ({', '.join(missing)} missing)"
            ]
        )
    try:
        return MindieConfig.model_validate(value), document
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise Problems(
            [str(problem(document, each["loc"], _explained(each))) for each in details]
        ) from error


def _opened(document: Document) -> Document:
    for path in document.paths:
        if _of_any_item(path) in JSON_STRINGS:
            try:
                document = document.opened(path, dotted(path))
            except ConfigError as error:
                raise Problems([str(error)]) from error
    return document


def _of_any_item(path: JsonPath) -> JsonPath:
    """``path`` as ``JSON_STRINGS`` and ``_SECTIONS`` have it."""
    return tuple(0 if isinstance(part, int) else part for part in path)


def problem(document: Document, path: JsonPath, message: str) -> ConfigError:
    """An error about the field at ``path``."""
    return ConfigError(f"{document.where(path)}: {dotted(path)} {message}")


def dotted(path: JsonPath) -> str:
    """``a.b[0].c``"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _explained(detail: ErrorDetails) -> str:
    """The problem of a field, and its allowed values."""
    *above, last = detail["loc"]
    section = _SECTIONS.get(_of_any_item(tuple(above)))
    fields = section.model_fields if section else {}
    if detail["type"] == "missing":
        return "is required"
    if detail["type"] != "extra_forbidden":
        text = repr(detail["input"])
        shown = text if len(text) <= 60 else text[:57] + "..."
        return f"is {shown}; {allowed_by(detail, fields.get(str(last)))}"
    close = difflib.get_close_matches(str(last), list(fields), 1, 0.75)
    home = next((path for path, model in _SECTIONS.items() if last in model.model_fields), ())
    hint = f"; did you mean {close[0]}?" if close else ""
    hint = hint or (f"; it belongs in {dotted(home)}" if home else "")
    return f"is not a field of {dotted(tuple(above)) or 'config.json'}{hint}"


def _sections(
    model: type[BaseModel], path: JsonPath = ()
) -> Iterator[tuple[JsonPath, type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        kind = field.annotation
        for each in get_args(kind) if isinstance(kind, UnionType) else (kind,):
            listed = get_origin(each) is list
            below = get_args(each)[0] if listed else each
            if isinstance(below, type) and issubclass(below, BaseModel):
                yield from _sections(below, (*path, name, 0) if listed else (*path, name))


_SECTIONS = dict(_sections(MindieConfig))
"""The sections of a config.json; of a list of sections the first stands for all."""
