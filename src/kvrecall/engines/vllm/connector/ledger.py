"""What the scheduler side remembers of each request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvrecall.block import SHARED, BlockKey, Namespace, Tenant, TierName
from kvrecall.engines.vllm.connector.claim import Claim
from kvrecall.engines.vllm.connector.handover import Promise


@dataclass(slots=True)
class RequestState:
    """A request in the scheduler. Owned by ``RecallScheduler``.

    ``space`` is None if the request is not pooled, or not yet ``settled``: whose blocks these are
    is being found out. ``saved``: leading blocks of the chain that
    are in the pool or on their way; ``closed``: nothing more of it can be saved;
    ``touched``: the pool has been told that its chain is in use;
    ``computes``: it loads nothing, as a load failed or is audited;
    ``told``: the API process has been told where its prompt comes from;
    ``promise``: what a prefill instance said of its blocks; ``asking``: the pool asks another
    host for its blocks, since ``asked_at`` (monotonic seconds).
    """

    request: Any
    space: Namespace | None
    hashes_per_block: int
    tenant: Tenant = SHARED
    saved: int = 0
    settled: bool = False
    closed: bool = False
    computes: bool = False
    touched: bool = False
    told: bool = False
    promise: Promise | None = None
    asking: bool = False
    asked_at: float | None = None
    claim: Claim | None = None
    device_tokens: int = 0
    recalled: Counter[TierName] = field(default_factory=Counter)
    open_stores: set[int] = field(default_factory=set)
    _keys: list[BlockKey] = field(default_factory=list)

    @property
    def has_media(self) -> bool:
        """Whether there are images, sound or the like in its prompt."""
        return bool(getattr(self.request, "mm_features", None))

    def keys(self, count: int) -> list[BlockKey]:
        """Keys of the first ``count`` blocks, or of as many as are hashed by now."""
        if self.space is None:
            return []
        step = self.hashes_per_block
        hashes = self.request.block_hashes
        for index in range(len(self._keys), min(count, len(hashes) // step)):
            self._keys.append(self.space.key(hashes[(index + 1) * step - 1]))
        return self._keys[:count]

    def sources(self) -> dict[str, int]:
        """Prompt tokens by where their KV came from."""
        counts = {str(tier): self.recalled[tier] for tier in TierName}
        counts[str(TierName.DEVICE)] = self.device_tokens
        counts["computed"] = max(0, self.request.num_prompt_tokens - sum(counts.values()))
        return counts
