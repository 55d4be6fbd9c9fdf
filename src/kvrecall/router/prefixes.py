"""Prompts, and a guess at which instance holds which prefixes, by chained hashes of their text.

For instances that publish no events. A prompt is cut into chunks of its bytes, and the chain of
their hashes names its prefixes, as block hashes do in the engine. What an instance was sent, it is
assumed to hold: it may have evicted it since.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvrecall.router.holdings import BlockHash, HashRule

CHUNK_BYTES = 256
_BYTES_PER_TOKEN = 4  # of text: for estimates
_MOST_CHUNKS = 8192
_REMEMBERED = 200_000
_SHAPING = ("model", "cache_salt", "tools", "documents", "chat_template", "chat_template_kwargs")
"""Fields that change a prompt's blocks from the first one on."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's length (tokens, estimated if it is text) and the hashes of its prefixes.

    ``ids``: its tokens, None if they are not known. ``salt``: the request's ``cache_salt``.
    ``most_tokens``: of its text, a token a byte.
    """

    tokens: int
    prefixes: tuple[bytes, ...]
    ids: tuple[int, ...] | None = None
    salt: str | None = None
    most_tokens: int = 0
    _chains: dict[HashRule, tuple[BlockHash, ...]] = field(default_factory=dict, compare=False)

    @property
    def tokens_per_prefix(self) -> float:
        return self.tokens / len(self.prefixes) if self.prefixes else 0.0

    def with_ids(self, ids: Sequence[int]) -> Prompt:
        """This prompt, its tokens known."""
        return replace(self, tokens=len(ids), ids=tuple(ids), _chains={})

    def chain(self, rule: HashRule | None) -> tuple[BlockHash, ...] | None:
        """The hashes of the blocks that can be hit, all but the last token's; None if they are not
        known."""
        if rule is None or self.ids is None:
            return None
        if rule not in self._chains:
            self._chains[rule] = rule.chain(self.ids[:-1], self.salt)
        return self._chains[rule]


def prompt_of(body: Mapping[str, Any]) -> Prompt | None:
    """The prompt of an OpenAI request; None if it has several or no readable one, or a salt that is
    no text."""
    if not _is_text(body.get("cache_salt") or ""):
        return None
    if isinstance(messages := body.get("messages"), list):
        text = "\x00".join(_canonical(message) for message in messages).encode()
        return _prompt(body, text, len(text) // _BYTES_PER_TOKEN)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        text = prompt.encode(errors="surrogatepass")
        return _prompt(body, text, len(text) // _BYTES_PER_TOKEN)
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return _prompt(body, " ".join(map(str, prompt)).encode(), len(prompt))
    return None


def _prompt(body: Mapping[str, Any], text: bytes, tokens: int) -> Prompt:
    shape = _canonical({name: body[name] for name in _SHAPING if body.get(name) is not None})
    salt = body.get("cache_salt") or None
    prefixes = tuple(_chain(shape.encode(), text))
    return Prompt(tokens, prefixes, salt=salt, most_tokens=len(text))


def _is_text(salt: object) -> bool:
    """Whether a salt is a string without half surrogate pairs, which no hash can be made of."""
    return isinstance(salt, str) and not any("\ud800" <= one <= "\udfff" for one in salt)


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=True)


def _chain(root: bytes, text: bytes) -> Iterable[bytes]:
    digest = hashlib.blake2b(root, digest_size=16).digest()
    whole = len(text) // CHUNK_BYTES
    for place in range(min(whole, _MOST_CHUNKS)):
        chunk = text[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES]
        digest = hashlib.blake2b(digest + chunk, digest_size=16).digest()
        yield digest


class PrefixMap:
    """Prefix hash -> its holders, a bit each. Forgets the least recently used prefixes."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._masks: OrderedDict[bytes, int] = OrderedDict()
        self._remembered = remembered

    def __len__(self) -> int:
        return len(self._masks)

    def note(self, prompt: Prompt | None, bit: int) -> None:
        """Notes that the holder ``bit`` has all of ``prompt``."""
        for digest in reversed(prompt.prefixes if prompt else ()):  # heads are forgotten last
            self._masks[digest] = self._masks.get(digest, 0) | bit
            self._masks.move_to_end(digest)
        while len(self._masks) > self._remembered:
            self._masks.popitem(last=False)

    def held(self, prompt: Prompt | None, bits: Sequence[int]) -> dict[int, int]:
        """Chunks at the beginning of ``prompt`` that each holder has."""
        lengths = dict.fromkeys(bits, 0)
        alive = sum(bits)
        for count, digest in enumerate(prompt.prefixes if prompt else (), start=1):
            alive &= self._masks.get(digest, 0)
            if not alive:
                break
            lengths |= {bit: count for bit in bits if alive & bit}
        return lengths

    def forget(self, bit: int) -> None:
        """Forgets all prefixes of a holder."""
        kept = ((digest, mask & ~bit) for digest, mask in self._masks.items())
        self._masks = OrderedDict((digest, mask) for digest, mask in kept if mask)
