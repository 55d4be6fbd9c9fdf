"""JSON files written by people: read strictly, with the line, column and cure of what is wrong.

The standard library's reader accepts what JSON does not (NaN, repeated keys, unlimited nesting)
and forgets where things were. This one keeps the place of every value, so that a wrong *value*
can be pointed at too, and knows the usual accidents of pasted configuration: full-width
punctuation, missing colons and braces, comments, trailing commas.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kvrecall.errors import ConfigError

JsonPath = tuple[str | int, ...]

MAX_BYTES = 4 << 20
MAX_DEPTH = 64

_SPACE = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_][\w.-]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_LITERALS = {"true": True, "false": False, "null": None}
_MISTAKEN_WORDS = {"True": "true", "False": "false", "None": "null", "TRUE": "true"}
_MISTAKEN_WORDS |= {"FALSE": "false", "NULL": "null", "undefined": "null"}
_FULL_WIDTH = {"：": ":", "，": ",", "｛": "{", "｝": "}", "［": "[", "］": "]", "、": ","}
_QUOTES = "“”„‟〝〞＂"
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
        return place(self.source, self._text, self._offsets.get(path, 0))


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
    return parse_json(_decoded(raw, str(path)), str(path))


def parse_json(text: str, source: str) -> Document:
    """Parses JSON text; ``source`` names it in errors. Raises ConfigError."""
    return _Parser(text, source).document()


def place(source: str, text: str, offset: int) -> str:
    """``source:line:column``, both counted from 1, the column in characters."""
    starts = [0, *(match.end() for match in re.finditer("\n", text))]
    line = bisect_right(starts, offset)
    return f"{source}:{line}:{offset - starts[line - 1] + 1}"


def _decoded(raw: bytes, source: str) -> str:
    for mark, name in _BOMS:
        if raw.startswith(mark):
            raise ConfigError(f"{source}:1:1: starts with {name}; save it as UTF-8 without one")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8")
        spot = place(source, before + "?", len(before))
        raise ConfigError(
            f"{spot}: byte 0x{raw[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from error


def _shown(char: str) -> str:
    """A character for an error message; those that are easily mistaken by their names."""
    if char.isascii() and char.isprintable():
        return repr(char)
    name = unicodedata.name(char, "")
    shown = f"{char!r} " if char.isprintable() else ""
    return f"{shown}(U+{ord(char):04X}{' ' + name if name else ''})"


class _Parser:
    """Recursive descent over one text. Depth is bounded, so the stack is too."""

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._at = 0
        self._offsets: dict[JsonPath, int] = {}
        self._open: list[tuple[str, int]] = []  # brackets not yet closed, with their offsets

    def document(self) -> Document:
        self._skip()
        if self._at == len(self._text):
            raise ConfigError(f"{self._source}: is empty; it must hold a JSON object {{ ... }}")
        if self._looks_like_fragment():
            self._fail_fragment()
        value = self._value(())
        self._skip()
        if self._at < len(self._text):
            self._fail_trailing()
        return Document(self._source, value, self._text, self._offsets)

    # Errors

    def _fail(self, message: str, offset: int | None = None) -> NoReturn:
        spot = place(self._source, self._text, self._at if offset is None else offset)
        raise ConfigError(f"{spot}: {message}")

    def _fail_unexpected(self, expected: str) -> NoReturn:
        """Says what stands at the current place instead of ``expected``, and how to mend it."""
        if self._at >= len(self._text):
            self._fail_end(expected)
        char = self._text[self._at]
        if char in _FULL_WIDTH:
            width = "full-width " if char != "、" else ""
            name = {":": "colon", ",": "comma"}.get(_FULL_WIDTH[char], "bracket")
            self._fail(
                f"expected {expected}, found the {width}{name} {_shown(char)}; "
                f"write the ASCII {_FULL_WIDTH[char]!r}"
            )
        if char in _QUOTES or char == "'":
            self._fail(f"expected {expected}, found the quote {_shown(char)}; write '\"'")
        if char == "#" or self._text.startswith(("//", "/*"), self._at):
            self._fail(f"expected {expected}, found a comment; JSON has none, remove it")
        self._fail(f"expected {expected}, found {_shown(char)}")

    def _fail_end(self, expected: str) -> NoReturn:
        if self._open:
            bracket, offset = self._open[-1]
            opened = place("", self._text, offset).removeprefix(":")
            closing = "}" if bracket == "{" else "]"
            self._fail(
                f"the file ends here; expected {expected}: the {bracket!r} of {opened} (line:"
                f"column) is not closed by {closing!r}"
            )
        self._fail(f"the file ends here; expected {expected}")

    def _looks_like_fragment(self) -> bool:
        return re.match(r'\s*"(?:[^"\\]|\\.)*"\s*[:：]', self._text[self._at :]) is not None

    def _fail_fragment(self) -> NoReturn:
        """The text is the inside of an object. Looks for a further error, to name both."""
        start = self._at
        hint = "the outer braces are missing: put the whole text between { and }"
        try:
            self._members((), start)
            self._skip()
        except ConfigError as error:
            spot, _, message = str(error).removeprefix(f"{self._source}:").partition(": ")
            self._fail(f"{hint}; and at {spot} (line:column): {message}", start)
        self._fail(hint, start)

    def _fail_trailing(self) -> NoReturn:
        char = self._text[self._at]
        if char in "}]":
            self._fail(f"{char!r} closes nothing: there is one more of it than was opened")
        self._fail_unexpected("the end of the file")

    # Values

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _value(self, path: JsonPath) -> object:
        self._skip()
        char = self._text[self._at : self._at + 1]
        self._offsets.setdefault(path, self._at)
        if char == "{":
            return self._enclosed("{", path)
        if char == "[":
            return self._enclosed("[", path)
        if char == '"':
            return self._string()
        if char and char in "-0123456789":
            return self._number()
        return self._literal()

    def _enclosed(self, bracket: str, path: JsonPath) -> object:
        if len(self._open) >= MAX_DEPTH:
            self._fail(f"nested more than {MAX_DEPTH} deep; no configuration needs that")
        start = self._at
        self._open.append((bracket, start))
        self._at += 1
        value = self._members(path, start) if bracket == "{" else self._items(path)
        self._open.pop()
        return value

    def _members(self, path: JsonPath, start: int) -> dict[str, object]:
        """The inside of an object and, unless it is a fragment (nothing open), its brace."""
        result: dict[str, object] = {}
        self._skip()
        if self._take("}"):
            return result
        while True:
            self._skip()
            key_at = self._at
            key = self._key()
            if key in result:
                first = place("", self._text, self._offsets[(*path, key)]).removeprefix(":")
                self._fail(f"the key {key!r} is there twice (first at {first})", key_at)
            self._offsets[(*path, key)] = key_at
            self._colon(key)
            result[key] = self._value((*path, key))
            self._skip()
            if not self._open and self._at == len(self._text):
                return result  # a fragment without its braces
            if self._take("}"):
                return result
            self._comma("}", key)

    def _items(self, path: JsonPath) -> list[object]:
        result: list[object] = []
        self._skip()
        if self._take("]"):
            return result
        while True:
            result.append(self._value((*path, len(result))))
            self._skip()
            if self._take("]"):
                return result
            self._comma("]", "")

    def _take(self, char: str) -> bool:
        if self._text.startswith(char, self._at):
            self._at += 1
            return True
        return False

    def _key(self) -> str:
        if not self._text.startswith('"', self._at):
            word = _WORD.match(self._text, self._at)
            if word is not None:
                self._fail(f'the key {word.group()} must be in double quotes: "{word.group()}"')
            self._fail_unexpected("a key in double quotes or '}'")
        return self._string()

    def _colon(self, key: str) -> None:
        self._skip()
        if self._take(":"):
            return
        if self._text[self._at : self._at + 1] in ('"', "{", "[", *"0123456789-"):
            self._fail(f"expected ':' between the key \"{key}\" and its value; write it")
        self._fail_unexpected(f"':' after the key \"{key}\"")

    def _comma(self, closing: str, key: str) -> None:
        """The comma before a further part; complains when none follows it."""
        comma = self._at
        if not self._take(","):
            after = f' after the value of "{key}"' if key else ""
            if self._text[self._at : self._at + 1] in ('"', "{", "["):
                self._fail(f"expected ',' or '{closing}'{after}; a comma is missing")
            self._fail_unexpected(f"',' or '{closing}'{after}")
        self._skip()
        if self._at == len(self._text) and not self._open:
            self._fail("the comma at the end has nothing after it; remove it", comma)
        if self._text.startswith(closing, self._at):
            self._fail(f"a comma before '{closing}' has nothing after it; remove it", comma)

    def _number(self) -> int | float:
        match = _NUMBER.match(self._text, self._at)
        if match is None:
            self._fail("expected digits after '-'")
        following = self._text[match.end() : match.end() + 1]
        if following.isalnum() or following in ("_", "."):
            self._fail("not a JSON number (decimal, no leading zeros, no units)")
        text = match.group()
        start, self._at = self._at, match.end()
        if match.group(2) is None and match.group(3) is None:
            if len(text) > 20:
                self._fail("a number of more than 19 digits", start)
            return int(text)
        number = float(text)
        if number in (float("inf"), float("-inf")):
            self._fail("a number too large", start)
        return number

    def _literal(self) -> object:
        match = _WORD.match(self._text, self._at)
        if match is None:
            self._fail_unexpected("a value")
        word = match.group()
        if word in _MISTAKEN_WORDS:
            self._fail(f"{word} is not JSON; write {_MISTAKEN_WORDS[word]}")
        if word in ("NaN", "Infinity"):
            self._fail(f"{word} is not a JSON number")
        if word not in _LITERALS:
            self._fail(f'{word} is not a JSON value; a text must be in double quotes: "{word}"')
        self._at = match.end()
        return _LITERALS[word]

    # Strings

    def _string(self) -> str:
        start = self._at
        self._at += 1
        parts: list[str] = []
        while True:
            match = _PLAIN.match(self._text, self._at)
            assert match is not None
            parts.append(match.group())
            self._at = match.end()
            char = self._text[self._at : self._at + 1]
            if char == '"':
                self._at += 1
                return "".join(parts)
            if char == "\\":
                parts.append(self._escape())
            elif char in ("", "\n", "\r"):
                self._fail("this text is not closed by '\"' on its line", start)
            else:
                self._fail(f"the control character {_shown(char)} in a text must be escaped")

    def _escape(self) -> str:
        char = self._text[self._at + 1 : self._at + 2]
        if char in _ESCAPES and char:
            self._at += 2
            return _ESCAPES[char]
        if char != "u":
            self._fail(f"'\\{char}' is no JSON escape; a backslash itself is written '\\\\'")
        unit = self._unit()
        if 0xD800 <= unit < 0xDC00 and self._text.startswith("\\u", self._at):
            low = self._unit()
            if 0xDC00 <= low < 0xE000:
                return chr(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00))
            self._fail("half of a surrogate pair", self._at - 6)
        if 0xD800 <= unit < 0xE000:
            self._fail("half of a surrogate pair", self._at - 6)
        return chr(unit)

    def _unit(self) -> int:
        digits = self._text[self._at + 2 : self._at + 6]
        if re.fullmatch(r"[0-9A-Fa-f]{4}", digits) is None:
            self._fail("'\\u' must be followed by four hexadecimal digits")
        self._at += 6
        return int(digits, 16)
