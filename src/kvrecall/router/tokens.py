"""The tokens of prompts, from the instances' own /tokenize: exact, with chat template and tools,
and without a model at the router."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvrecall.router.fleet import Instance
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


def is_text(body: Mapping[str, Any]) -> bool:
    """Whether the blocks of a request depend on its tokens and its salt alone: no images, no
    embeddings."""
    if any(body.get(name) is not None for name in _UNKNOWN):
        return False
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            parts = (part for part in content if isinstance(part, Mapping))
            if any(part.get("type") != "text" for part in parts):
                return False
    return True


class Tokens:
    """Asks instances for the tokens of prompts."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def of(
        self, body: Mapping[str, Any], headers: Mapping[str, str], instance: Instance
    ) -> tuple[int, ...] | None:
        """The tokens of a request with one prompt, as ``instance`` cuts it; None if they cannot be
        known."""
        if not is_text(body):
            return None
        is_chat = isinstance(body.get("messages"), list)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, list) and not is_chat:
            return tuple(prompt)
        fields = _CHAT_FIELDS if is_chat else _COMPLETION_FIELDS
        asked = {name: body[name] for name in fields if name in body}
        if not is_chat:
            asked["prompt"] = prompt
        try:
            answer = await self._upstream.ask(instance, "/tokenize", asked, headers, _TOKENIZE_S)
        except InstanceFailedError:
            return None
        tokens = answer.json().get("tokens") if answer.status == 200 else None
        if isinstance(tokens, list) and all(type(one) is int for one in tokens):
            return tuple(tokens)
        return None
