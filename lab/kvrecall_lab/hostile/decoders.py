"""Attacks with bytes: objects, frames, rows and receipts that a stranger wrote."""

from __future__ import annotations

import os
import random
import resource
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

from kvrecall.errors import ConfigError
from kvrecall.jsonfile import parse_json
from kvrecall.pool import compression
from kvrecall.pool.cipher import TAG_BYTES, Cipher, read_keys
from kvrecall.pool.compression import CODECS, FRAME_BYTES, Compressor, unpack
from kvrecall.pool.disk.codec import BlockCodec
from kvrecall.pool.tier import checksum_of
from kvrecall.simulate.trace import read_trace
from kvrecall.testing import chain, namespace
from kvrecall_lab.hostile.attack import Crashed, GotIn, attack

_PLAIN = 65_536
_MARK = b"not the attacker's"
_KEY = chain(namespace(), 1)[0]
_FUZZING_S = 12.0


def _frame(codec: int, width: int, body: bytes) -> bytes:
    """With a right checksum, as anybody can compute it."""
    checksum = compression._checksum(memoryview(body), codec, width, _PLAIN)
    header = (compression._MAGIC, codec, width, _PLAIN, len(body), checksum)
    return compression._FRAME.pack(*header) + body


def _changed(body: bytes, rng: random.Random) -> bytes:
    """A few changes of the kinds that find mistakes in decoders."""
    data = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1) if rng.random() < 0.5 else rng.randrange(40)
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + 4] = struct.pack(
                    "<I", rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1))
                )
            case 2:
                data[at : at + rng.randrange(64)] = b""
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(64))
            case 4:
                data[at : at + 8] = rng.choice((b"\xff", b"\0")) * 8
            case _:
                other = rng.randrange(len(data) + 1)
                data[at : at + 32] = data[other : other + 32]
    return bytes(data)


def _forged() -> Iterator[bytes]:
    """Frames without end: C-Blosc's with sizes and offsets that lead elsewhere, then changed ones
    of every codec."""
    for flags, offsets, cbytes in ((0x21, 17, 0x7FFFFFFF), (0x22, 17, _PLAIN + 16)):
        blosc = struct.pack("<BBBBIII", 2, 1, flags, 2, _PLAIN, 4096, cbytes)
        blosc += struct.pack("<I", 0x70000000) * offsets
        yield from (_frame(codec, 2, blosc) for codec in range(6))
    rng = random.Random(1)
    floats = b"".join(struct.pack("<f", rng.gauss(0, 1))[2:] for _ in range(_PLAIN // 2))
    real: list[bytes] = []
    for name in CODECS:
        room = memoryview(bytearray(_PLAIN + FRAME_BYTES))
        real.append(bytes(room[: Compressor(name).pack(memoryview(floats), room)]))
    while True:
        one = rng.choice(real)
        codec = one[4] if rng.random() < 0.9 else rng.randrange(256)
        width = one[5] if rng.random() < 0.8 else rng.choice((0, 1, 2, 3, 4, 255))
        body = one[FRAME_BYTES:] if rng.random() < 0.9 else rng.randbytes(rng.randrange(200))
        yield _frame(codec, width, _changed(body, rng))


@attack()
def forged_frames(folder: Path) -> str:
    """Compressed blocks with right checksums, whose insides point elsewhere."""
    del folder
    count = 0
    for frame in _for_a_while(_forged()):
        count += 1
        room = memoryview(bytearray(frame + _MARK * 8000))
        into = memoryview(bytearray(_PLAIN + 64))
        into[_PLAIN:] = b"\x5a" * 64
        if unpack(room[: len(frame)], into[:_PLAIN]) and _MARK in bytes(into):
            raise GotIn("bytes behind the frame became the block's")
        if into[_PLAIN:] != b"\x5a" * 64:
            raise GotIn("bytes behind the block were overwritten")
    return f"{count} forged frames were refused, or held only their own bytes"


def _for_a_while(endless: Iterator[bytes]) -> Iterator[bytes]:
    until = time.monotonic() + _FUZZING_S
    return takewhile(lambda _: time.monotonic() < until, endless)


@attack()
def forged_blocks(folder: Path) -> str:
    """Blocks on disk with right checksums, or without the key."""
    del folder
    codecs = (BlockCodec(), BlockCodec(Cipher((secrets.token_bytes(32),))))
    rng, count = random.Random(2), 0
    for forged in _for_a_while(_forged()):
        frame = memoryview(bytearray(forged[: _PLAIN - 1]))
        for codec in codecs:
            tag = checksum_of(_KEY, frame)
            if codec.encrypts:
                tag = rng.choice((tag, codec._cipher._first + os.urandom(TAG_BYTES - 4)))
            slot = memoryview(bytearray(_PLAIN))
            right = codec.decode(_KEY, len(frame), tag, frame, slot, _PLAIN)
            if right and codec.encrypts:
                raise GotIn("a block that was not written with the key was taken")
            count += 1
    return f"{count} forged blocks were misses"


def _texts(seeds: list[bytes]) -> Iterator[bytes]:
    deep, digits = 100_000, 10_000
    yield from (b"[" * deep, b'{"a":' * deep, b"9" * digits, b"1e999", b"\xff\xfe", b"\0" * 9)
    yield from (b'"' + b"\\u" * 99, b"NaN", b"-", b'{"timestamp":' + b"9" * digits + b"}")
    yield b'{"timestamp": "' + b"x" * 1_000_000 + b'", "hash_ids": [1]}'
    rng = random.Random(3)
    while True:
        yield _changed(rng.choice(seeds), rng)


@attack()
def documents_of_strangers(folder: Path) -> str:
    """Settings, traces and key files with anything in them: an error in one line, and no more."""
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    file = folder / "document"

    def parse(data: bytes) -> None:
        parse_json(data.decode(errors="surrogateescape"), "document")

    def read(reader: Callable[[Path], object]) -> Callable[[bytes], None]:
        def from_file(data: bytes) -> None:
            file.write_bytes(data)
            file.chmod(0o600)
            reader(file)

        return from_file

    seeds = [
        b'{"host_size": "8GiB", "tenants": {"salt:a": {"ttl": "7d"}}, "list": [1, 2.5, null]}',
        b'{"timestamp": 27, "hash_ids": [1, 2, 3], "input_length": 1500}\n' * 3,
        secrets.token_hex(32).encode() + b"\n# a comment\n",
    ]
    readers = (parse, read(read_trace), read(read_keys))
    count = 0
    for data in _for_a_while(_texts(seeds)):
        for reader in readers:
            count += 1
            try:
                reader(data)
            except ConfigError as error:
                if "\n" in str(error) or len(str(error)) > 2000:
                    raise Crashed(f"an error of {len(str(error))} characters") from None
            except Exception as error:
                raise Crashed(f"{error!r:.200} from {data[:100]!r}") from error
    for endless in (Path("/dev/zero"), Path("/dev/urandom")):
        try:
            read_trace(endless)
        except ConfigError:
            continue
        except MemoryError as error:
            raise Crashed(f"{endless} as a trace takes all memory") from error
    return f"{count} documents were read, or refused in one line"
