"""What a client asks of the router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvrecall.router.prefixes import Prompt


@dataclass(frozen=True, slots=True)
class Asked:
    """A completion that is asked for: where and what, and the headers that are passed on.

    ``prompt`` is None if it is in no form that the router can compare with others.
    """

    prompt: Prompt | None
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]

    def knowing(self, told: Mapping[str, Any]) -> Asked:
        """The same with ``told`` added to ``kv_transfer_params``."""
        if not told:
            return self
        given = self.body.get("kv_transfer_params")
        params = {**(given if isinstance(given, dict) else {}), **told}
        return replace(self, body={**self.body, "kv_transfer_params": params})
