"""Lossless compression of blocks: planes of bytes, then LZ4 or Zstandard (by numcodecs).

The bytes of one significance of all elements are stored side by side (a byte plane): those with
the exponents repeat, those with the mantissas hardly do. The width of an element is found out by
trying.

Who may write to the disk or the store can forge frames with right checksums. So a value is one
call of a decoder that reads and writes within the bounds it is given, and no container, whose
sizes and offsets would have to be believed.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from kvrecall.errors import ConfigError

Codec = Literal["lz4", "zstd"]
CODECS: tuple[Codec, ...] = get_args(Codec)
Bytes = npt.NDArray[np.uint8]

_LEVEL = 1
_WIDTHS = (1, 2, 4)  # bytes of an element: fp8, bf16 and fp16, fp32
_SAMPLE_BYTES = 128 << 10
_TRY_EVERY = 256  # values of one size
_LEAST_GAIN = 0.95  # of the plain bytes; values that stay larger are stored plain
_SKIPPED = 16  # values of a size that are stored plain after one that did not shrink
_SLOW_S = 4e-9  # for a byte, from which `auto` compresses, also where processors are busy

_FRAME = struct.Struct("<4sBBxxQQQ")
"""Magic, codec, width, plain and stored bytes, checksum of the stored."""
_MAGIC = b"kvrz"
_PLAIN = 0
_NUMBERS: dict[Codec, int] = {"lz4": 2, "zstd": 3}
_CODECS = {number: codec for codec, number in _NUMBERS.items()}
FRAME_BYTES = _FRAME.size
assert FRAME_BYTES == 32


@dataclass(slots=True)
class _Kind:
    width: int = 0
    seen: int = 0
    skip: int = 0


class Compressor:
    """Packs values into frames. Thread-safe.

    A frame is a header of 32 bytes and then the value: compressed, or plain if it would not shrink.
    A damaged frame is recognised by a checksum before anything is unpacked. A call uses the calling
    thread only.

    `auto` is Zstandard where the medium is slow, so that no value arrives much later than plain. A
    plain byte takes ``s`` seconds to get; compressed to ``1 / r`` it takes ``s / r``, and ``u`` to
    unpack. With a model's KV (``r`` about 1.6, ``u`` 0.5 ns on a free core) that is less below 0.7
    GB/s; the limit is 0.25. ``s`` is measured by gets, before any by puts.
    """

    def __init__(self, compression: Codec | Literal["auto"]) -> None:
        """ConfigError if the library is missing."""
        self._is_auto = compression == "auto"
        self._codec: Codec = "lz4" if compression == "lz4" else "zstd"
        self._library = _library(self._codec)
        self._seconds = {True: 0.0, False: 0.0}  # a byte takes to be got, and put
        self._kinds: dict[int, _Kind] = {}
        self._lock = threading.Lock()

    def moved(self, nbytes: int, seconds: float, got: bool) -> None:
        """A call of the tier's medium moved ``nbytes``."""
        if nbytes <= 0 or seconds <= 0:
            return
        with self._lock:
            old, new = self._seconds[got], seconds / nbytes
            self._seconds[got] = 0.8 * old + 0.2 * new if old else new

    @property
    def is_on(self) -> bool:
        return not self._is_auto or (self._seconds[True] or self._seconds[False]) > _SLOW_S

    def pack(self, data: memoryview, into: memoryview) -> int:
        """Writes the frame of ``data`` (contiguous uint8) into ``into``, which has room for all of
        it and a header; returns the frame's bytes."""
        kind = self._kind_of(data)
        codec, width, stored = _PLAIN, 1, data
        if kind is not None:
            width = kind.width  # once: another thread may find another one now
            packed = self._compress(data, width)
            if len(packed) <= _LEAST_GAIN * data.nbytes:
                codec, stored = _NUMBERS[self._codec], memoryview(packed)
            else:
                with self._lock:
                    kind.skip = _SKIPPED
        nbytes = FRAME_BYTES + len(stored)
        into[FRAME_BYTES:nbytes] = stored
        checksum = _checksum(into[FRAME_BYTES:nbytes], codec, width, data.nbytes)
        _FRAME.pack_into(into, 0, _MAGIC, codec, width, data.nbytes, len(stored), checksum)
        return nbytes

    def _kind_of(self, data: memoryview) -> _Kind | None:
        """None: such values do not shrink lately."""
        with self._lock:
            kind = self._kinds.setdefault(data.nbytes, _Kind())
            kind.seen += 1
            if kind.skip:
                kind.skip -= 1
                return None
            known = kind.width and kind.seen % _TRY_EVERY
        if not known:
            sample = _sample_of(data)
            kind.width = min(_WIDTHS, key=lambda width: len(self._compress(sample, width)))
        return kind

    def _compress(self, data: memoryview, width: int) -> bytes:
        packed: bytes = self._library.compress(
            _planes(np.frombuffer(data, np.uint8), width), _LEVEL
        )
        return packed


def unpack(frame: memoryview, into: memoryview) -> bool:
    """Restores the value of ``frame``, by whatever codec, into ``into``. False if the frame is
    damaged or its value has another size; ``into`` is undefined then. Bytes behind the frame are
    ignored."""
    if frame.nbytes < FRAME_BYTES:
        return False
    magic, codec, width, plain, stored, checksum = _FRAME.unpack_from(frame, 0)
    packed = frame[FRAME_BYTES : FRAME_BYTES + stored]
    if (magic, plain, stored) != (_MAGIC, into.nbytes, packed.nbytes) or width not in _WIDTHS:
        return False
    if _checksum(packed, codec, width, plain) != checksum:
        return False
    if codec == _PLAIN:
        if stored != plain:
            return False
        into[:] = packed
        return True
    if codec not in _CODECS:
        return False
    try:
        _decompress(_library(_CODECS[codec]), packed, width, np.frombuffer(into, np.uint8))
    except (RuntimeError, ValueError):
        return False
    return True


def _planes(data: Bytes, width: int) -> Bytes:
    """The planes of ``data`` one after the other, and what is left of it."""
    whole = data.nbytes // width * width
    planes = np.empty_like(data)
    planes[:whole].reshape(width, -1)[:] = data[:whole].reshape(-1, width).T
    planes[whole:] = data[whole:]
    return planes


def _decompress(library: Any, packed: memoryview | bytes, width: int, into: Bytes) -> None:
    """Undoes ``_compress``. Raises RuntimeError or ValueError."""
    planes = np.zeros(into.nbytes, np.uint8)  # a frame that holds less shows no memory of ours
    library.decompress(packed, planes)
    whole = into.nbytes // width * width
    first, *others = reversed(planes[:whole].reshape(width, -1))
    words = into[:whole].view(f"<u{width}")
    words[:] = first
    for plane in others:
        words <<= 8
        words |= plane
    into[whole:] = planes[whole:]


def check_compression(compression: str) -> None:
    """Raises ConfigError if the library for it is missing."""
    if compression != "none":
        _library("lz4")


def _checksum(stored: memoryview, codec: int, width: int, plain: int) -> int:
    seed = (plain << 16 | width << 8 | codec) & (1 << 64) - 1
    return xxhash.xxh3_64_intdigest(stored, seed)


def _sample_of(data: memoryview) -> memoryview:
    """From the middle of ``data``, where both keys and values are."""
    begin = max(0, (data.nbytes - _SAMPLE_BYTES) // 2) & ~63
    return data[begin : begin + _SAMPLE_BYTES]


def _library(codec: Codec) -> Any:
    try:
        from numcodecs import lz4, zstd
    except ImportError as error:
        raise ConfigError(
            "compression needs the package numcodecs; run: pip install 'kvrecall[compression]'"
        ) from error
    return lz4 if codec == "lz4" else zstd
