"""vLLM's API server: what it passes on of an engine's steps, and its request handlers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from kvrecall.engines.vllm.compat.patches import install

Handler = TypeVar("Handler")


def note_outputs(core: Any, note: Callable[[Any], None]) -> None:
    """Has ``note`` called with all outputs that ``core``, vLLM's client of its engines, gets of
    them from now on (EngineCoreOutputs, one step of one engine)."""

    def make(fetch: Any) -> Any:
        async def get_output_async() -> Any:
            outputs = await fetch()
            note(outputs)
            return outputs

        return get_output_async

    install("note-outputs", make, core)


def handler_as(handler: Any, kind: type[Handler], **attributes: Any) -> Handler:
    """A copy of ``handler`` of the subclass ``kind``, with more attributes: vLLM has configured it,
    with two dozen arguments that change from version to version, and nothing of that is to be
    repeated here. The patch ``recall-in-usage``."""
    twin = copy.copy(handler)
    twin.__class__ = kind
    vars(twin).update(attributes)
    return twin
