"""Reads hand-written JSON files strictly; errors name line, column, cause and cure.

The standard library says whether a text is JSON; ``_PlaceReader`` then notes where each value
stands, so that a wrong *value* can be pointed at too, and refuses what JSON does not have (NaN,
repeated keys, unlimited nesting). ``_explained`` recognises common mistakes in pasted
configuration: full-width punctuation, missing colons and braces, comments, trailing commas.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.errors import ConfigError
from kvrecall.secret import is_secret

JsonPath = tuple[str | int, ...]

MAX_BYTES = 4 << 20
MAX_DEPTH = 64
_MAX_DIGITS = 20
_SPACE = " \t\r\n"

_GAP = re.compile(f"[{_SPACE}]*")
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])')
_FRAGMENT = re.compile(r'"(?:[^"\\]|\\.)*"\s*[:：]')
_CHARACTER = re.compile(r"\\u[dD][89abAB]..\\u....|\\u....|\\.|.", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORD = re.compile(r"[A-Za-z_][\w.-]{0,79}")
_MISTAKEN_WORDS = {"True": "true", "False": "false", "None": "null", "TRUE": "true"}
_MISTAKEN_WORDS |= {"FALSE": "false", "NULL": "null", "undefined": "null"}
_FULL_WIDTH = {"：": ":", "，": ",", "｛": "{", "｝": "}", "［": "[", "］": "]", "、": ","}
_QUOTES = "“”„‟〝〞＂'"
_BOMS = (
    (codecs.BOM_UTF8, "a UTF-8 byte-order mark"),
    (codecs.BOM_UTF16_LE, "a UTF-16 byte-order mark"),
    (codecs.BOM_UTF16_BE, "a UTF-16 byte-order mark"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON value and where each of its parts stood. Paths are keys and indices from the root."""

    source: str
    value: object
    _text: str
    _offsets: Mapping[JsonPath, int]

    def where(self, path: JsonPath) -> str:
        """``file:line:column`` of the key or list item at ``path``, or of its nearest parent."""
        while path and path not in self._offsets:
            path = path[:-1]
        return f"{self.source}:{_place(self._text, self._offsets.get(path, 0))}"

    def where_key(self, key: str) -> str:
        """Where a member of the root stands."""
        return self.where((key,))

    @property
    def paths(self) -> tuple[JsonPath, ...]:
        """The paths of all keys and list items, and of the root."""
        return tuple(self._offsets)

    def opened(self, path: JsonPath, name: str) -> Document:
        """This document with the JSON of the string at ``path`` in place of the string; its parts
        stand where they stand in the string. Itself if there is no string, or an empty one. Raises
        ConfigError, which calls the field ``name``, if the string holds no JSON."""
        value: Any = self.value
        for key in path:
            value = value[key]
        if not isinstance(value, str) or not value:
            return self
        origin = _Origin("string", self._text, _characters(self._text, self._offsets[path]))
        try:
            inner, offsets = _parsed(value, origin)
        except json.JSONDecodeError as error:
            place, message = _explained(error, origin)
            where = f"{self.source}:{place}"
            raise ConfigError(f"{where}: {name} is JSON in a string: {message}") from error
        places = {(*path, *part): origin.offset(at) for part, at in offsets.items() if part}
        changed = _replaced(self.value, path, inner)
        return Document(self.source, changed, self._text, {**self._offsets, **places})


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where the characters of a text stand in a file: ``offsets``, and one more for its end.
    ``whole``: what the text is, in words."""

    whole: str
    file: str
    offsets: Sequence[int]

    def offset(self, at: int) -> int:
        return self.offsets[min(at, len(self.offsets) - 1)]

    def place(self, at: int) -> str:
        """``line:column``, both counted from 1, the column in characters."""
        return _place(self.file, self.offset(at))


def _characters(file: str, at: int) -> list[int]:
    """Where the characters of a string begin that is a list item, or the value of a key, at ``at``;
    and where it ends."""
    key_end = _SCALARS.raw_decode(file, at)[1]
    gap = re.compile(rf"[{_SPACE}]*:[{_SPACE}]*").match(file, key_end)
    begin = gap.end() if gap else at
    end = _SCALARS.raw_decode(file, begin)[1] - 1
    return [found.start() for found in _CHARACTER.finditer(file, begin + 1, end)] + [end]


def _replaced(value: Any, path: JsonPath, new: object) -> Any:
    """A copy of a JSON value, with ``new`` at ``path``."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy


def read_json(path: Path) -> Document:
    """Reads a JSON file. Raises ConfigError with file, line, column, cause and cure."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder; it must be a JSON file") from error
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES >> 20} MiB, the limit")
    for mark, name in _BOMS:
        if raw.startswith(mark):
            raise ConfigError(f"{path}:1:1: starts with {name}; save it as UTF-8 without one")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode()
        raise ConfigError(
            f"{path}:{_place(before, len(before))}: byte 0x{raw[error.start]:02x} is not UTF-8; "
            "save the file as UTF-8"
        ) from error
    return parse_json(text, str(path))


def parse_json(text: str, source: str) -> Document:
    """Parses JSON text; ``source`` names it in errors. Raises ConfigError."""
    if not text.strip(_SPACE):
        raise ConfigError(f"{source}: is empty; it must hold a JSON object {{ ... }}")
    origin = _Origin("file", text, range(len(text) + 1))
    try:
        value, offsets = _parsed(text, origin)
    except json.JSONDecodeError as error:
        place, message = _explained(error, origin)
        raise ConfigError(f"{source}:{place}: {message}") from error
    return Document(source, value, text, offsets)


def _parsed(text: str, origin: _Origin) -> tuple[object, dict[JsonPath, int]]:
    """The value of a JSON text, and where its parts begin in it. Raises JSONDecodeError."""
    start = len(text) - len(text.lstrip(_SPACE))
    if _FRAGMENT.match(text, start):
        raise json.JSONDecodeError(_without_braces(text, origin), text, start)
    _check_grammar(text)
    reader = _PlaceReader(text, origin)
    value, _ = reader.value(start, ())
    return value, reader.offsets


def _check_grammar(text: str) -> None:
    """Raises JSONDecodeError unless the standard library takes the text for JSON."""
    _open_at(text, len(text))
    _GRAMMAR.decode(text)


def _without_braces(text: str, origin: _Origin) -> str:
    """What is wrong with a text that is the inside of an object, with the first error that is left
    between braces."""
    missing = "the outer braces are missing: put the whole text between { and }"
    try:
        _check_grammar("{" + text + "}")
    except json.JSONDecodeError as error:
        left = json.JSONDecodeError(error.msg, text + "}", error.pos - 1)
        missing += "; and at (line:column) {}: {}".format(*_explained(left, origin))
    return missing


def _open_at(text: str, end: int) -> list[int]:
    """Where the objects and lists begin that are open at ``end``. Raises JSONDecodeError if they
    are nested too deep."""
    still_open: list[int] = []
    for token in _BRACKET.finditer(text, 0, end):
        if token[1]:
            still_open.append(token.start())
        elif token[2] and still_open:
            still_open.pop()
        if len(still_open) > MAX_DEPTH:
            message = f"nested more than {MAX_DEPTH} deep; no configuration needs that"
            raise json.JSONDecodeError(message, text, still_open[-1])
    return still_open


def read_object(path: Path, what: str) -> tuple[dict[str, Any], Document]:
    """The JSON object in a file, ``what`` it should hold in words, and its document. Raises
    ConfigError."""
    document = read_json(path)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{document.where(())}: must hold a JSON object of {what}")
    return document.value, document


def read_under(
    file: Path | None, options: Mapping[str, object], option_of: Callable[[str], str]
) -> tuple[dict[str, object], Callable[[str], str]]:
    """The pool settings in a file, if there is one, overridden by ``options``; and where a setting
    stands, for errors: its option, or ``file:line:column``. Raises ConfigError."""
    if file is None:
        return dict(options), option_of
    settings, document = read_object(file, "pool settings")
    return {
        **settings,
        **options,
    }, lambda key: option_of(key) if key in options else document.where((key,))


def _place(text: str, offset: int) -> str:
    """``line:column``, both counted from 1, the column in characters."""
    return f"{text.count(chr(10), 0, offset) + 1}:{offset - text.rfind(chr(10), 0, offset)}"


class _PlaceReader:
    """Reads a text that is JSON, and notes in ``offsets`` where its values begin, those with a key
    at the key. Raises JSONDecodeError for what is refused."""

    def __init__(self, text: str, origin: _Origin) -> None:
        self._text = text
        self._origin = origin
        self.offsets: dict[JsonPath, int] = {}

    def value(self, at: int, path: JsonPath) -> tuple[Any, int]:
        """The value that begins at ``at``, and where it ends."""
        text = self._text
        self.offsets.setdefault(path, at)
        bracket = text[at]
        if bracket not in "{[":
            return self._scalar(at)
        read: dict[str | int, Any] = {}
        at = self._next(at + 1)
        while text[at] not in "}]":
            key: str | int = len(read)
            if bracket == "{":
                key, colon = _SCALARS.raw_decode(text, at)
                if key in read:
                    first = self._origin.place(self.offsets[(*path, key)])
                    message = f"the key {key!r:.80} is repeated (first at {first})"
                    raise json.JSONDecodeError(message, text, at)
                self.offsets[(*path, key)] = at
                at = self._next(self._next(colon) + 1)
            read[key], at = self.value(at, (*path, key))
            at = self._next(at)
            if text[at] == ",":
                at = self._next(at + 1)
        return (read if bracket == "{" else list(read.values())), at + 1

    def _next(self, at: int) -> int:
        """Where the white space at ``at`` ends."""
        gap = _GAP.match(self._text, at)
        assert gap is not None
        return gap.end()

    def _scalar(self, at: int) -> tuple[Any, int]:
        try:
            value, end = _SCALARS.raw_decode(self._text, at)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), self._text, at) from None
        if isinstance(value, str) and _SURROGATE.search(value):
            raise json.JSONDecodeError("half of a surrogate pair", self._text, at)
        return value, end


def _int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of more than {_MAX_DIGITS - 1} digits")
    return int(digits)


def _float(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError("a number too large")
    return number


def _constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")


_GRAMMAR = json.JSONDecoder(parse_int=len, parse_float=len)  # numbers are read by _SCALARS
_SCALARS = json.JSONDecoder(parse_int=_int, parse_float=_float, parse_constant=_constant)


def _explained(error: json.JSONDecodeError, origin: _Origin) -> tuple[str, str]:
    """An error of the standard library: ``line:column``, the cause and the cure."""
    text, at, expected = error.doc, error.pos, _EXPECTED.get(error.msg)
    found, rest = text[at : at + 1], text[at:]
    before = text[:at].rstrip(_SPACE)
    word = _WORD.match(rest)
    key = re.search(r'"[^"\n]{0,80}"$', before)
    if error.msg == "Extra data":
        expected = f"the end of the {origin.whole}"
    elif error.msg == "Expecting ':' delimiter" and key:
        expected = f"':' after the key {key[0]}"
    if expected is None:
        message = _SAID.get(error.msg, error.msg)
        if error.msg.startswith("Invalid control character"):
            message = f"the control character {_shown(found)} in a text; escape it, or close the "
            message += "text"
    elif before.endswith(",") and (found in ("}", "]") or not found):
        at, message = len(before) - 1, "a comma with nothing after it; remove it"
    elif not found:
        message = f"the {origin.whole} ends here; expected {expected}"
        if still_open := _open_at(text, at):
            opened = still_open[-1]
            message += f": the {text[opened]!r} of {origin.place(opened)} is not closed"
    elif error.msg == "Extra data" and found in ("}", "]"):
        message = f"{found!r} closes nothing: there is one more of it than was opened"
    elif before[-1:].isdigit() and at == len(before) and (word or found in "0123456789._"):
        message = "not a JSON number (decimal, no leading zeros, no units)"
    elif word and error.msg.startswith("Expecting property"):
        message = f'the key {word[0]} must be in double quotes: "{word[0]}"'
    elif word and word[0] in _MISTAKEN_WORDS:
        message = f"{word[0]} is not JSON; write {_MISTAKEN_WORDS[word[0]]}"
    elif word and error.msg == "Expecting value":
        label = re.search(r'"([^"\n]*)"\s*:$', before)
        shown = "***" if label and is_secret(label[1]) else word[0]
        message = f'{shown} is not a JSON value; a text must be in double quotes: "{shown}"'
    else:
        cure = ""
        if found in _FULL_WIDTH:
            cure = f"; write the ASCII {_FULL_WIDTH[found]!r}"
        elif found in _QUOTES:
            cure = "; write '\"'"
        elif rest.startswith(("#", "//", "/*")):
            cure = "; JSON has no comments, remove it"
        elif error.msg == "Expecting ',' delimiter" and found in '"{[':
            cure = "; a comma is missing"
        message = f"expected {expected}, found {_shown(found)}{cure}"
    return origin.place(at), message


_EXPECTED = {
    "Expecting property name enclosed in double quotes": "a key in double quotes or '}'",
    "Illegal trailing comma before end of object": "a key in double quotes",
    "Illegal trailing comma before end of array": "a value",
    "Expecting ':' delimiter": "':' between a key and its value",
    "Expecting ',' delimiter": "',' or the closing bracket",
    "Expecting value": "a value",
}
_SAID = {
    "Unterminated string starting at": "this text is not closed by '\"'",
    "Invalid \\escape": r"not a JSON escape; a backslash is written '\\'",
    "Invalid \\uXXXX escape": r"'\u' must be followed by four hexadecimal digits",
}


def _shown(char: str) -> str:
    """A character for an error message, with its name if it is easily mistaken."""
    if char.isascii() and char.isprintable():
        return repr(char)
    name = unicodedata.name(char, "")
    shown = f"{char!r} " if char.isprintable() else ""
    return f"{shown}(U+{ord(char):04X}{' ' + name if name else ''})"
