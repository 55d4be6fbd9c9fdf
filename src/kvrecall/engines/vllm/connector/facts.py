"""What the scheduler side must know of the engine it runs in."""

from __future__ import annotations

from dataclasses import dataclass

ALL_BLOCKS = 1 << 62

ORIGIN_BYTES = 8
"""At the end of every record: the origin of its writer, see ``audit``."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Settled when the engine starts.

    ``block_size``, ``hash_block_size``: tokens. ``block_bytes``: bytes of a block over all ranks.
    ``copies_in_step``: stores are off the device when their step returns.
    ``frees_while_running``: the engine may take blocks from a running request (sliding window).
    ``record_bytes``: of these, those of the KV; the origin follows. ``exact_blocks``: so many
    blocks of a sequence have the same KV however it is decoded: retrieval attention is approximate.
    ``recalls``: whether blocks may be loaded into it; if not it only saves.
    ``least_token_seconds``: computing a prompt token takes about as long, or longer; 0: unknown.
    """

    block_size: int
    hash_block_size: int
    block_bytes: int
    ranks: int
    copies_in_step: bool
    frees_while_running: bool
    recalls: bool = True
    least_token_seconds: float = 0.0
    exact_blocks: int = ALL_BLOCKS

    @property
    def record_bytes(self) -> int:
        return self.block_bytes - ORIGIN_BYTES
