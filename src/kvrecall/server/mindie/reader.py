"""Reads a config.json: reports every problem with place, field, value and allowed values."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvrecall.config import allowed_by
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import Document, JsonPath
from kvrecall.server.mindie.pasted import read_pasted
from kvrecall.server.mindie.schema import JSON_STRINGS, MindieConfig, Section


class Problems(ConfigError):
    """The problems of a config.json, a line each, and its warnings; the error's message is the
    first of the problems."""

    def __init__(self, lines: Sequence[str], warnings: Sequence[str] = ()) -> None:
        self.lines, self.warnings = tuple(dict.fromkeys(lines)), tuple(warnings)
        more = f" (and {len(self.lines) - 1} more: kvrecall config check)"
        super().__init__(lines[0] + (more if len(self.lines) > 1 else ""))


Read = tuple[Section, Document, tuple[str, ...]]  # a configuration, its document, warnings


def read_config(path: Path) -> Read:
    """The checked configuration of the file. Raises ConfigError, for what it holds Problems."""
    pasted = read_pasted(path)
    if pasted.document is None:
        raise Problems(pasted.wrong, pasted.corrected)
    return validate(pasted.document, pasted.corrected, pasted.wrong)


def validate(document: Document, corrected: Sequence[str] = (), wrong: Sequence[str] = ()) -> Read:
    """The configuration in ``document``, with warnings: ``corrected`` and its own. Raises Problems:
    what is ``wrong`` already, and what is wrong with it."""
    problems, warnings = list(wrong), list(corrected)
    document = _opened(_at_home(document, warnings), problems)
    value = document.value
    if not isinstance(value, dict):
        raise Problems([f"{document.where(())}: the file must hold a JSON object {{ ... }}"])
    warnings += _unknown(document, value)
    if value and "ServerConfig" not in value:
        values = "127.0.0.1, ports 1025 to 1027, httpsEnabled true"
        warnings.append(f"{document.where(())}: no ServerConfig; MindIE's defaults apply: {values}")
    try:
        config = MindieConfig.model_validate(value)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            problems.append(str(problem(document, each["loc"], _explained(each, document))))
    if problems:
        raise Problems(problems, warnings)
    return config, document, tuple(warnings)


def _at_home(document: Document, warnings: list[str]) -> Document:
    """The document with the sections of a part of a file where a whole file has them."""
    value: Any = document.value
    for key in list(value) if isinstance(value, dict) else ():
        homes = (path[:-1] if path[-1:] == (0,) else path for path in _SECTIONS)
        home = next((path for path in homes if path[-1:] == (key,) and 0 not in path), ())
        parent = value
        for name in home[:-1]:
            parent = parent.setdefault(name, {}) if isinstance(parent, dict) else None
        if len(home) > 1 and isinstance(parent, dict) and key not in parent:
            where = f"{document.where((key,))}: {key} belongs in {dotted(home[:-1])}"
            warnings.append(f"{where}; kvrecall reads it there")
            parent[key] = value.pop(key)
            document = document.moved(key, home[:-1])
    return document


def _opened(document: Document, problems: list[str]) -> Document:
    for path in document.paths:
        if _of_any_item(path) in JSON_STRINGS:
            try:
                document = document.opened(path, dotted(path))
            except ConfigError as error:
                problems.append(str(error))
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


def _unknown(document: Document, value: object, path: JsonPath = ()) -> Iterator[str]:
    """A warning for each field that its section does not have."""
    section = _SECTIONS[_of_any_item(path)]
    for name, inner in value.items() if isinstance(value, dict) else ():
        here = (*path, name)
        if name not in section.model_fields and name not in section.idle:
            known = [*section.model_fields, *section.idle]
            close = difflib.get_close_matches(name, known, 1, 0.75)
            has = (p for p, s in _SECTIONS.items() if name in s.model_fields or name in s.idle)
            home = dotted(next(has, ()))
            hint = (
                f"; did you mean {close[0]}?"
                if close
                else f"; it belongs in {home}"
                if home
                else ""
            )
            yield str(problem(document, here, f"is unknown and has no effect{hint}"))
        elif _of_any_item(here) in _SECTIONS:
            yield from _unknown(document, inner, here)
        elif isinstance(inner, list) and (*_of_any_item(here), 0) in _SECTIONS:
            for index, item in enumerate(inner):
                yield from _unknown(document, item, (*here, index))


def _explained(detail: ErrorDetails, document: Document) -> str:
    """The problem of a field, and its allowed values."""
    *above, last = detail["loc"]
    section = _SECTIONS.get(_of_any_item(tuple(above)))
    if detail["type"] == "missing":
        given = detail["input"] if isinstance(detail["input"], dict) else {}
        close = difflib.get_close_matches(str(last), given, 1, 0.75)
        at = document.where((*above, *close)).removeprefix(f"{document.source}:")
        return f"is required{f'; is {close[0]} ({at}) a misspelling of it?' if close else ''}"
    text = repr(detail["input"])
    shown = text if len(text) <= 60 else text[:57] + "..."
    fields = section.model_fields if section else {}
    return f"is {shown}; {allowed_by(detail, fields.get(str(last)))}"


def _sections(
    section: type[Section], path: JsonPath = ()
) -> Iterator[tuple[JsonPath, type[Section]]]:
    yield path, section
    for name, field in section.model_fields.items():
        kind = field.annotation
        for each in get_args(kind) if isinstance(kind, UnionType) else (kind,):
            listed = get_origin(each) is list
            below = get_args(each)[0] if listed else each
            if isinstance(below, type) and issubclass(below, Section):
                yield from _sections(below, (*path, name, 0) if listed else (*path, name))


_SECTIONS = dict(_sections(MindieConfig))
"""The sections of a config.json; of a list of sections the first stands for all."""
