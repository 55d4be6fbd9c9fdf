"""Bytes that the pool reads, of frames, key files and clients: right checksums around anything."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.hostile import fuzz, hostile, outcome, spoiled

from kvrecall.errors import ConfigError
from kvrecall.pool import compression
from kvrecall.pool.cipher import KEY_BYTES, TAG_BYTES, Cipher, read_keys
from kvrecall.pool.clock import Clock
from kvrecall.pool.compression import CODECS, FRAME_BYTES, Compressor, unpack
from kvrecall.pool.disk.codec import BlockCodec
from kvrecall.pool.hints import MAX_SECONDS, Hint, hint_of
from kvrecall.pool.tier import checksum_of
from kvrecall.testing import chain, namespace

PLAIN = 4096
KEY = chain(namespace(), 1)[0]
FLOATS = b"".join(struct.pack("<f", 1 + at / 999)[2:] for at in range(PLAIN // 2))
BLOSC = struct.pack("<BBBBIIIII", 2, 1, 0x21, 2, PLAIN, 256, 0x7FFFFFFF, *[0x70000000] * 2)
BEHIND, AROUND = b"\xa5\x3c", b"\x5a"


def framed(codec: int, width: int, body: bytes) -> bytes:
    """With a right checksum, as anybody can compute it."""
    checksum = compression._checksum(memoryview(body), codec, width, PLAIN)
    header = (compression._MAGIC, codec, width, PLAIN, len(body), checksum)
    return compression._FRAME.pack(*header) + body


def bodies() -> list[bytes]:
    """What each codec makes of numbers, and of what it shrinks most."""
    made = []
    for name in CODECS:
        for data in (FLOATS, bytes(PLAIN)):
            room = memoryview(bytearray(PLAIN + FRAME_BYTES))
            made.append(bytes(room[: Compressor(name).pack(memoryview(data), room)])[FRAME_BYTES:])
    return made


@fuzz(600)
@given(
    st.sampled_from([2, 3, 2, 3, 0, 1, 4, 255]),
    st.sampled_from([1, 2, 4, 2, 0, 3, 255]),
    spoiled(*bodies(), BLOSC),
)
@example(2, 2, BLOSC)
@example(3, 1, b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8 + bytes(9))
def test_a_frame_holds_its_own_bytes_and_fills_the_block_s(
    codec: int, width: int, body: bytes
) -> None:
    """No byte from behind it becomes the block's, none around the block is changed, and no size
    that it states is believed."""
    frame = framed(codec, width, body)
    room = memoryview(bytearray(frame + BEHIND * 5000))
    into = memoryview(bytearray(AROUND * (PLAIN + 128)))
    right = outcome(lambda _: unpack(room[: len(frame)], into[64 : 64 + PLAIN]), frame)
    assert into[:64] == into[64 + PLAIN :] == AROUND * 64
    assert not (right and BEHIND * 9 in bytes(into))
    slot = memoryview(bytearray(PLAIN))
    if len(frame) < PLAIN:
        data = memoryview(bytearray(frame))
        tag = checksum_of(KEY, data)
        plain = BlockCodec()
        assert plain.decode(KEY, len(frame), tag, data, slot, PLAIN) is right
        assert not right or slot == into[64 : 64 + PLAIN]
        secret = BlockCodec(Cipher((bytes(range(32)),)))
        for forged in (tag, secret._cipher._first + tag[: TAG_BYTES - 4], tag * 4):
            assert not secret.decode(KEY, len(frame), forged, data, slot, PLAIN)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    path.touch(0o600)
    return path


SECRET = bytes(range(50, 82))


@fuzz(200)
@given(hostile(SECRET.hex().encode() + b"\n# a comment\n", SECRET))
def test_a_key_file_holds_keys_or_is_refused(key_file: Path, content: bytes) -> None:
    key_file.write_bytes(content)
    keys = outcome(lambda _: read_keys(key_file), content, ConfigError)
    if isinstance(keys, tuple):
        assert {len(key) for key in keys} == {KEY_BYTES}
    else:
        assert SECRET.hex()[:20] not in str(keys)


CLOCK = Clock()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
)


@fuzz(200)
@given(hostile(CLOCK.note().encode(), b'["", 1e400, -1e400]'))
@example(b'["", NaN, NaN]')
def test_a_note_is_of_a_time_past_or_none(note: bytes) -> None:
    since = outcome(lambda _: CLOCK.since(note.decode("latin-1")), note, ValueError)
    assert isinstance(since, ValueError) or since >= 0


@fuzz(100)
@given(JSON | st.dictionaries(st.sampled_from(Hint._fields), JSON, max_size=3))
def test_a_hint_is_one_or_refused(given_hint: Any) -> None:
    text = json.dumps(given_hint).encode()
    read = outcome(lambda _: hint_of(given_hint), text, ValueError)
    if isinstance(read, Hint):
        assert read.returns in (None, True, False)
        assert all(one is None or 0 <= one <= MAX_SECONDS for one in read[1:])
    else:
        assert len(str(read)) < 300
