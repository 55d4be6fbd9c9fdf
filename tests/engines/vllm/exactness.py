"""Checks of every variant: recalled bits are those of a device hit."""

from __future__ import annotations

from typing import Any

from engines.vllm.engine import Engine, prompt_of

BLOCK = 128


def hits(reply: dict[str, Any]) -> tuple[int, int, int]:
    """Prompt tokens from device, host and disk."""
    source = reply["from"]
    return source["device"], source["host"], source["disk"]


def push_out_of_host(engine: Engine, seed: int, prompts: int = 4, tokens: int = 1100) -> None:
    """Fills the host tier with other prompts, so that older blocks remain on disk only."""
    assert engine.flush()
    for extra in range(prompts):
        engine.ask(prompt_of(tokens, seed * 1000 + extra), max_tokens=1)
        assert engine.flush()
    assert engine.forget_device()


def same_bits_from_every_tier(
    engine: Engine, seed: int, like_computed: bool = True, **ask: Any
) -> None:
    """Computes a prompt, then takes it from device, host and disk, and compares to the bit.

    ``like_computed``: also the tokens of the first, which had no hit, as far as the engine's own
    prefix caching gives them.
    The engine's host tier must hold fewer blocks than ``push_out_of_host`` writes.
    """
    prompt = prompt_of(7 * BLOCK + 30, seed)
    computed = engine.ask(prompt, **ask)
    assert hits(computed) == (0, 0, 0)
    device = engine.ask(prompt, **ask)
    assert hits(device) == (7 * BLOCK, 0, 0)
    host = engine.ask_anew(prompt, **ask)
    assert hits(host) == (0, 7 * BLOCK, 0)
    push_out_of_host(engine, seed)
    disk = engine.ask(prompt, **ask)
    assert hits(disk)[0] == 0
    assert hits(disk)[2] >= 5 * BLOCK, "the host kept more than expected"
    assert sum(hits(disk)) == 7 * BLOCK
    for other in (host, disk):
        assert other["tokens"] == device["tokens"]
        assert other["logprobs"] == device["logprobs"]
    if like_computed:
        assert computed["tokens"] == device["tokens"]


def nothing_held(engine: Engine) -> None:
    """No lease and no reserved slot is left when nothing runs."""
    stats = engine.pool_stats()
    assert (stats["leases"], stats["reserved"]) == (0, 0)
