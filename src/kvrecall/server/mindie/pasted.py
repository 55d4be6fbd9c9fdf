"""Reads a config.json that was pasted together from documents. What can only be meant in one way (a
part without the outer braces, a full-width colon, a missing one, a comma too many) is read so, and
told. Every other mistake is put in order, too, so that all are found, but the file is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from kvrecall import jsonfile
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import SPACE, Document, Origin, parse_json, read_text

_MOST = 32  # mistakes that are reported
_COMMENT = re.compile(r"#[^\n]*|//[^\n]*|/\*.*?\*/", re.DOTALL)
_QUOTED = re.compile(rf"[{jsonfile.QUOTES}]([^{jsonfile.QUOTES}\"\\\n]*)[{jsonfile.QUOTES}]")


class Pasted(NamedTuple):
    """``document``: None if the text cannot be read. The others: mistakes with their places."""

    document: Document | None
    corrected: tuple[str, ...]
    wrong: tuple[str, ...]


class _Change(NamedTuple):
    """What to put in place of a part of a text. ``plain``: it can be meant in no other way."""

    begin: int
    end: int
    put: str
    plain: bool = True


def read_pasted(path: Path) -> Pasted:
    """Raises ConfigError for a file that is not text."""
    return correct(read_text(path), str(path))


def correct(file: str, source: str) -> Pasted:
    """As ``read_pasted``, of a text. ``source`` names it in errors."""
    text, spots = file, list(range(len(file) + 1))
    if not file.strip(SPACE):
        parse_json(file, source)
    corrected: list[str] = []
    wrong: list[str] = []
    begin = len(text) - len(text.lstrip(SPACE))
    is_part = jsonfile.FRAGMENT.match(text, begin) is not None
    if is_part:
        text, spots = f"{{{text}}}", [begin, *spots, spots[-1]]
        place = Origin("file", file, spots).place(0)
        corrected.append(
            f"{source}:{place}: the outer braces are missing; read as if they were there"
        )
    while len(wrong) + len(corrected) < _MOST:
        origin = Origin("file", file, spots)
        try:
            jsonfile.check_grammar(text)
            return Pasted(parse_json(text, source, origin), tuple(corrected), tuple(wrong))
        except json.JSONDecodeError as error:
            place, message = jsonfile.explained(error, origin)
            change = _change(text, error, is_part)
        except ConfigError as error:
            return Pasted(None, tuple(corrected), (*wrong, str(error)))
        if change is None or not change.plain:
            wrong.append(f"{source}:{place}: {message}")
            if change is None:
                break
        else:
            corrected.append(f"{source}:{place}: {message}; kvrecall reads it so")
        text = text[: change.begin] + change.put + text[change.end :]
        spots[change.begin : change.end] = [spots[change.begin]] * len(change.put)
    return Pasted(None, tuple(corrected), tuple(wrong))


def _change(text: str, error: json.JSONDecodeError, is_part: bool) -> _Change | None:
    """The change that lets the parser go on behind a mistake; None if there is none."""
    at, found, rest = error.pos, text[error.pos : error.pos + 1], text[error.pos :]
    before = text[:at].rstrip(SPACE)
    needs_comma = error.msg == "Expecting ',' delimiter"
    if found in jsonfile.FULL_WIDTH:
        return _Change(at, at + 1, jsonfile.FULL_WIDTH[found])
    if before.endswith(",") and found in "}]":
        return _Change(len(before) - 1, len(before), "")
    if found == "," and error.msg.startswith("Illegal trailing comma"):
        return _Change(at, at + 1, "")
    if not found and needs_comma:
        closing = "}" if text[jsonfile.open_at(text, at)[-1]] == "{" else "]"
        return _Change(at, at, closing, is_part)
    if error.msg == "Expecting ':' delimiter" and (value := jsonfile.STRING.match(text, at)):
        return _Change(at, at, ":", text[value.end() :].lstrip(SPACE)[:1] in ("}", ","))
    if comment := _COMMENT.match(rest):
        return _Change(at, at + comment.end(), "", False)
    if quoted := _QUOTED.match(rest):
        return _Change(at, at + quoted.end(), f'"{quoted[1]}"', False)
    if error.msg == "Extra data" and found in ("}", "]"):
        return _Change(at, at + 1, "", False)
    if needs_comma and found in ('"', "{", "["):
        return _Change(at, at, ",", False)
    word = None if needs_comma else jsonfile.WORD.match(rest)
    if word and error.msg.startswith("Expecting"):
        put = jsonfile.MISTAKEN_WORDS.get(word[0], f'"{word[0]}"')
        return _Change(at, at + word.end(), put, False)
    return None
