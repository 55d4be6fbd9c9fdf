"""Bodies of requests and replies, read only as far as routing needs it.

A field stays the bytes that the client sent until it is asked for: no objects are built of what is
passed on, and 40 MB are taken apart in some 20 ms. Large ones are read in one thread, aside from
the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from kvrecall.server.replies import ReplyError

T = TypeVar("T")

MOST_PROMPT = 8 << 20
"""Bytes of JSON up to which a prompt's tokens are read; longer ones go by guess."""

_AT_ONCE = 256 << 10  # bytes that are read in some milliseconds, whatever they say
_MOST_FIELD = 64 << 10  # bytes of JSON of any other field that is read
_MOST_FIELDS = 1024  # of a body that is kept: each takes a hundred bytes, however short it is
_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_MARK = secrets.token_hex(8).encode() + b"%d_"
_MARKS = re.compile(_MARK.replace(b"%d", rb"(\d+)"))
_BACKSLASH = ord("\\")
_LONG = 4096  # bytes of text that are worth leaving out
_LOOKS = 32  # for one, before others are short as well
_BAD = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)
_thread = ThreadPoolExecutor(1, thread_name_prefix="kvrecall-bodies")


async def aside(nbytes: int, function: Callable[..., T], *arguments: object) -> T:
    """``function(*arguments)``, in the one thread that reads bodies if it has many bytes to read: a
    busy loop and a thread that wait for each other's turn cost more than a small body."""
    if nbytes <= _AT_ONCE:
        return function(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_thread, function, *arguments)


def fields_of(content: bytes | Raw) -> dict[str, Raw]:
    """The fields of a JSON object, each as its bytes; empty if it is none."""
    try:
        return _FIELDS.decode(content)
    except _BAD:
        return {}


def _split(content: bytes) -> dict[str, Raw]:
    """The fields of a JSON object. Raises msgspec's errors.

    A search for the end of a text takes a tenth of what parsing it takes, so where few texts are
    most of a body, as documents and images are, what lies between two quotes, up to a backslash
    before the second, is not parsed: engines do that. If it was no text, or its end another one,
    what is parsed is no JSON.
    """
    left_out: list[tuple[int, int]] = []
    kept: list[bytes] = []
    size = done = 0
    quote = content.find(b'"')
    for looked in range(4 * len(content) // _LONG):
        begin, quote = quote + 1, content.find(b'"', quote + 1)
        if quote < 0 or (looked > _LOOKS and 2 * size < quote):
            break
        end = quote - (content[quote - 1] == _BACKSLASH)
        if end - begin > _LONG:
            kept += (content[done:begin], _MARK % len(left_out))
            left_out.append((begin, end))
            done, size = end, size + end - begin
    if 2 * size > len(content):
        with contextlib.suppress(*_BAD, IndexError):  # which would tell of another place
            fields = _FIELDS.decode(b"".join((*kept, content[done:])))
            found = 0
            for name, raw in fields.items():
                value = memoryview(raw)
                if marks := list(_MARKS.finditer(value)):
                    begin = left_out[int(marks[0][1])][0] - marks[0].start()
                    end = left_out[int(marks[-1][1])][1] + len(value) - marks[-1].end()
                    fields[name] = Raw(memoryview(content)[begin:end])
                    found += len(marks)
            if found == len(left_out):  # none was in a name
                return fields
    return _FIELDS.decode(content)


def value_of(raw: Raw | None, kind: Any = Any) -> Any:
    """A small value of the type ``kind``; None if it is absent, another one, or larger than
    64 KiB."""
    if raw is None or len(memoryview(raw)) > _MOST_FIELD:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except _BAD:
        return None


def begin_of(raw: memoryview, count: int = 1) -> bytes:
    """The first bytes of a value: ``[`` of a list, ``"`` of a text."""
    return bytes(raw[:count])


class Body:
    """The body of an OpenAI request, ``nbytes`` long when it arrived. Immutable."""

    def __init__(
        self, fields: Mapping[str, Any], content: bytes | None = None, nbytes: int = 0
    ) -> None:
        """``fields``: values that can be written as JSON. ``content``: the same as it arrived."""
        self.fields = fields
        self._content = content
        self.nbytes = nbytes

    @classmethod
    def read(cls, content: bytes) -> Body:
        """Raises ReplyError if it is not a JSON object."""
        try:
            fields = _split(content)
        except msgspec.ValidationError:
            raise ReplyError(400, "the body must be a JSON object") from None
        except _BAD as error:
            raise ReplyError(400, f"the body is not JSON: {error}") from None
        if len(fields) > _MOST_FIELDS:
            raise ReplyError(400, f"the body has more than {_MOST_FIELDS} fields")
        return cls(fields, content, len(content))

    def raw(self, name: str) -> memoryview:
        """The JSON of a field; empty if it is absent or null."""
        value = self.fields.get(name)
        if value is None:
            return memoryview(b"")
        found = memoryview(value if isinstance(value, Raw) else msgspec.json.encode(value))
        return found if begin_of(found, 4) != b"null" else found[:0]

    def get(self, name: str) -> Any:
        """The value of a small field, None if it is absent or null. Raises ReplyError if it is
        larger than 64 KiB or not readable."""
        raw = self.raw(name)
        if len(raw) > _MOST_FIELD:
            raise ReplyError(400, f"{name} is larger than {_MOST_FIELD} bytes")
        try:
            return msgspec.json.decode(raw) if raw else None
        except _BAD as error:
            raise ReplyError(400, f"{name} is not readable as JSON: {error}") from None

    def but(self, **changed: Any) -> Body:
        """This body with other fields."""
        return Body({**self.fields, **changed}, nbytes=self.nbytes)

    def encoded(self) -> bytes:
        """As an instance is sent it: the client's own bytes where nothing has changed."""
        return self._content if self._content is not None else msgspec.json.encode(self.fields)
