"""A store wrapper that copies values to memory of the store's own, encrypted if there is a key."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvrecall.pool.cipher import TAG_BYTES, Cipher
from kvrecall.pool.remote.sections import SECTION_BYTES, Sections, first_found, one_after_the_other
from kvrecall.pool.remote.store import Object, RegisteringStore, SizingStore, Store


class StagedStore:
    """Passes values on to ``inner`` in *sections*: the only memory that ``inner`` may register, so
    that who reaches its transport reads and writes values in transit at most. See ``Store`` for
    the contract.

    Others may change a section at any time: a value is copied out first and only then decrypted or,
    by the caller, verified; it is encrypted before it is copied in. With a cipher a value is its
    tag and then its bytes, encrypted with AES-256-GCM and bound to name and length, under its name
    and the id of the key: other keys, and hosts without one, do not meet it. Values that an older
    key of the cipher encrypted are still found. A value whose tag is wrong counts as absent.
    """

    exposed = ""

    def __init__(
        self, inner: Store, cipher: Cipher | None = None, section_bytes: int = SECTION_BYTES
    ) -> None:
        """Takes ownership of ``inner``. No value may be larger than ``section_bytes``."""
        self._inner = inner
        self._cipher = cipher
        self._keys = [""] if cipher is None else cipher.key_ids
        self._tag_bytes = 0 if cipher is None else TAG_BYTES
        self._own = threading.local()
        self._sections = Sections("transfer", section_bytes)
        if isinstance(inner, RegisteringStore):
            inner.attach(self._sections.memory, self._sections.fd)

    def __repr__(self) -> str:
        return f"StagedStore({self._inner!r})"

    def exists(self, names: Sequence[str]) -> list[bool]:
        answers = self._inner.exists([_staged(name, key) for key in self._keys for name in names])
        return [any(answers[place :: len(names)]) for place in range(len(names))]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        sizes = self._sections.answers(objects, self._tag_bytes, self._put, leaving=True)
        return [size >= 0 for size in sizes]

    def get(self, objects: Sequence[Object]) -> list[bool]:
        return [size >= 0 for size in self._under_any_key(objects, self._get)]

    def get_up_to(self, objects: Sequence[Object]) -> list[int]:
        return self._under_any_key(objects, self._get_up_to)

    def _under_any_key(
        self,
        objects: Sequence[Object],
        get: Callable[[str, Sequence[Object], memoryview], list[int]],
    ) -> list[int]:
        """Gets what was stored with the first key, then what is missing with the others."""

        def with_key(key: str, some: Sequence[Object]) -> list[int]:
            call = partial(get, key)
            return self._sections.answers(some, self._tag_bytes, call, leaving=False)

        return first_found(objects, [partial(with_key, key) for key in self._keys])

    def remove(self, names: Sequence[str]) -> None:
        self._inner.remove([_staged(name, key) for key in self._keys for name in names])

    def close(self) -> None:
        self._inner.close()
        self._sections.close()

    # -- inside ----------------------------------------------------------------------------

    def _put(self, objects: Sequence[Object], section: memoryview) -> list[int]:
        staged = self._places(self._keys[0], objects, section)
        for item, place in zip(objects, staged, strict=True):
            if self._cipher is None:
                _copy(item.parts, place.parts[0])
                continue
            sealed = self._scratch(item.nbytes)
            label = _label(item.name, item.nbytes)
            tag = self._cipher.encrypt(label, item.parts, _pieces(sealed, item.parts))
            _copy((memoryview(tag), sealed), place.parts[0])
        answers = self._inner.put(staged)
        return [item.nbytes if ok else -1 for item, ok in zip(objects, answers, strict=True)]

    def _get(self, key: str, objects: Sequence[Object], section: memoryview) -> list[int]:
        staged = self._places(key, objects, section)
        answers = self._inner.get(staged)
        return [
            item.nbytes if is_there and self._open(item, place.parts[0]) else -1
            for item, place, is_there in zip(objects, staged, answers, strict=True)
        ]

    def _get_up_to(self, key: str, objects: Sequence[Object], section: memoryview) -> list[int]:
        assert isinstance(self._inner, SizingStore)
        staged = self._places(key, objects, section)
        answers = []
        for item, place, size in zip(objects, staged, self._inner.get_up_to(staged), strict=True):
            nbytes = size - self._tag_bytes
            if not 0 <= nbytes <= item.nbytes:
                answers.append(-1)
                continue
            there = Object(item.name, (item.parts[0][:nbytes],))
            answers.append(nbytes if self._open(there, place.parts[0][:size]) else -1)
        return answers

    def _open(self, item: Object, staged: memoryview) -> bool:
        """Copies a value out and decrypts it where it is then. False if its tag is wrong."""
        tag = bytes(staged[: self._tag_bytes])
        value = staged[self._tag_bytes :]
        for part, piece in zip(item.parts, _pieces(value, item.parts), strict=True):
            _copy((piece,), part)
        if self._cipher is None:
            return True
        label = _label(item.name, item.nbytes)
        return self._cipher.decrypt(label, tag, item.parts, item.parts)

    def _places(self, key: str, objects: Sequence[Object], section: memoryview) -> list[Object]:
        sizes = [self._tag_bytes + item.nbytes for item in objects]
        places = one_after_the_other(sizes, section)
        return [
            Object(_staged(item.name, key), (place,))
            for item, place in zip(objects, places, strict=True)
        ]

    def _scratch(self, nbytes: int) -> memoryview:
        """Memory of the thread that the store does not know; the same again at its next call."""
        room: bytearray | None = getattr(self._own, "room", None)
        if room is None or len(room) < nbytes:
            room = self._own.room = bytearray(nbytes)
        return memoryview(room)[:nbytes]


def _pieces(value: memoryview, parts: Sequence[memoryview]) -> list[memoryview]:
    """``value`` in pieces of the sizes of ``parts``."""
    pieces, begin = [], 0
    for part in parts:
        pieces.append(value[begin : begin + part.nbytes])
        begin += part.nbytes
    return pieces


def _copy(parts: Sequence[memoryview], into: memoryview) -> None:
    """Copies the parts one after the other; releases Python's lock meanwhile."""
    for part, piece in zip(parts, _pieces(into, parts), strict=True):
        np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(part, np.uint8))


def _staged(name: str, key: str) -> str:
    return f"{name}-{key}" if key else name


def _label(name: str, nbytes: int) -> bytes:
    return f"{name}/{nbytes}".encode()
