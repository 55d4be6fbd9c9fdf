"""What retrieval did in this worker, so that a run in which it never acted can be told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

logger = logging.getLogger("vllm.kvrecall")


@dataclass(slots=True)
class Activity:
    """Running totals. Blocks are counted once a layer and KV head."""

    steps: int = 0
    """Engine steps."""
    steps_sparse: int = 0
    """Steps in which at least one sequence was to be attended to sparsely."""
    sequences_sparse: int = 0
    """Decoded tokens that were to be attended to sparsely."""
    sequences_gated: int = 0
    """Decoded tokens past the dense boundary attended to densely, as that is as fast or faster."""
    layers_sparse: int = 0
    """Sparse attentions made: one a layer and decoded token."""
    blocks_considered: int = 0
    """Middle blocks that selection chose from."""
    blocks_selected: int = 0
    """Middle blocks chosen."""
    blocks_attended: int = 0
    """Blocks attended to sparsely: init, chosen and local."""
    blocks_digested: int = 0
    """Blocks whose digests were computed, once for all layers."""
    sequences_offloaded: int = 0
    """Decoded tokens of partially offloaded sequences."""
    blocks_offloaded: int = 0
    """Blocks that left the device, once for all layers."""
    blocks_left: int = 0
    """Blocks of prefixes found in the pool that were not loaded but left there, once for all
    layers."""
    bytes_digests: int = 0
    """Bytes of their digests, which were loaded."""
    digests_mended: int = 0
    """Blocks whose digests came damaged from the pool's memory and were computed anew, once for
    each layer."""
    blocks_hit: int = 0
    """Chosen blocks that had left the device and were found in its slots."""
    blocks_loaded: int = 0
    """Chosen blocks that had left the device and were loaded."""
    bytes_loaded: int = 0
    """Bytes copied from the arena to the slots."""

    def totals(self) -> dict[str, int]:
        return asdict(self)


def totals_of(activities: Iterable[Activity]) -> dict[str, int]:
    """Their sums."""
    totals = Activity().totals()
    for activity in activities:
        for name, count in activity.totals().items():
            totals[name] += count
    return totals


class ActivityLog:
    """Says in the log what was done since it last did, at most once in ``every`` seconds."""

    def __init__(
        self, activity: Activity, every: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._activity = activity
        self._every = every
        self._clock = clock
        self._said_at = float("-inf")
        self._said = activity.totals()

    def sparse_step(self) -> None:
        """To be called after a step that attended sparsely has been planned."""
        now = self._clock()
        if now < self._said_at + self._every:
            return
        totals = self._activity.totals()
        new = {name: count - self._said[name] for name, count in totals.items()}
        self._said_at, self._said = now, totals
        logger.info(
            "kvrecall: retrieval: %(steps_sparse)d of %(steps)d steps sparse; of "
            "%(blocks_considered)d blocks considered %(blocks_selected)d chosen; "
            "%(sequences_gated)d tokens left dense by the gate; of blocks off the device "
            "%(blocks_hit)d found in slots, %(blocks_loaded)d loaded",
            new,
        )


class ActivityExtension:
    """A vLLM ``worker_extension_cls``: ``llm.collective_rpc("retrieval_activity")``."""

    vllm_config: Any

    def retrieval_activity(self) -> dict[str, int]:
        """Totals of this worker."""
        from kvrecall.engines.vllm.attention.backend import retrieval_groups

        return totals_of(group.activity for group in retrieval_groups(self.vllm_config))
