"""A store wrapper that encrypts values before they leave the host."""

from __future__ import annotations

import logging
import mmap
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvrecall.pool.cipher import TAG_BYTES, Cipher
from kvrecall.pool.remote.store import Object, Store

_LOG = logging.getLogger(__name__)
_SECTIONS = 4  # calls that have encrypted values in hand at once; others wait
_SECTION_BYTES = 64 << 20
_SMALL_BYTES = 64  # parts that need not lie in attached memory


class EncryptedStore:
    """Passes values on to ``inner``, encrypted with AES-256-GCM and bound to their name. See
    ``Store`` for the contract.

    A value is stored as its tag and then its encrypted bytes, under its name and the id of the key,
    so other keys, and hosts without one, do not meet it. Values that an older key of the cipher
    encrypted are still found. A value whose tag is wrong counts as absent.
    """

    def __init__(self, inner: Store, cipher: Cipher, section_bytes: int = _SECTION_BYTES) -> None:
        """Takes ownership of ``inner``, to which nothing was attached. No value may be larger than
        ``section_bytes``."""
        self._inner = inner
        self._cipher = cipher
        self._section_bytes = section_bytes
        self._sections: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._told = False
        self._fd = -1

    def __repr__(self) -> str:
        return f"EncryptedStore({self._inner!r})"

    def attach(self, memory: memoryview) -> None:
        """``inner`` moves encrypted values only, so it gets memory for those instead of the arena:
        also a memory file, whose pages are allocated as they are used."""
        nbytes = _SECTIONS * self._section_bytes
        self._fd = os.memfd_create("kvrecall-encrypted", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, nbytes)
        own = memoryview(mmap.mmap(self._fd, nbytes))
        for begin in range(0, own.nbytes, self._section_bytes):
            self._sections.put(own[begin : begin + self._section_bytes])
        self._inner.attach(own)

    def exists(self, names: Sequence[str]) -> list[bool]:
        keys = self._cipher.key_ids
        answers = self._inner.exists([_encrypted_name(name, key) for key in keys for name in names])
        return [any(answers[place :: len(names)]) for place in range(len(names))]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        return self._by_section(objects, self._put)

    def get(self, objects: Sequence[Object]) -> list[bool]:
        found = [False] * len(objects)
        for key in self._cipher.key_ids:
            missing = [place for place, is_there in enumerate(found) if not is_there]
            wanted = [objects[place] for place in missing]
            answers = self._by_section(wanted, partial(self._get, key))
            for place, is_there in zip(missing, answers, strict=True):
                found[place] = is_there
        return found

    def remove(self, names: Sequence[str]) -> None:
        keys = self._cipher.key_ids
        self._inner.remove([_encrypted_name(name, key) for key in keys for name in names])

    def close(self) -> None:
        self._inner.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # -- inside ----------------------------------------------------------------------------

    def _put(self, objects: Sequence[Object], section: memoryview) -> list[bool]:
        encrypted = []
        for item, parts in self._places(objects, section):
            tag = bytearray(self._cipher.encrypt(_label(item), item.parts, parts))
            name = _encrypted_name(item.name, self._cipher.key_id)
            encrypted.append(Object(name, (memoryview(tag), *parts)))
        return self._inner.put(encrypted)

    def _get(self, key: str, objects: Sequence[Object], section: memoryview) -> list[bool]:
        encrypted = [
            Object(_encrypted_name(item.name, key), (memoryview(bytearray(TAG_BYTES)), *parts))
            for item, parts in self._places(objects, section)
        ]
        answers = self._inner.get(encrypted)
        return [
            is_there and self._decrypt(item, value)
            for item, value, is_there in zip(objects, encrypted, answers, strict=True)
        ]

    def _decrypt(self, item: Object, encrypted: Object) -> bool:
        tag, *parts = encrypted.parts
        return self._cipher.decrypt(_label(item), bytes(tag), parts, item.parts)

    def _by_section(
        self,
        objects: Sequence[Object],
        call: Callable[[Sequence[Object], memoryview], list[bool]],
    ) -> list[bool]:
        """The answers of ``call`` for objects that fit a section together, with that section; False
        for one that fits none."""
        answers: list[bool] = []
        at = 0
        while at < len(objects):
            end, size = at, 0
            while end < len(objects) and size + objects[end].nbytes <= self._section_bytes:
                size += objects[end].nbytes
                end += 1
            if end == at:
                if not self._told:
                    self._told = True
                    _LOG.error(
                        "remote tier: blocks of %d bytes are too large to be stored with "
                        "encryption; at most %d",
                        objects[at].nbytes,
                        self._section_bytes,
                    )
                answers.append(False)
                at += 1
                continue
            section = self._sections.get()
            try:
                answers += call(objects[at:end], section)
            finally:
                self._sections.put(section)
            at = end
        return answers

    @staticmethod
    def _places(
        objects: Sequence[Object], section: memoryview
    ) -> Iterator[tuple[Object, list[memoryview]]]:
        """Each object with memory for its encrypted parts."""
        begin = 0
        for item in objects:
            places = []
            for part in item.parts:
                if part.nbytes <= _SMALL_BYTES:
                    places.append(memoryview(bytearray(part.nbytes)))
                else:
                    places.append(section[begin : begin + part.nbytes])
                    begin += part.nbytes
            yield item, places


def _encrypted_name(name: str, key: str) -> str:
    return f"{name}-{key}"


def _label(item: Object) -> bytes:
    return f"{item.name}/{item.nbytes}".encode()
