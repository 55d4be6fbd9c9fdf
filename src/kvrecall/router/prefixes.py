"""Prompts, and a guess at which instance holds which prefixes, by chained hashes of their JSON.

For instances that publish no events. A prompt is cut into chunks of its bytes as the client sent
them, and the chain of their hashes names its prefixes, as block hashes do in the engine. What an
instance was sent, it is assumed to hold: it may have evicted it since.
"""

from __future__ import annotations

import bisect
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec
import xxhash

from kvrecall.events.holdings import HashRule
from kvrecall.events.wire import BlockHash
from kvrecall.router.bodies import MOST_PROMPT, Body, begin_of

CHUNK_BYTES = 256
_BYTES_PER_TOKEN = 4  # of text: for estimates
_ENDS: tuple[int, ...] = (
    *range(CHUNK_BYTES, 8 * CHUNK_BYTES, CHUNK_BYTES),
    *(end << doubled for doubled in range(13) for end in range(2048, 4096, 512)),
)
"""Bytes of a prompt's first chunk, first two, and so on: a long prompt needs no finer place, and
what follows 14 MB does not change where it goes."""
_KEY = secrets.randbits(64)
_MOST_BLOCKS = 16384  # of a prompt, likewise
_REMEMBERED = 200_000
_MOST_GONE = 256
_SHAPING = (
    "model cache_salt tools documents chat_template chat_template_kwargs system instructions "
    "reasoning_effort mm_processor_kwargs"
).split()
"""Fields that change a prompt's blocks from the first one on."""
_CHAT_FIELDS = (
    "model messages add_generation_prompt continue_final_message add_special_tokens "
    "chat_template chat_template_kwargs tools"
).split()
_COMPLETION_FIELDS = "model prompt add_special_tokens".split()
_UNKNOWN = (
    "prompt_embeds truncate_prompt_tokens mm_processor_kwargs documents reasoning_effort system "
    "instructions input thinking"
).split()
"""Fields with which a prompt has other tokens, or blocks, than /tokenize says."""
_ids = msgspec.json.Decoder(tuple[int, ...])
_list_of_one = msgspec.json.Decoder(tuple[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's length (tokens, estimated if it is text) and the hashes of its prefixes.

    ``given``: the tokens in which it is written, if it is. ``ids``: its tokens, None if they are
    not known, or do not tell its blocks. ``salt``: the request's ``cache_salt``.
    ``most_tokens``: of its text, a token a byte.
    """

    tokens: int
    prefixes: tuple[bytes | int, ...]
    given: tuple[int, ...] | None = None
    ids: tuple[int, ...] | None = None
    salt: str | None = None
    most_tokens: int = 0
    _chains: dict[HashRule, tuple[BlockHash, ...]] = field(default_factory=dict, compare=False)

    def tokens_of(self, count: int) -> int:
        """Tokens of its first ``count`` prefixes; all, if these are all of its prefixes."""
        if count >= len(self.prefixes):
            return self.tokens if count else 0
        return self.tokens * _ENDS[count - 1] // self.most_tokens

    def with_ids(self, ids: tuple[int, ...], rules: Iterable[HashRule] = ()) -> Prompt:
        """This prompt, its tokens known, and its chains by ``rules``: takes tens of milliseconds
        each."""
        made = replace(self, tokens=len(ids), ids=ids, _chains={})
        for rule in rules:
            made.chain(rule)
        return made

    def chain(self, rule: HashRule | None) -> tuple[BlockHash, ...] | None:
        """The hashes of the blocks that can be hit, all but the last token's, and at most the first
        16,384; None if they are not known."""
        if rule is None or self.ids is None:
            return None
        if rule not in self._chains:
            most = min(len(self.ids) - 1, _MOST_BLOCKS * rule.block_size)
            self._chains[rule] = rule.chain(self.ids[: max(0, most)], self.salt)
        return self._chains[rule]


def prompt_of(body: Body) -> Prompt | None:
    """The prompt of a request: of a completion, a chat, Anthropic's message or OpenAI's response;
    None if it has several or no readable one, continues what an engine keeps, or has a salt that is
    no text. Takes tens of milliseconds for the longest body."""
    salt = body.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        return None
    messages = body.raw("messages")
    if begin_of(messages) == b"[":
        return _prompt(body, messages[1:], None, salt)
    given = body.raw("input")
    if begin_of(given) in (b"[", b'"'):
        known = not body.raw("previous_response_id")
        return _prompt(body, given[1:-1], None, salt) if known else None
    prompt = only_prompt(body)
    if begin_of(prompt) == b'"':
        return _prompt(body, prompt[1:-1], None, salt)
    if begin_of(prompt, 2)[:1] != b"[" or begin_of(prompt, 2) in (b"[[", b'["', b"[]"):
        return None
    ids = None
    if len(prompt) <= MOST_PROMPT:
        try:
            ids = _ids.decode(prompt)
        except (ValueError, RecursionError):
            return None
    return _prompt(body, prompt[1:], ids, salt)


def only_prompt(body: Body) -> memoryview:
    """The JSON of ``prompt``, and of the one prompt of a list of one."""
    prompt = body.raw("prompt")
    try:
        only = memoryview(*_list_of_one.decode(prompt))
    except (ValueError, RecursionError):
        return prompt
    return only if begin_of(only) in (b"[", b'"') else prompt


def _prompt(body: Body, text: memoryview, ids: tuple[int, ...] | None, salt: str | None) -> Prompt:
    root = hashlib.blake2b(digest_size=16)
    for name in _SHAPING:
        if name in body.fields and (value := body.raw(name)):
            root.update(name.encode() + b"\0" + value)
    tokens = len(text) // _BYTES_PER_TOKEN if ids is None else len(ids)
    prefixes = tuple(_chain(root.digest(), text))
    return Prompt(tokens, prefixes, given=ids, salt=salt or None, most_tokens=len(text))


def _chain(root: bytes, text: memoryview) -> Iterable[bytes | int]:
    """The first hash is that of other routers, too. The rest are made in a tenth of the time, with
    a key of this process."""
    if len(text) < CHUNK_BYTES:
        return
    begin = CHUNK_BYTES
    first = hashlib.blake2b(root + text[:begin], digest_size=16).digest()
    yield first
    rest = xxhash.xxh3_64(first, _KEY)
    for end in _ENDS[1 : bisect.bisect_right(_ENDS, len(text))]:
        rest.update(text[begin:end])
        yield rest.intdigest()
        begin = end


class _MessagePart(msgspec.Struct, gc=False):
    type: str | None = None


class _ChatMessage(msgspec.Struct, gc=False):
    content: str | list[_MessagePart] | None = None


_messages = msgspec.json.Decoder(list[_ChatMessage])


def is_text(body: Body) -> bool:
    """Whether the blocks of a request depend on its tokens and its salt alone: no images, no
    embeddings, no messages of another form."""
    if any(body.raw(name) for name in _UNKNOWN):
        return False
    messages = body.raw("messages")
    if begin_of(messages) != b"[":
        return True
    if len(messages) > MOST_PROMPT:
        return False
    try:
        contents = [message.content for message in _messages.decode(messages)]
    except (ValueError, RecursionError):
        return False
    return all(
        part.type == "text" for content in contents if isinstance(content, list) for part in content
    )


def question_of(body: Body) -> bytes | None:
    """What /tokenize is asked for the tokens of a request; None if they cannot be known."""
    if not is_text(body):
        return None
    if begin_of(body.raw("messages")) == b"[":
        return msgspec.json.encode({n: body.fields[n] for n in _CHAT_FIELDS if n in body.fields})
    prompt = only_prompt(body)
    if len(prompt) > MOST_PROMPT:
        return None
    fields = {name: body.fields[name] for name in _COMPLETION_FIELDS if name in body.fields}
    return msgspec.json.encode({**fields, "prompt": msgspec.Raw(prompt)})


def _end(lengths: dict[int, int], mask: int, count: int) -> None:
    """Notes the length of each holder in ``mask``."""
    while mask:
        bit = mask & -mask
        lengths[bit] = count
        mask ^= bit


class PrefixMap:
    """Prefix hash -> its holders, a bit each. Forgets the least recently used prefixes."""

    def __init__(self, remembered: int = _REMEMBERED, most_gone: int = _MOST_GONE) -> None:
        self._masks: OrderedDict[bytes | int, int] = OrderedDict()
        self._last: tuple[Prompt | None, dict[int, int]] = (None, {})
        self._remembered, self._most_gone = remembered, most_gone
        self._bits, self._free = 0, list[int]()
        self._gone: list[int] = []  # that entries may have

    def __len__(self) -> int:
        return len(self._masks)

    def holder(self) -> int:
        """The bit of a new holder."""
        if self._free:
            return self._free.pop()
        self._bits += 1
        return 1 << self._bits

    def note(self, prompt: Prompt | None, bit: int) -> None:
        """Notes that the holder ``bit`` has all of ``prompt``."""
        self._last = (None, {})
        for digest in reversed(prompt.prefixes if prompt else ()):  # heads are forgotten last
            self._masks[digest] = self._masks.get(digest, 0) | bit
            self._masks.move_to_end(digest)
        while len(self._masks) > self._remembered:
            self._masks.popitem(last=False)

    def held(self, prompt: Prompt | None) -> dict[int, int]:
        """Chunks at the beginning of ``prompt`` that each holder of the first one has."""
        if self._last[0] is not prompt:
            self._last = (prompt, self._held(prompt))
        return self._last[1]

    def _held(self, prompt: Prompt | None) -> dict[int, int]:
        lengths: dict[int, int] = {}
        before = count = 0
        for digest in prompt.prefixes if prompt else ():
            now = self._masks.get(digest, 0)
            if now != before:
                if count:
                    now &= before
                _end(lengths, before & ~now, count)
                if not now:
                    return lengths
                before = now
            count += 1
        _end(lengths, before, count)
        return lengths

    def forget(self, bit: int) -> None:
        """Forgets all prefixes of a holder, whose bit is another one's later: entries are cleared
        of 256 at a time, which takes .2 s."""
        self._last = (None, {})
        self._gone.append(bit)
        if len(self._gone) < self._most_gone:
            return
        gone = sum(self._gone)
        kept = ((digest, mask & ~gone) for digest, mask in self._masks.items())
        self._masks = OrderedDict((digest, mask) for digest, mask in kept if mask)
        self._free, self._gone = self._free + self._gone, []
