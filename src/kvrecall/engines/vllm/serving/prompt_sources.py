"""Where requests' prompt tokens came from, in the API process as soon as it is known.

vLLM hands a connector's last word on a request to the API process only when the *engine* ends it;
a stop string is found outside the engine, which then merely aborts the request. So the split of
every request also travels with the step's statistics, and lies here for the reply to pick up.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping

_REMEMBERED = 16_384
_CHILD = re.compile(r"^\d+_")  # one of several samples of a request
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")  # vLLM's own, to make ids unique


class PromptSources:
    """The latest splits by request, as many as can be under way at once. Not thread-safe."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._splits: OrderedDict[str, Mapping[str, int]] = OrderedDict()
        self._remembered = remembered

    def post(self, engine_id: str, split: Mapping[str, int]) -> None:
        """Notes the split of a request under the engine's name for it. Of several samples of one
        request the first one counts: the others hit what it computed."""
        name = _CHILD.sub("", _SUFFIX.sub("", engine_id))
        self._splits.setdefault(name, split)
        while len(self._splits) > self._remembered:
            self._splits.popitem(last=False)

    def find(self, request_id: str) -> Mapping[str, int] | None:
        """The split of a request by the name the API gave it."""
        return self._splits.get(_CHILD.sub("", request_id))


PROMPT_SOURCES = PromptSources()
"""The board of this (API) process."""
