"""The protocol between service and clients: MessagePack in length-prefixed frames.

A frame is a little-endian 32-bit length and that many bytes: one message, an array whose first
element is its tag. KV bytes never travel here; they stay in the arena, which both sides map.

A client sends ``Hello`` first, and the service answers ``Welcome`` or ``Rejection``. Each request
with a ``number`` gets a reply of the same number, in any order; all others have no reply. The
service processes the requests of a connection in order.

Every message is checked while it is decoded, so a handler receives values of the right type and
within bounds. Nothing here can name a Python object (no pickle).
"""

from __future__ import annotations

import enum
import math
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from kvrecall.block import FORMAT_VERSION, NAMESPACE_BYTES, SHARED, BlockKey, Tenant, TierName
from kvrecall.errors import KvrecallError
from kvrecall.pool import hints
from kvrecall.pool.base import Absence, ArenaHandle, PoolStats, Verdict, check_parents

E = TypeVar("E", bound=enum.Enum | None)
M = TypeVar("M")

PROTOCOL = 100 * FORMAT_VERSION + 15
"""Both sides must use the same version. It includes the format of blocks."""

MAX_FRAME = 8 << 20
MAX_BATCH = 1 << 20  # of KV events
MAX_KEYS = 60_000
"""Keys in one message; a chain of that many blocks of 16 tokens is about a million tokens."""
MAX_SECONDS = 86_400.0
MAX_FLUSH_S = 600.0

_LENGTH = struct.Struct("<I")


class ProtocolError(KvrecallError):
    """The other side sent something that is not a message of this protocol."""


class _Codes(Generic[E]):
    """Members of an enumeration (or None) as bytes, one each."""

    def __init__(self, members: Iterable[E]) -> None:
        self._members = tuple(members)
        self._codes = {member: code for code, member in enumerate(self._members)}

    def pack(self, members: Iterable[E]) -> bytes:
        return bytes(map(self._codes.__getitem__, members))

    def unpack(self, data: bytes) -> tuple[E, ...]:
        return tuple(map(self._members.__getitem__, data))

    def are_in(self, data: bytes) -> bool:
        """Whether ``unpack`` takes them."""
        return max(data, default=0) < len(self._members)


PLACES: _Codes[TierName | None] = _Codes((*TierName, None))
VERDICTS = _Codes(Verdict)

Key = Annotated[BlockKey, Meta(min_length=NAMESPACE_BYTES + 1, max_length=96)]
Keys = Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)]
Parents = Annotated[tuple[Key | None, ...], Meta(max_length=MAX_KEYS)]
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]
Digest = Annotated[bytes, Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Text = Annotated[str, Meta(max_length=4096)]
Part = Annotated[str, Meta(max_length=1 << 20)]
Parts = Annotated[tuple[tuple[Part, Part], ...], Meta(max_length=256)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
HintSeconds = Annotated[float, Meta(ge=0, le=hints.MAX_SECONDS)]
SomeHint = tuple[bool | None, HintSeconds | None, HintSeconds | None]
"""A ``Hint``."""
TenantName = Annotated[Tenant, Meta(pattern="^(-|[0-9a-f]{16})$", max_length=16)]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""


# -- requests ---------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=1):
    """``boot``, ``seat``: of the arena that this client was given before, if any."""

    protocol: int
    version: Text  # of kvrecall, for people
    boot: Text = ""
    seat: Number = 0


class Register(Message, frozen=True, tag=2):
    number: Number
    digest: Digest
    parts: Parts
    block_bytes: Annotated[int, Meta(ge=-(1 << 62), lt=1 << 62)]


class Find(Message, frozen=True, tag=3):
    number: Number
    keys: Keys


class Acquire(Message, frozen=True, tag=4):
    """The client chooses ``ticket``; it is unique on its connection. ``parents`` as in
    ``Reserve``."""

    ticket: Number
    keys: Keys
    deadline_s: Seconds
    parent: Key | None
    tenant: TenantName
    parents: Parents | None = None


class Poll(Message, frozen=True, tag=5):
    number: Number
    ticket: Number


class Release(Message, frozen=True, tag=6):
    ticket: Number


class Reserve(Message, frozen=True, tag=7):
    """``parents``: one for each key, or None for a chain below ``parent``."""

    number: Number
    keys: Keys
    parent: Key | None
    tenant: TenantName
    parents: Parents | None = None


class Commit(Message, frozen=True, tag=8):
    keys: Keys


class Abandon(Message, frozen=True, tag=9):
    keys: Keys


class Cancel(Message, frozen=True, tag=10):
    """Abandons all slots that ``Reserve`` ``number`` returned: its reply came too late to be
    used."""

    number: Number


class Touch(Message, frozen=True, tag=11):
    keys: Keys
    hanging: Keys = ()
    ending: Keys = ()
    hint: SomeHint | None = None
    tenant: TenantName = SHARED


class Flush(Message, frozen=True, tag=12):
    number: Number
    keys: Keys
    deadline_s: Annotated[float, Meta(ge=0, le=MAX_FLUSH_S)]


class Clear(Message, frozen=True, tag=13):
    """Drops the blocks of all namespaces this connection has registered."""

    number: Number


class Stats(Message, frozen=True, tag=14):
    number: Number


class Settle(Message, frozen=True, tag=15):
    """No copy of the lost connection ``token`` is in flight any more."""

    token: Token


class Bye(Message, frozen=True, tag=16):
    """No copy of this connection is in flight any more; it ends."""

    number: Number


class Locate(Message, frozen=True, tag=17):
    number: Number
    keys: Keys


class Why(Message, frozen=True, tag=18):
    number: Number
    key: Key


class Describe(Message, frozen=True, tag=19):
    """A batch of KV events that an engine has published."""

    batch: Annotated[bytes, Meta(max_length=MAX_BATCH)]


class Retire(Message, frozen=True, tag=20):
    """This client has other weights than those of these namespaces."""

    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_KEYS)]


class Administer(Message, frozen=True, tag=32):
    """``fields``: of the command of that name, see ``admin``. Answered by any number of
    ``Progress`` and one ``Administered``."""

    number: Number
    command: Text
    fields: Annotated[bytes, Meta(max_length=1 << 20)]


Request = (
    Register | Find | Locate | Why | Acquire | Poll | Release | Reserve | Commit | Abandon | Cancel
    | Touch | Flush | Clear | Stats | Settle | Bye | Describe | Retire
    | Administer
)  # fmt: skip


# -- replies ----------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag=64):
    """``token``: this connection, a secret of its two ends."""

    protocol: int
    version: Text
    token: Token
    arena: ArenaHandle


class Rejection(Message, frozen=True, tag=65):
    """The connection ends, for this reason."""

    reason: Text


class Acknowledged(Message, frozen=True, tag=66):
    number: Number


class Trouble(Message, frozen=True, tag=67):
    """The request asks for what cannot be. ``text`` is for people."""

    number: Number
    text: Part


class PlacesReply(Message, frozen=True, tag=68):
    """Of ``Find``, each key's until the first one that is nowhere, and of ``Locate``, one for each
    key."""

    number: Number
    places: bytes
    pending: bool


class RecallReply(Message, frozen=True, tag=69):
    number: Number
    ready: bool
    offsets: tuple[int, ...]
    places: bytes


class ReserveReply(Message, frozen=True, tag=70):
    """``offsets`` are those of the blocks with the verdict RESERVED, in order."""

    number: Number
    verdicts: bytes
    offsets: tuple[int, ...]


class Flushed(Message, frozen=True, tag=71):
    number: Number
    durable: bool


class StatsReply(Message, frozen=True, tag=72):
    number: Number
    stats: PoolStats


class WhyReply(Message, frozen=True, tag=74):
    number: Number
    absence: Absence


class Progress(Message, frozen=True, tag=76):
    """Of a command: what is done, and what there is to do."""

    number: Number
    done: int
    total: int


class Administered(Message, frozen=True, tag=77):
    """``result``: of the command, in MessagePack."""

    number: Number
    result: bytes


Reply = (
    Welcome | Rejection | Acknowledged | Trouble | PlacesReply | WhyReply | RecallReply
    | ReserveReply | Flushed | StatsReply | Progress | Administered
)  # fmt: skip

_ENCODER = msgspec.msgpack.Encoder()
_HELLO: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def frame_of(message: Message) -> bytes:
    """The frame of a message. ProtocolError if it is too large to be sent."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"a message of {len(body)} bytes is longer than {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def _decoded(decoder: msgspec.msgpack.Decoder[M], body: bytes, what: str) -> M:
    try:
        return decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no {what}: {error}") from error


def read_hello(body: bytes) -> Hello:
    """Raises ProtocolError. Longer forms of later versions are understood."""
    return _decoded(_HELLO, body, "greeting")


def read_request(body: bytes) -> Request:
    """Raises ProtocolError."""
    request = _decoded(_REQUEST, body, "request")
    if isinstance(request, Acquire | Flush) and math.isnan(request.deadline_s):
        raise ProtocolError("no request: the deadline is not a number")
    if isinstance(request, Touch) and any(map(math.isnan, filter(None, request.hint or ()))):
        raise ProtocolError("no request: a hint's time is not a number")
    if isinstance(request, Acquire | Reserve):
        try:
            check_parents(request.keys, request.parent, request.parents)
        except ValueError as error:
            raise ProtocolError(f"no request: {error}") from error
    return request


def read_reply(body: bytes) -> Reply:
    """Raises ProtocolError."""
    reply = _decoded(_REPLY, body, "reply")
    if isinstance(reply, PlacesReply | RecallReply) and not PLACES.are_in(reply.places):
        raise ProtocolError("no reply: an unknown tier")
    if isinstance(reply, ReserveReply) and not VERDICTS.are_in(reply.verdicts):
        raise ProtocolError("no reply: an unknown verdict")
    return reply


class Framer:
    """Cuts a stream of bytes into frames. Holds no more than has come in."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    @property
    def is_empty(self) -> bool:
        """Whether no frame is half received."""
        return not self._bytes

    def take(self, most: int = sys.maxsize) -> Iterator[bytes]:
        """At most so many frames that are complete. ProtocolError at a length that is not
        allowed."""
        at = 0
        buffer = self._bytes
        try:
            while most > 0 and len(buffer) - at >= _LENGTH.size:
                most -= 1
                (length,) = _LENGTH.unpack_from(buffer, at)
                if not 0 < length <= MAX_FRAME:
                    raise ProtocolError(f"a frame of {length} bytes is not allowed")
                begin = at + _LENGTH.size
                if len(buffer) < begin + length:
                    break
                at = begin + length
                yield bytes(buffer[begin:at])
        finally:
            del buffer[:at]
