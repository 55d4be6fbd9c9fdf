"""A store wrapper that passes values on in memory beside the arena: compressed, encrypted, or where
the store may register it.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import cast

import numpy as np

from kvrecall.config import Compression
from kvrecall.pool.cipher import TAG_BYTES, Cipher
from kvrecall.pool.compression import FRAME_BYTES, Compressor, unpack
from kvrecall.pool.remote.store import Object, RegisteringStore, SizingStore, Store

_LOG = logging.getLogger(__name__)
_SECTIONS = 2  # of each direction: calls that have values in hand at once; others wait
SECTION_BYTES = 66 << 20
"""The most that ``BatchSize`` allows a call, with headers, frames and tags."""
_ALIGNMENT = 64
_SMALL_BYTES = 64


class StagedStore:
    """Passes values on to ``inner`` in *sections*: the only memory that ``inner`` may register, so
    that who reaches its transport reads and writes values in transit at most. See ``Store`` for
    the contract. The calling threads compress and encrypt, one core each.

    Others may change a section at any time: a value is copied out first and only then decrypted or,
    by the caller, verified; it is encrypted before it is copied in. With a cipher a value is its
    tag and then its bytes, encrypted with AES-256-GCM and bound to name and length, under its name
    and the id of the key: other keys, and hosts without one, do not meet it. Values that an older
    key of the cipher encrypted are still found. A value whose tag is wrong counts as absent.

    A compressed value has another name than a plain one, so that hosts without compression do not
    meet it; a host with it finds both. A value's small parts stay plain and come first, then the
    frame of its large part.
    """

    exposed = ""

    def __init__(
        self,
        inner: Store,
        cipher: Cipher | None = None,
        compression: Compression = "none",
        section_bytes: int = SECTION_BYTES,
    ) -> None:
        """Takes ownership of ``inner``, a ``SizingStore`` if there is compression. No value may be
        larger than ``section_bytes``."""
        self._inner = inner
        self._cipher = cipher
        self._keys = [""] if cipher is None else cipher.key_ids
        self._tag_bytes = 0 if cipher is None else TAG_BYTES
        self._compressor = None if compression == "none" else Compressor(compression)
        self._forms = [False] if self._compressor is None else [True, False]  # whether compressed
        self._own = threading.local()
        self._sections = _Sections(section_bytes)
        self._copies = cipher is not None or isinstance(inner, RegisteringStore)
        self._lock = threading.Lock()
        self._given_bytes = self._stored_bytes = 0
        if isinstance(inner, RegisteringStore):
            inner.attach(self._sections.memory, self._sections.fd)

    def __repr__(self) -> str:
        return f"StagedStore({self._inner!r})"

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the values put since the start, as given and as stored; 0 without
        compression."""
        with self._lock:
            return self._given_bytes, self._stored_bytes

    def exists(self, names: Sequence[str]) -> list[bool]:
        answers = self._inner.exists(self._all_names(names))
        return [any(answers[place :: len(names)]) for place in range(len(names))]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        packs = self._is_packing and all(_split(item)[1] is not None for item in objects)
        if not packs and not self._copies:
            return self._pass_on(objects, objects)
        put = partial(self._put, packs)
        sizes = self._sections.answers(objects, self._more(packs), put, leaving=True)
        return [size >= 0 for size in sizes]

    def get(self, objects: Sequence[Object]) -> list[bool]:
        """Gets what was stored in the present form and with the first key, then what is missing in
        the others."""
        forms = self._forms if self._is_packing else self._forms[::-1]
        found = [False] * len(objects)
        for packed in forms:
            for key in self._keys:
                missing = [place for place, is_there in enumerate(found) if not is_there]
                some = [objects[place] for place in missing]
                for place, size in zip(missing, self._get(packed, key, some), strict=True):
                    found[place] = size >= 0
        return found

    def remove(self, names: Sequence[str]) -> None:
        self._inner.remove(self._all_names(names))

    def close(self) -> None:
        self._inner.close()
        self._sections.close()

    # -- inside ----------------------------------------------------------------------------

    @property
    def _is_packing(self) -> bool:
        return self._compressor is not None and self._compressor.is_on

    def _all_names(self, names: Sequence[str]) -> list[str]:
        """The names of values in all forms and with all keys: ``names`` for each."""
        ways = [(packed, key) for packed in self._forms for key in self._keys]
        return [_staged(name, packed, key) for packed, key in ways for name in names]

    def _more(self, packed: bool) -> int:
        """Bytes that a staged value may have beyond its own."""
        return self._tag_bytes + FRAME_BYTES * packed

    def _pass_on(self, given: Sequence[Object], staged: Sequence[Object]) -> list[bool]:
        """Puts values, ``given`` in other forms."""
        began = time.perf_counter()
        answers = self._inner.put(staged)
        if self._compressor is not None:
            nbytes = sum(item.nbytes for item in staged)
            self._compressor.moved(nbytes, time.perf_counter() - began, got=False)
            with self._lock:
                for one, other, is_stored in zip(given, staged, answers, strict=True):
                    self._given_bytes += one.nbytes * is_stored
                    self._stored_bytes += other.nbytes * is_stored
        return answers

    def _put(self, packs: bool, objects: Sequence[Object], section: memoryview) -> list[int]:
        staged = []
        begin = 0
        for item in objects:
            name = _staged(item.name, packs)
            if packs and self._cipher is None:
                end = begin + self._pack(item, section[begin:])
            else:
                parts = item.parts
                if packs:
                    room = self._scratch("packed", item.nbytes + FRAME_BYTES)
                    parts = (room[: self._pack(item, room)],)
                end = begin + self._seal(name, parts, section[begin:])
            name = _staged(item.name, packs, self._keys[0])
            staged.append(Object(name, (section[begin:end],)))
            begin = _aligned(end)
        return [0 if ok else -1 for ok in self._pass_on(objects, staged)]

    def _seal(self, name: str, parts: Sequence[memoryview], into: memoryview) -> int:
        """Copies a value, encrypted if there is a cipher; returns its bytes."""
        if self._cipher is not None:
            nbytes = sum(part.nbytes for part in parts)
            sealed = self._scratch("sealed", nbytes)
            tag = self._cipher.encrypt(_label(name, nbytes), parts, _pieces(sealed, parts))
            parts = (memoryview(tag), sealed)
        _copy(parts, into)
        return sum(part.nbytes for part in parts)

    def _pack(self, item: Object, into: memoryview) -> int:
        """Compresses a value; returns its bytes."""
        smalls, large = _split(item)
        assert large is not None
        assert self._compressor is not None
        begin = sum(part.nbytes for part in smalls)
        _copy(smalls, into)
        return begin + self._compressor.pack(large, into[begin:])

    def _get(self, packed: bool, key: str, objects: Sequence[Object]) -> list[int]:
        """-1 for each value that is not there in this form."""
        if not objects:
            return []
        if not packed and not self._copies:
            return self._fetch(packed, objects)
        more = self._more(packed)

        def get(some: Sequence[Object], section: memoryview) -> list[int]:
            names = [_staged(item.name, packed, key) for item in some]
            sizes = [item.nbytes + more for item in some]
            begins = accumulate(map(_aligned, sizes), initial=0)
            places = [section[at : at + size] for at, size in zip(begins, sizes, strict=False)]
            staged = [Object(name, (p,)) for name, p in zip(names, places, strict=True)]
            return [
                0 if size >= 0 and self._open(item, packed, place[:size]) else -1
                for item, place, size in zip(some, places, self._fetch(packed, staged), strict=True)
            ]

        return self._sections.answers(objects, more, get, leaving=False)

    def _fetch(self, packed: bool, staged: Sequence[Object]) -> list[int]:
        """The sizes of values that are there; -1 for others."""
        began = time.perf_counter()
        if packed:
            sizes = cast(SizingStore, self._inner).get_up_to(staged)
        else:
            answers = self._inner.get(staged)
            sizes = [i.nbytes if ok else -1 for i, ok in zip(staged, answers, strict=True)]
        if self._compressor is not None:
            nbytes = sum(max(0, size) for size in sizes)
            self._compressor.moved(nbytes, time.perf_counter() - began, got=True)
        return sizes

    def _open(self, item: Object, packed: bool, staged: memoryview) -> bool:
        """Copies a value out, and decrypts and unpacks it where it is then. False if it is
        wrong."""
        if staged.nbytes <= self._tag_bytes:
            return False
        tag, value = bytes(staged[: self._tag_bytes]), staged[self._tag_bytes :]
        parts = (value,) if packed else item.parts
        if self._copies:
            if packed:
                parts = (self._scratch("packed", value.nbytes),)
            for part, piece in zip(parts, _pieces(value, parts), strict=True):
                _copy((piece,), part)
        if self._cipher is not None:
            label = _label(_staged(item.name, packed), value.nbytes)
            if not self._cipher.decrypt(label, tag, parts, parts):
                return False
        return not packed or _unpack(parts[0], item)

    def _scratch(self, what: str, nbytes: int) -> memoryview:
        """Memory of the thread that the store does not know; the same again at its next call."""
        room: bytearray | None = getattr(self._own, what, None)
        if room is None or len(room) < nbytes:
            room = bytearray(nbytes)
            setattr(self._own, what, room)
        return memoryview(room)[:nbytes]


class _Sections:
    """A memory file in sections, of which each call has one at a time. Its pages are allocated as
    they are used. Thread-safe.

    Values do not arrive in the sections that they leave from: whatever a call that failed may still
    write hits only bytes that are verified after they were copied out.
    """

    def __init__(self, section_bytes: int) -> None:
        self._section_bytes = section_bytes
        self._told = False
        nbytes = 2 * _SECTIONS * section_bytes
        self.fd = os.memfd_create("kvrecall-transfer", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self.memory = memoryview(mmap.mmap(self.fd, nbytes))
        self._leaving: queue.LifoQueue[memoryview] = queue.LifoQueue()  # the last is in caches
        self._arriving: queue.LifoQueue[memoryview] = queue.LifoQueue()
        for begin in range(0, nbytes, section_bytes):
            free = self._leaving if begin < nbytes // 2 else self._arriving
            free.put(self.memory[begin : begin + section_bytes])

    def close(self) -> None:
        """Idempotent. Calls in flight keep their section."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def answers(
        self,
        objects: Sequence[Object],
        more: int,
        call: Callable[[Sequence[Object], memoryview], list[int]],
        leaving: bool,
    ) -> list[int]:
        """The answers of ``call``, which puts (``leaving``) or gets, for as many objects at a time
        as fit a section together, with that section; -1 for one that fits none. Each takes its size
        and ``more``, and begins at a multiple of ``_ALIGNMENT``."""
        free = self._leaving if leaving else self._arriving
        answers: list[int] = []
        at = 0
        while at < len(objects):
            end, size = at, 0
            while end < len(objects):
                size += _aligned(objects[end].nbytes + more)
                if size > self._section_bytes:
                    break
                end += 1
            if end == at:
                self._tell(objects[at].nbytes)
                answers.append(-1)
                at += 1
                continue
            section = free.get()
            try:
                answers += call(objects[at:end], section)
            finally:
                free.put(section)
            at = end
        return answers

    def _tell(self, nbytes: int) -> None:
        if not self._told:
            self._told = True
            _LOG.error(
                "remote tier: blocks of %d bytes are too large to be stored encrypted, compressed "
                "or in a store with memory of its own; at most %d",
                nbytes,
                self._section_bytes,
            )


def _split(item: Object) -> tuple[Sequence[memoryview], memoryview | None]:
    """The small parts at the beginning, and the large one behind them; None if the value has
    another form."""
    *smalls, large = item.parts
    if large.nbytes <= _SMALL_BYTES or any(part.nbytes > _SMALL_BYTES for part in smalls):
        return [], None
    return smalls, large


def _unpack(value: memoryview, item: Object) -> bool:
    """Undoes ``StagedStore._pack``. False if the value is damaged."""
    smalls, large = _split(item)
    begin = sum(part.nbytes for part in smalls)
    if large is None or value.nbytes < begin:
        return False
    for part, piece in zip(smalls, _pieces(value, smalls), strict=True):
        part[:] = piece
    return unpack(value[begin:], large)


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


def _staged(name: str, packed: bool, key: str = "") -> str:
    return f"{name}{'-z' * packed}{f'-{key}' if key else ''}"


def _label(name: str, nbytes: int) -> bytes:
    return f"{name}/{nbytes}".encode()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
