"""A store wrapper that compresses values before they leave the host."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Literal

from kvrecall.pool.compression import FRAME_BYTES, Codec, Compressor, unpack
from kvrecall.pool.remote.sections import SECTION_BYTES, Sections, first_found, one_after_the_other
from kvrecall.pool.remote.store import Object, SizingStore, Store

_SMALL_BYTES = 64


class CompressedStore:
    """Passes values on to ``inner``, compressed without loss. See ``Store`` for the contract.

    A compressed value has another name than a plain one, so that hosts without compression do not
    meet it; a host with it finds both. A value's small parts stay plain and come first, then the
    frame of its large part. The calling threads compress, one core each.
    """

    exposed = ""

    def __init__(
        self, inner: Store, compression: Codec | Literal["auto"], section_bytes: int = SECTION_BYTES
    ) -> None:
        """Takes ownership of ``inner``, which registers no memory."""
        assert isinstance(inner, SizingStore)
        self._inner: SizingStore = inner
        self._compressor = Compressor(compression)
        self._sections = Sections("compression", section_bytes)
        self._lock = threading.Lock()
        self._plain_bytes = self._stored_bytes = 0

    def __repr__(self) -> str:
        return f"CompressedStore({self._inner!r})"

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the values put since the start, as given and as stored."""
        with self._lock:
            return self._plain_bytes, self._stored_bytes

    def exists(self, names: Sequence[str]) -> list[bool]:
        answers = self._inner.exists([*map(_packed_name, names), *names])
        return [a or b for a, b in zip(answers[: len(names)], answers[len(names) :], strict=True)]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        has_large = [_split(item)[1] is not None for item in objects]
        if not (all(has_large) and self._compressor.is_on):
            return self._put_plain(objects)
        return self._put_packed(objects)

    def get(self, objects: Sequence[Object]) -> list[bool]:
        """In the form that is stored now first, then in the other."""
        forms = [self._get_packed, self._get_plain]
        if not self._compressor.is_on:
            forms.reverse()
        return [size >= 0 for size in first_found(objects, forms)]

    def remove(self, names: Sequence[str]) -> None:
        self._inner.remove([*map(_packed_name, names), *names])

    def close(self) -> None:
        self._inner.close()
        self._sections.close()

    # -- inside ----------------------------------------------------------------------------

    def _put_plain(self, objects: Sequence[Object]) -> list[bool]:
        began = time.perf_counter()
        answers = self._inner.put(objects)
        self._moved(sum(item.nbytes for item in objects), began, got=False)
        nbytes = sum(item.nbytes for item, ok in zip(objects, answers, strict=True) if ok)
        self._count(nbytes, nbytes)
        return answers

    def _put_packed(self, objects: Sequence[Object]) -> list[bool]:
        def put(some: Sequence[Object], section: memoryview) -> list[int]:
            packed = []
            begin = 0
            for item in some:
                nbytes = self._pack(item, section[begin:])
                packed.append(Object(_packed_name(item.name), (section[begin : begin + nbytes],)))
                begin += nbytes
            began = time.perf_counter()
            answers = self._inner.put(packed)
            self._moved(begin, began, got=False)
            self._count(
                sum(item.nbytes for item, ok in zip(some, answers, strict=True) if ok),
                sum(item.nbytes for item, ok in zip(packed, answers, strict=True) if ok),
            )
            return [0 if ok else -1 for ok in answers]

        return [size >= 0 for size in self._sections.answers(objects, FRAME_BYTES, put, True)]

    def _pack(self, item: Object, into: memoryview) -> int:
        smalls, large = _split(item)
        assert large is not None
        begin = 0
        for part in smalls:
            into[begin : begin + part.nbytes] = part
            begin += part.nbytes
        return begin + self._compressor.pack(large, into[begin:])

    def _get_plain(self, objects: Sequence[Object]) -> list[int]:
        began = time.perf_counter()
        answers = self._inner.get(objects)
        found = sum(item.nbytes for item, ok in zip(objects, answers, strict=True) if ok)
        self._moved(found, began, got=True)
        return [0 if ok else -1 for ok in answers]

    def _get_packed(self, objects: Sequence[Object]) -> list[int]:
        def get(some: Sequence[Object], section: memoryview) -> list[int]:
            pieces = list(one_after_the_other([i.nbytes + FRAME_BYTES for i in some], section))
            began = time.perf_counter()
            sizes = self._inner.get_up_to(
                [Object(_packed_name(i.name), (p,)) for i, p in zip(some, pieces, strict=True)]
            )
            self._moved(sum(max(0, size) for size in sizes), began, got=True)
            return [
                0 if size >= 0 and self._unpack(piece[:size], item) else -1
                for item, piece, size in zip(some, pieces, sizes, strict=True)
            ]

        return self._sections.answers(objects, FRAME_BYTES, get, False)

    def _unpack(self, value: memoryview, item: Object) -> bool:
        smalls, large = _split(item)
        begin = sum(part.nbytes for part in smalls)
        if large is None or value.nbytes < begin:
            return False
        at = 0
        for part in smalls:
            part[:] = value[at : at + part.nbytes]
            at += part.nbytes
        return unpack(value[begin:], large)

    def _moved(self, nbytes: int, began: float, got: bool) -> None:
        self._compressor.moved(nbytes, time.perf_counter() - began, got)

    def _count(self, plain: int, stored: int) -> None:
        with self._lock:
            self._plain_bytes += plain
            self._stored_bytes += stored


def _split(item: Object) -> tuple[list[memoryview], memoryview | None]:
    """The small parts at the beginning, and the large one behind them; None if the value has
    another form."""
    *smalls, large = item.parts
    if large.nbytes <= _SMALL_BYTES or any(part.nbytes > _SMALL_BYTES for part in smalls):
        return [], None
    return smalls, large


def _packed_name(name: str) -> str:
    return f"{name}-z"
