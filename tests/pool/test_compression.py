"""Frames of compressed values: exact, damaged, incompressible; and what `auto` chooses."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvrecall.pool import compression
from kvrecall.pool.compression import (
    CODECS,
    FRAME_BYTES,
    Codec,
    Compressor,
    unpack,
)

MIB = 1 << 20
E4M3 = torch.float8_e4m3fn


def kv(nbytes: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> memoryview:
    """Numbers like those of a layer: of similar size, with random signs and mantissas."""
    count = nbytes // dtype.itemsize
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return memoryview(numbers.view(torch.uint8).numpy())


def noise(nbytes: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(nbytes)))


def framed(compressor: Compressor, data: memoryview) -> memoryview:
    room = memoryview(bytearray(data.nbytes + FRAME_BYTES))
    return room[: compressor.pack(data, room)]


def restored(frame: memoryview, nbytes: int) -> bytes | None:
    into = memoryview(bytearray(nbytes))
    return bytes(into) if unpack(frame, into) else None


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, E4M3])
@pytest.mark.parametrize("nbytes", [4096, 65_536 + 8, 3 * MIB])
def test_floating_point_numbers_shrink_and_return_exactly(
    codec: Codec, dtype: torch.dtype, nbytes: int
) -> None:
    compressor = Compressor(codec)
    data = kv(nbytes, dtype)
    nbytes = data.nbytes
    frame = framed(compressor, data)
    if codec == "zstd" and nbytes > 4096:
        assert frame.nbytes < 0.97 * nbytes
    assert restored(frame, nbytes) == bytes(data)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("nbytes", [1, 31, 4097, MIB])
def test_what_does_not_shrink_is_stored_plain(codec: Codec, nbytes: int) -> None:
    compressor = Compressor(codec)
    for seed in range(40):
        data = noise(nbytes, seed)
        frame = framed(compressor, data)
        assert frame.nbytes == nbytes + FRAME_BYTES
        assert restored(frame, nbytes) == bytes(data)


def test_values_that_shrink_again_are_compressed_again() -> None:
    compressor = Compressor("zstd")
    framed(compressor, noise(65_536))
    sizes = [framed(compressor, kv(65_536)).nbytes for _ in range(20)]
    assert sizes[0] == 65_536 + FRAME_BYTES
    assert sizes[-1] < 0.9 * 65_536


@pytest.mark.parametrize("data", [kv(65_536), noise(65_536)], ids=["packed", "plain"])
def test_no_changed_bit_is_taken_for_the_value(data: memoryview) -> None:
    compressor = Compressor("zstd")
    frame = bytes(framed(compressor, data))
    rng = random.Random(1)
    header = range(8 * FRAME_BYTES)
    for bit in [*header, *(rng.randrange(8 * len(frame)) for _ in range(2000))]:
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        read = restored(memoryview(changed), 65_536)
        assert read is None or (read == bytes(data) and 48 <= bit < 64)  # these are not used


def test_a_frame_that_holds_less_shows_no_memory() -> None:
    for codec in CODECS:
        body = compression._library(codec).compress(bytes(64), 1)
        number = compression._NUMBERS[codec]
        checksum = compression._checksum(memoryview(body), number, 1, 65_536)
        header = compression._FRAME.pack(b"kvrz", number, 1, 65_536, len(body), checksum)
        into = memoryview(bytearray(b"x" * 65_536))
        if unpack(memoryview(header + body), into):
            assert bytes(into) == bytes(65_536)


def test_a_frame_ends_where_it_says_and_holds_what_it_says() -> None:
    data = kv(65_536)
    frame = bytes(framed(Compressor("zstd"), data))
    assert restored(memoryview(frame + bytes(5000)), 65_536) == bytes(data)
    for end in (0, 1, FRAME_BYTES - 1, FRAME_BYTES, 1000, -1):
        assert restored(memoryview(frame)[:end], 65_536) is None
    for nbytes in (65_535, 65_537, 0):
        assert restored(memoryview(frame), nbytes) is None


def is_on(get_s: float, put_s: float = 0.0) -> bool:
    """Whether `auto` compresses for a medium that takes so many seconds a byte."""
    compressor = Compressor("auto")
    compressor.moved(MIB, put_s * MIB, got=False)
    compressor.moved(MIB, get_s * MIB, got=True)
    return compressor.is_on


def test_a_slow_medium_is_compressed_for_and_a_fast_one_is_not() -> None:
    assert is_on(1e-6)  # a megabyte a second
    assert not is_on(1e-9)  # a gigabyte a second
    assert not is_on(0.0)  # nothing measured
    assert Compressor("zstd").is_on


def test_gets_count_rather_than_puts() -> None:
    assert is_on(0.0, put_s=1e-6)
    assert not is_on(1e-12, put_s=1e-6)


def test_a_frame_goes_into_memory_that_is_not_aligned() -> None:
    compressor = Compressor("lz4")
    data = kv(65_536)
    room = memoryview(bytearray(200_000))
    nbytes = compressor.pack(data, room[13:])
    into = memoryview(np.zeros(70_000, np.uint8))[7 : 7 + 65_536]
    assert unpack(room[13 : 13 + nbytes], into)
    assert bytes(into) == bytes(data)
