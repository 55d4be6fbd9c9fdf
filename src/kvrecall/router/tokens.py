"""The tokens of prompts, from the instances' own /tokenize: exact, with chat template and tools,
and without a model at the router."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvrecall.router.bodies import MOST_PROMPT, Body, aside, begin_of
from kvrecall.router.fleet import Instance
from kvrecall.router.prefixes import Prompt, only_prompt
from kvrecall.router.upstream import InstanceFailedError, Upstream

_TOKENIZE_S = 5.0
_CHAT_FIELDS = (
    "model messages add_generation_prompt continue_final_message add_special_tokens "
    "chat_template chat_template_kwargs tools"
).split()
_COMPLETION_FIELDS = "model prompt add_special_tokens".split()
_UNKNOWN = (
    "prompt_embeds truncate_prompt_tokens mm_processor_kwargs documents reasoning_effort"
).split()
"""Fields with which a prompt has other tokens, or blocks, than /tokenize says."""


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
    except (msgspec.DecodeError, RecursionError):
        return False
    return all(
        part.type == "text" for content in contents if isinstance(content, list) for part in content
    )


def _asked(body: Body) -> bytes | None:
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


class _TokenIds(msgspec.Struct):
    tokens: tuple[int, ...]


_answer = msgspec.json.Decoder(_TokenIds)


def _tokens_in(content: bytes) -> tuple[int, ...] | None:
    try:
        return _answer.decode(content).tokens
    except (msgspec.DecodeError, RecursionError):
        return None


async def tokens_of(
    upstream: Upstream,
    instance: Instance,
    body: Body,
    prompt: Prompt,
    headers: Mapping[str, str],
) -> tuple[int, ...] | None:
    """The tokens of a request with one prompt, as ``instance`` cuts it; None if they cannot be
    known."""
    if prompt.given is not None:
        return prompt.given if await aside(body.nbytes, is_text, body) else None
    question = await aside(body.nbytes, _asked, body)
    if question is None:
        return None
    try:
        answer = await upstream.ask(instance, "/tokenize", question, headers, _TOKENIZE_S)
    except InstanceFailedError:
        return None
    if answer.status != 200:
        return None
    return await aside(len(answer.content), _tokens_in, answer.content)
