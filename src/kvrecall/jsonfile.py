"""JSON files written by people: read strictly, with the line, column and cure of what is wrong.

The standard library parses; ``_Parser`` notes where each value stands, so that a wrong *value* can
be pointed at too, and refuses what JSON does not have (NaN, repeated keys, unlimited nesting).
``_explained`` knows the usual accidents of pasted configuration: full-width punctuation, missing
colons and braces, comments, trailing commas.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kvrecall.errors import ConfigError

_decoder: Any = json.decoder  # its JSONObject, JSONArray and scanstring have no types

JsonPath = tuple[str | int, ...]

MAX_BYTES = 4 << 20
MAX_DEPTH = 64
_MAX_DIGITS = 20
_SPACE = " \t\r\n"

_FRAGMENT = re.compile(r'"(?:[^"\\]|\\.)*"\s*[:：]')
_SURROGATE = re.compile("[\ud800-\udfff]")
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
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


def read_json(path: Path) -> Document:
    """Reads a JSON file. Raises ConfigError of one line: file, line, column, what, cure."""
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
        raise ConfigError(f"{path}: is larger than {MAX_BYTES >> 20} MiB; this is no configuration")
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
    start = len(text) - len(text.lstrip(_SPACE))
    if start == len(text):
        raise ConfigError(f"{source}: is empty; it must hold a JSON object {{ ... }}")
    offsets: dict[JsonPath, int] = {}
    parser = _Parser(text)
    try:
        if _FRAGMENT.match(text, start):
            parser.fail_fragment(start)
        value = parser.document(start, offsets)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}:{_explained(text, error, parser.open)}") from error
    return Document(source, value, text, offsets)


def read_object(path: Path, what: str) -> tuple[dict[str, Any], Document]:
    """The JSON object in a file, ``what`` it should hold in words, and its document. Raises
    ConfigError."""
    document = read_json(path)
    if not isinstance(document.value, dict):
        raise ConfigError(f"{document.where(())}: must hold a JSON object of {what}")
    return document.value, document


def _place(text: str, offset: int) -> str:
    """``line:column``, both counted from 1, the column in characters."""
    return f"{text.count(chr(10), 0, offset) + 1}:{offset - text.rfind(chr(10), 0, offset)}"


@dataclass(frozen=True, slots=True)
class _Placed:
    """A value whose members and items are placed too, and where its text begins."""

    value: Any
    offset: int


class _Parser:
    """Has the standard library parse one text, and notes where each value begins."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0  # where the value begins that is being decoded
        self.open: list[int] = []  # where the objects and lists begin that are being decoded
        self._scalars = json.JSONDecoder(
            parse_int=self._int, parse_float=self._float, parse_constant=self._constant
        )

    def document(self, start: int, offsets: dict[JsonPath, int]) -> object:
        """The one value of the text, its first character at ``start``; notes the ``offsets``.
        Raises JSONDecodeError."""
        placed, end = self._parse(self._text, start)
        if rest := self._text[end:].lstrip(_SPACE):
            raise json.JSONDecodeError("Extra data", self._text, len(self._text) - len(rest))
        offsets[()] = start
        return self._noted(placed.value, (), offsets)

    def fail_fragment(self, start: int) -> NoReturn:
        """Raises JSONDecodeError for a text that is the inside of an object, with the first error
        that is left between braces."""
        self._at = start
        missing = "the outer braces are missing: put the whole text between { and }"
        whole = self._text + "}"
        try:
            _decoder.JSONObject((whole, start), True, self._parse, None, self._members)
        except json.JSONDecodeError as error:
            missing += f"; and at (line:column) {_explained(whole, error, self.open)}"
        self._at, self.open = start, []
        raise self._wrong(missing)

    def _parse(self, text: str, start: int) -> tuple[_Placed, int]:
        self._at = start
        bracket = text[start : start + 1]
        if bracket not in ("{", "["):
            value, end = self._scalars.raw_decode(text, start)
            if isinstance(value, str) and _SURROGATE.search(value):
                raise self._wrong("half of a surrogate pair")
            return _Placed(value, start), end
        if len(self.open) == MAX_DEPTH:
            raise self._wrong(f"nested more than {MAX_DEPTH} deep; no configuration needs that")
        self.open.append(start)
        state = (text, start + 1)
        if bracket == "{":
            value, end = _decoder.JSONObject(state, True, self._parse, None, self._members)
        else:
            value, end = _decoder.JSONArray(state, self._parse)
        self.open.pop()
        return _Placed(value, start), end

    def _members(self, pairs: list[tuple[str, _Placed]]) -> dict[str, _Placed]:
        members: dict[str, _Placed] = {}
        for key, placed in pairs:
            if key in members:
                self._at = self._key_offset(key, placed.offset)
                first = _place(self._text, self._key_offset(key, members[key].offset))
                raise self._wrong(f"the key {key!r} is there twice (first at {first})")
            members[key] = placed
        return members

    def _key_offset(self, key: str, value_offset: int) -> int:
        """Where a key begins: at a quote before its value, from which on it reads so."""
        start = self._text.rindex('"', 0, value_offset)
        while True:
            start = self._text.rindex('"', 0, start)
            if _decoder.scanstring(self._text, start + 1)[0] == key:
                return start

    def _noted(self, value: Any, path: JsonPath, offsets: dict[JsonPath, int]) -> object:
        """``value`` without places; they go into ``offsets``."""
        if isinstance(value, dict):
            for key, each in value.items():
                offsets[(*path, key)] = self._key_offset(key, each.offset)
            return {k: self._noted(v.value, (*path, k), offsets) for k, v in value.items()}
        if isinstance(value, list):
            for index, each in enumerate(value):
                offsets[(*path, index)] = each.offset
            return [self._noted(v.value, (*path, i), offsets) for i, v in enumerate(value)]
        return value

    def _wrong(self, message: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(message, self._text, self._at)

    def _int(self, digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise self._wrong(f"a number of more than {_MAX_DIGITS - 1} digits")
        return int(digits)

    def _float(self, digits: str) -> float:
        if math.isinf(number := float(digits)):
            raise self._wrong("a number too large")
        return number

    def _constant(self, word: str) -> None:
        raise self._wrong(f"{word} is not a JSON number")


def _explained(text: str, error: json.JSONDecodeError, still_open: list[int]) -> str:
    """``line:column: message`` of what the standard library found, and how to mend it."""
    at, expected = error.pos, _EXPECTED.get(error.msg)
    found, rest = text[at : at + 1], text[at:]
    before = text[:at].rstrip(_SPACE)
    word = _WORD.match(rest)
    key = re.search(r'"[^"\n]*"$', before)
    if error.msg == "Expecting ':' delimiter" and key:
        expected = f"':' after the key {key[0]}"
    if expected is None:
        said = _SAID.get(error.msg, error.msg)
        if error.msg.startswith("Invalid control character"):
            said = f"the control character {_shown(found)} in a text; escape it, or close the text"
    elif before.endswith(",") and (found in ("}", "]") or not found):
        at, said = len(before) - 1, "a comma with nothing after it; remove it"
    elif not found:
        said = f"the file ends here; expected {expected}"
        if still_open:
            opened = still_open[-1]
            said += f": the {text[opened]!r} of {_place(text, opened)} is not closed"
    elif error.msg == "Extra data" and found in ("}", "]"):
        said = f"{found!r} closes nothing: there is one more of it than was opened"
    elif before[-1:].isdigit() and at == len(before) and (word or found in "0123456789._"):
        said = "not a JSON number (decimal, no leading zeros, no units)"
    elif word and error.msg.startswith("Expecting property"):
        said = f'the key {word[0]} must be in double quotes: "{word[0]}"'
    elif word and word[0] in _MISTAKEN_WORDS:
        said = f"{word[0]} is not JSON; write {_MISTAKEN_WORDS[word[0]]}"
    elif word and error.msg == "Expecting value":
        said = f'{word[0]} is not a JSON value; a text must be in double quotes: "{word[0]}"'
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
        said = f"expected {expected}, found {_shown(found)}{cure}"
    return f"{_place(text, at)}: {said}"


_EXPECTED = {
    "Expecting property name enclosed in double quotes": "a key in double quotes or '}'",
    "Illegal trailing comma before end of object": "a key in double quotes",
    "Illegal trailing comma before end of array": "a value",
    "Expecting ':' delimiter": "':' between a key and its value",
    "Expecting ',' delimiter": "',' or the closing bracket",
    "Expecting value": "a value",
    "Extra data": "the end of the file",
}
_SAID = {
    "Unterminated string starting at": "this text is not closed by '\"'",
    "Invalid \\escape": r"no JSON escape; a backslash itself is written '\\'",
    "Invalid \\uXXXX escape": r"'\u' must be followed by four hexadecimal digits",
}


def _shown(char: str) -> str:
    """A character for an error message; those that are easily mistaken by their names."""
    if char.isascii() and char.isprintable():
        return repr(char)
    name = unicodedata.name(char, "")
    shown = f"{char!r} " if char.isprintable() else ""
    return f"{shown}(U+{ord(char):04X}{' ' + name if name else ''})"
