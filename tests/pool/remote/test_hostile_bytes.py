"""Values that a store gives back, and what Mooncake's client says: anything."""

from __future__ import annotations

import socket

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.hostile import fuzz, hostile, outcome
from support.stores import MemoryStore

from kvrecall.pool.cipher import Cipher
from kvrecall.pool.remote.mooncake.client_process import _LENGTH, ClientReply
from kvrecall.pool.remote.mooncake.store import Client, ClientLost
from kvrecall.pool.remote.staged import StagedStore
from kvrecall.pool.remote.store import Object
from kvrecall.pool.remote.tier import HEADER_BYTES, header_of, verified
from kvrecall.pool.tier import checksum_of
from kvrecall.testing import chain, content
from kvrecall.testing.tier_contract import NAMESPACE

KEY, OTHER = chain(NAMESPACE, 2)
DATA = content(KEY, 2000)


def object_of(key: bytes, data: bytes) -> bytes:
    """With a right checksum, as anybody can compute it."""
    checksum = checksum_of(key, memoryview(bytearray(data)))
    return bytes(header_of(key, len(data), checksum)) + data


@fuzz(200)
@given(hostile(object_of(KEY, DATA), object_of(OTHER, DATA), object_of(KEY, DATA[1:])))
@example(object_of(OTHER, DATA))
@example(object_of(KEY, DATA[:1000]) + DATA[1000:])
def test_a_value_is_the_key_s_own_or_none(value: bytes) -> None:
    header, data = bytearray(value[:HEADER_BYTES]), memoryview(bytearray(value[HEADER_BYTES:]))
    found = outcome(lambda _: verified(KEY, header, data), value)
    assert found is None or value == object_of(KEY, bytes(data))


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("secret", [None, bytes(range(32))], ids=["plain", "encrypted"])
@fuzz(60)
@given(data=st.data())
def test_what_passes_a_stage_is_what_was_put_if_it_is_encrypted(
    compression: str, secret: bytes | None, data: st.DataObject
) -> None:
    inner, cipher = MemoryStore(), secret and Cipher((secret,))
    staged = StagedStore(inner, cipher or None, compression, section_bytes=1 << 20)  # type: ignore[arg-type]
    plain = [memoryview(bytearray(64)), memoryview(bytearray(DATA[:500] * 131))]
    try:
        staged.put([Object("a", tuple(plain)), Object("b", tuple(reversed(plain)))])
        values = list(inner.values.items())
        name, value = data.draw(st.sampled_from(values))
        inner.values[name] = changed = data.draw(hostile(*(other for _, other in values), value))
        parts = tuple(memoryview(bytearray(len(part))) for part in plain)
        [right] = staged.get([Object("a", parts)])
        if right and (secret or changed == value):
            assert list(parts) == plain
    finally:
        staged.close()


@fuzz(100)
@given(hostile(_LENGTH.pack(5) + b"\x92\x91\0\xa0"))
@example(_LENGTH.pack(1) + b"\xc1")
@example(_LENGTH.pack(3000) + b"\x91" * 3000)
def test_a_client_that_talks_nonsense_is_lost(said: bytes) -> None:
    here, there = socket.socketpair()
    client = object.__new__(Client)
    ended: list[bool] = []
    client._kill = lambda: ended.append(True)  # type: ignore[method-assign]
    client._last_words = lambda: ""  # type: ignore[method-assign]
    with here, there:
        there.sendall(said)
        there.shutdown(socket.SHUT_WR)
        read = outcome(lambda _: client._receive(here, 1.0), said, ClientLost, beside=17 << 20)
    assert isinstance(read, ClientReply) != bool(ended)
