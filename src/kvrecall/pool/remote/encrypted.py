"""A store wrapper that encrypts values before they leave the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from kvrecall.pool.cipher import TAG_BYTES, Cipher
from kvrecall.pool.remote.sections import SECTION_BYTES, Sections, one_after_the_other
from kvrecall.pool.remote.store import SMALL_BYTES, Object, SizingStore, Store


class EncryptedStore:
    """Passes values on to ``inner``, encrypted with AES-256-GCM and bound to their name. See
    ``Store`` for the contract.

    A value is stored as its tag and then its encrypted bytes, under its name and the id of the key,
    so other keys, and hosts without one, do not meet it. Values that an older key of the cipher
    encrypted are still found. A value whose tag is wrong counts as absent.
    """

    def __init__(self, inner: Store, cipher: Cipher, section_bytes: int = SECTION_BYTES) -> None:
        """Takes ownership of ``inner``, to which nothing was attached. No value may be larger than
        ``section_bytes``."""
        self._inner = inner
        self._cipher = cipher
        self._sections = Sections("encryption", section_bytes)

    def __repr__(self) -> str:
        return f"EncryptedStore({self._inner!r})"

    def attach(self, memory: memoryview, *more: memoryview) -> None:
        """``inner`` moves encrypted values only, so it gets memory for those instead."""
        self._inner.attach(self._sections.open())

    def exists(self, names: Sequence[str]) -> list[bool]:
        keys = self._cipher.key_ids
        answers = self._inner.exists([_encrypted_name(name, key) for key in keys for name in names])
        return [any(answers[place :: len(names)]) for place in range(len(names))]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        return [size >= 0 for size in self._sections.answers(objects, TAG_BYTES, self._put)]

    def get(self, objects: Sequence[Object]) -> list[bool]:
        return [size >= 0 for size in self._under_any_key(objects, self._get)]

    def get_up_to(self, objects: Sequence[Object]) -> list[int]:
        return self._under_any_key(objects, self._get_up_to)

    def _under_any_key(
        self,
        objects: Sequence[Object],
        get: Callable[[str, Sequence[Object], memoryview], list[int]],
    ) -> list[int]:
        """Gets what was encrypted with the first key, then what is missing with the others."""
        found = [-1] * len(objects)
        for key in self._cipher.key_ids:
            missing = [place for place, size in enumerate(found) if size < 0]
            wanted = [objects[place] for place in missing]
            answers = self._sections.answers(wanted, TAG_BYTES, partial(get, key))
            for place, size in zip(missing, answers, strict=True):
                found[place] = size
        return found

    def remove(self, names: Sequence[str]) -> None:
        keys = self._cipher.key_ids
        self._inner.remove([_encrypted_name(name, key) for key in keys for name in names])

    def close(self) -> None:
        self._inner.close()
        self._sections.close()

    # -- inside ----------------------------------------------------------------------------

    def _put(self, objects: Sequence[Object], section: memoryview) -> list[int]:
        encrypted = []
        for item, parts in self._places(objects, section):
            tag = bytearray(self._cipher.encrypt(_label(item.name, item.nbytes), item.parts, parts))
            name = _encrypted_name(item.name, self._cipher.key_id)
            encrypted.append(Object(name, (memoryview(tag), *parts)))
        answers = self._inner.put(encrypted)
        return [item.nbytes if ok else -1 for item, ok in zip(objects, answers, strict=True)]

    def _get(self, key: str, objects: Sequence[Object], section: memoryview) -> list[int]:
        encrypted = [
            Object(_encrypted_name(item.name, key), (memoryview(bytearray(TAG_BYTES)), *parts))
            for item, parts in self._places(objects, section)
        ]
        answers = self._inner.get(encrypted)
        return [
            item.nbytes if is_there and self._decrypt(item, value) else -1
            for item, value, is_there in zip(objects, encrypted, answers, strict=True)
        ]

    def _decrypt(self, item: Object, encrypted: Object) -> bool:
        tag, *parts = encrypted.parts
        return self._cipher.decrypt(_label(item.name, item.nbytes), bytes(tag), parts, item.parts)

    def _get_up_to(self, key: str, objects: Sequence[Object], section: memoryview) -> list[int]:
        assert isinstance(self._inner, SizingStore)
        sizes = [TAG_BYTES + item.nbytes for item in objects]
        pieces = list(one_after_the_other(sizes, section))
        named = [_encrypted_name(item.name, key) for item in objects]
        got = self._inner.get_up_to(
            [Object(name, (piece,)) for name, piece in zip(named, pieces, strict=True)]
        )
        answers = []
        for item, piece, stored in zip(objects, pieces, got, strict=True):
            nbytes = stored - TAG_BYTES
            label = _label(item.name, nbytes)
            value, into = piece[TAG_BYTES:stored], item.parts[0][: max(0, nbytes)]
            right = nbytes >= 0 and self._cipher.decrypt(
                label, bytes(piece[:TAG_BYTES]), [value], [into]
            )
            answers.append(nbytes if right else -1)
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
                if part.nbytes <= SMALL_BYTES:
                    places.append(memoryview(bytearray(part.nbytes)))
                else:
                    places.append(section[begin : begin + part.nbytes])
                    begin += part.nbytes
            yield item, places


def _encrypted_name(name: str, key: str) -> str:
    return f"{name}-{key}"


def _label(name: str, nbytes: int) -> bytes:
    return f"{name}/{nbytes}".encode()
