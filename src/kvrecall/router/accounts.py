"""Where a prompt's tokens came from, over both instances of a request, written into its reply."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrecall.router.instance import Instance

SOURCES = ("device", "host", "disk", "remote", "unspecified", "computed")


def split_of(value: object) -> dict[str, int]:
    """Tokens by source from what an instance said of itself; empty if it said nothing."""
    if not isinstance(value, Mapping):
        return {}
    return {name: value[name] for name in SOURCES if type(value.get(name)) is int}


@dataclass(slots=True)
class Account:
    """What is known of one request.

    ``prefill``, ``decode``: the instances that served it. ``prefill_split``, ``decode_split``:
    the prompt's tokens by where each took them from. ``outcome``: of a stream, how it ended.
    """

    prefill: Instance | None = None
    decode: Instance | None = None
    prefill_split: dict[str, int] = field(default_factory=dict)
    decode_split: dict[str, int] = field(default_factory=dict)
    outcome: str = "cancelled"

    def header(self) -> str:
        """``x-kvrecall``: instances, and what is known by now of where tokens came from."""
        words = []
        for role, instance, split in (
            ("prefill", self.prefill, self.prefill_split),
            ("decode", self.decode, self.decode_split),
        ):
            if instance is not None:
                words.append(f"{role}={instance.name}")
                words += [f"{role}.{name}={count}" for name, count in split.items()]
        return ";".join(words)

    def complete(self, usage: dict[str, Any]) -> None:
        """Completes the usage object of the decode instance's reply.

        ``cached_tokens`` becomes what no instance computed for this request: to the decode
        instance, everything the prefill instance has just computed looks cached.
        """
        details = usage.get("prompt_tokens_details") or {}
        self.decode_split = split_of(details.get("recall"))
        if self.prefill_split:
            cached = sum(self.prefill_split.values()) - self.prefill_split.get("computed", 0)
            details = {**details, "cached_tokens": cached, "prefill": dict(self.prefill_split)}
        if details:
            usage["prompt_tokens_details"] = details

    def complete_event(self, event: bytes) -> bytes:
        """``event`` of a stream, its usage completed if it has one."""
        if b'"usage":{' not in event or not event.startswith(b"data: "):
            return event
        try:
            chunk = json.loads(event[6:])
        except ValueError:
            return event
        if not isinstance(chunk, dict) or not isinstance(chunk.get("usage"), dict):
            return event
        self.complete(chunk["usage"])
        text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
        return f"data: {text}\n\n".encode()
