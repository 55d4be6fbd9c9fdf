"""Reads hand-written JSON files strictly; errors name line, column, cause and cure.

The standard library says whether a text is JSON; ``_offsets_of`` then notes where each value
stands, so that a wrong *value* can be pointed at too, and refuses what a configuration must not
have (NaN, repeated keys, unlimited nesting). ``explained`` recognises common mistakes in pasted
configuration: full-width punctuation, missing colons and braces, comments, trailing commas.
"""

from __future__ import annotations

import codecs
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrecall.errors import ConfigError
from kvrecall.secret import is_secret

JsonPath = tuple[str | int, ...]

MAX_BYTES = 4 << 20
MAX_DEPTH = 64
_MAX_DIGITS = 20
SPACE = " \t\r\n"

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s"\[\]{},:]+')
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|([\[{])|([\]}])')
FRAGMENT = re.compile(r'"(?:[^"\\]|\\.)*"\s*[:：]')
_CHARACTER = re.compile(r"\\u[dD][89abAB]..\\u....|\\u....|\\.|.", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
WORD = re.compile(r"[A-Za-z_][\w.-]{0,79}")
MISTAKEN_WORDS = {"True": "true", "False": "false", "None": "null", "TRUE": "true"}
MISTAKEN_WORDS |= {"FALSE": "false", "NULL": "null", "undefined": "null"}
FULL_WIDTH = {"：": ":", "，": ",", "｛": "{", "｝": "}", "［": "[", "］": "]", "、": ","}
QUOTES = "“”„‟〝〞＂'"


@dataclass(frozen=True, slots=True)
class Document:
    """A JSON value and where each of its parts stood. Paths are keys and indices from the root."""

    source: str
    value: object
    _text: str
    _offsets: dict[JsonPath, int]
    _origin: Origin

    def where(self, path: JsonPath) -> str:
        """``file:line:column`` of the key or list item at ``path``, or of its nearest parent."""
        while path and path not in self._offsets:
            path = path[:-1]
        return f"{self.source}:{self._origin.place(self._offsets.get(path, 0))}"

    def moved(self, key: str, home: JsonPath) -> Document:
        """The places in a document whose part at the top-level ``key`` is now below ``home``."""
        places = {(*home, *p) if p[:1] == (key,) else p: at for p, at in self._offsets.items()}
        return replace(self, _offsets=places)

    @property
    def paths(self) -> tuple[JsonPath, ...]:
        """The paths of all keys and list items, and of the root."""
        return tuple(self._offsets)

    def opened(self, path: JsonPath, name: str) -> Document:
        """Puts the JSON of the string at ``path`` in place of the string, if there is one that is
        not empty; its parts stand where they stand in the string. Raises ConfigError, which calls
        the field ``name``, if the string holds no JSON."""
        parent: Any = self.value
        for key in path[:-1]:
            parent = parent[key]
        text = parent[path[-1]]
        if not isinstance(text, str) or not text:
            return self
        key_end = STRING.match(self._text, self._offsets[path]).end()  # type: ignore[union-attr]
        gap = re.compile(rf"[{SPACE}]*:[{SPACE}]*").match(self._text, key_end)
        begin = gap.end() if gap else self._offsets[path]  # of a list's item it has no key
        end = STRING.match(self._text, begin).end() - 1  # type: ignore[union-attr]
        characters = [c.start() for c in _CHARACTER.finditer(self._text, begin + 1, end)]
        spots = [*characters, end]
        origin = Origin("string", self._origin.file, [self._origin.offsets[at] for at in spots])
        try:
            parent[path[-1]], offsets = _parsed(text, origin)
        except json.JSONDecodeError as error:
            place, message = explained(error, origin)
            where = f"{self.source}:{place}"
            raise ConfigError(f"{where}: {name} is JSON in a string: {message}") from error
        for part, at in offsets.items():
            self._offsets.setdefault((*path, *part), spots[at])
        return self


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the characters of a text stand in a file: ``offsets``, and one more for its end.
    ``whole``: what the text is, in words."""

    whole: str
    file: str
    offsets: Sequence[int]

    def place(self, at: int) -> str:
        """``line:column`` of a character, both counted from 1, the column in characters."""
        return _place(self.file, self.offsets[min(at, len(self.offsets) - 1)])


def read_json(path: Path) -> Document:
    """Reads a JSON file. Raises ConfigError with file, line, column, cause and cure."""
    return parse_json(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a file that should hold JSON. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        if isinstance(error, IsADirectoryError):
            why = "is a folder; it must be a JSON file"
        elif isinstance(error, FileNotFoundError):
            why = "there is no such file"
        raise ConfigError(f"{path}: {why}") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_BYTES >> 20} MiB, the limit")
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{path}:1:1: is UTF-16; save the file as UTF-8")
    raw = raw.removeprefix(codecs.BOM_UTF8)  # of editors on Windows; MindIE reads over it, too
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode()
        raise ConfigError(
            f"{path}:{_place(before, len(before))}: byte 0x{raw[error.start]:02x} is not UTF-8; "
            "save the file as UTF-8"
        ) from error


def parse_json(text: str, source: str, origin: Origin | None = None) -> Document:
    """Parses JSON text; ``source`` names it in errors. ``origin``: where its characters stand, if
    it is not the whole file. Raises ConfigError."""
    if not text.strip(SPACE):
        raise ConfigError(f"{source}: is empty; it must hold a JSON object {{ ... }}")
    origin = origin or Origin("file", text, range(len(text) + 1))
    try:
        value, offsets = _parsed(text, origin)
    except json.JSONDecodeError as error:
        place, message = explained(error, origin)
        raise ConfigError(f"{source}:{place}: {message}") from error
    return Document(source, value, text, offsets, origin)


def _parsed(text: str, origin: Origin) -> tuple[object, dict[JsonPath, int]]:
    """The value of a JSON text, and where its parts begin in it. Raises JSONDecodeError."""
    start = len(text) - len(text.lstrip(SPACE))
    if FRAGMENT.match(text, start):
        missing = "the outer braces are missing: put the whole text between { and }"
        raise json.JSONDecodeError(missing, text, start)
    check_grammar(text)
    offsets = _offsets_of(text, origin)
    return json.loads(text), offsets


def check_grammar(text: str) -> None:
    """Raises JSONDecodeError unless the standard library takes the text for JSON."""
    open_at(text, len(text))
    _GRAMMAR.decode(text)


def open_at(text: str, end: int) -> list[int]:
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
    given = {**settings, **options}
    return given, lambda key: option_of(key) if key in options else document.where((key,))


def _place(text: str, offset: int) -> str:
    """``line:column``, both counted from 1, the column in characters."""
    return f"{text.count(chr(10), 0, offset) + 1}:{offset - text.rfind(chr(10), 0, offset)}"


def _offsets_of(text: str, origin: Origin) -> dict[JsonPath, int]:
    """Where the values of a text begin that is JSON, those with a key at the key. Raises
    JSONDecodeError for what is refused."""
    offsets: dict[JsonPath, int] = {}
    path: JsonPath = ()  # of the next value, if its key is known
    is_key = False  # whether a text that comes now is one
    for token in _TOKEN.finditer(text):
        word, at = token[0], token.start()
        if word in ("{", "["):
            offsets.setdefault(path, at)
            path = (*path, "" if word == "{" else 0)
            is_key = word == "{"
        elif word in ("}", "]"):
            path, is_key = path[:-1], False
        elif word == ",":
            last = path[-1]
            is_key = isinstance(last, str)
            path = path if isinstance(last, str) else (*path[:-1], last + 1)
        elif is_key:
            path, is_key = (*path[:-1], json.loads(word)), False
            if path in offsets:
                first = origin.place(offsets[path])
                message = f"the key {path[-1]!r:.80} is repeated (first at {first})"
                raise json.JSONDecodeError(message, text, at)
            offsets[path] = at
        elif word != ":":
            offsets.setdefault(path, at)
            if refused := _refusal(word):
                raise json.JSONDecodeError(refused, text, at)
    return offsets


def _refusal(word: str) -> str:
    """Why a text or a number of JSON is refused; "" if it is not."""
    if word.startswith('"'):
        return "half of a surrogate pair" if _SURROGATE.search(json.loads(word)) else ""
    if word.endswith(("NaN", "Infinity")):
        return f"{word} is not a JSON number"
    if word.lstrip("-").isdecimal() and len(word) > _MAX_DIGITS:
        return f"a number of more than {_MAX_DIGITS - 1} digits"
    is_number = word not in ("true", "false", "null")
    return "a number too large" if is_number and math.isinf(float(word)) else ""


_GRAMMAR = json.JSONDecoder(parse_int=len, parse_float=len)  # numbers are ``_refusal``'s


def explained(error: json.JSONDecodeError, origin: Origin) -> tuple[str, str]:
    """An error of the standard library: ``line:column``, the cause and the cure."""
    text, at, expected = error.doc, error.pos, _EXPECTED.get(error.msg)
    found, rest = text[at : at + 1], text[at:]
    before = text[:at].rstrip(SPACE)
    word = WORD.match(rest)
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
        if still_open := open_at(text, at):
            opened = still_open[-1]
            message += f": the {text[opened]!r} of {origin.place(opened)} is not closed"
    elif error.msg == "Extra data" and found in ("}", "]"):
        message = f"{found!r} has no opening bracket"
    elif before[-1:].isdigit() and at == len(before) and (word or found in "0123456789._"):
        message = "not a JSON number (decimal, no leading zeros, no units)"
    elif word and error.msg.startswith("Expecting property"):
        message = f'the key {word[0]} must be in double quotes: "{word[0]}"'
    elif word and word[0] in MISTAKEN_WORDS:
        message = f"{word[0]} is not JSON; write {MISTAKEN_WORDS[word[0]]}"
    elif word and error.msg == "Expecting value":
        label = re.search(r'"([^"\n]*)"\s*:$', before)
        shown = "***" if label and is_secret(label[1]) else word[0]
        message = f'{shown} is not a JSON value; a text must be in double quotes: "{shown}"'
    else:
        cure = ""
        if found in FULL_WIDTH:
            cure = f"; write the ASCII {FULL_WIDTH[found]!r}"
        elif found in QUOTES:
            cure = "; write '\"'"
        elif rest.startswith(("#", "//", "/*", "`")):
            cure = "; JSON has no comments and no fences, remove it"
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
