"""The KV-cache spec of layers whose sequences may leave the device in part, and its manager.

A sequence's middle blocks go back to vLLM when its keeper says that they are safe elsewhere. In
exchange it holds slots: device blocks of no token's own, into which the worker recalls what each
layer and KV head needs. Slots are freed with the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec


@dataclass(frozen=True, kw_only=True)
class OffloadableSpec(FullAttentionSpec):
    """Full attention, as vLLM sees it."""

    @classmethod
    def of(cls, spec: FullAttentionSpec) -> OffloadableSpec:
        return cls(**{field.name: getattr(spec, field.name) for field in fields(spec)})


@dataclass(frozen=True, slots=True)
class Leave:
    """Blocks ``[first, end)`` of a sequence may go. It then needs ``least`` slots, and does better
    with ``slots``."""

    first: int
    end: int
    least: int
    slots: int


class Keeper(Protocol):
    """Who knows which blocks are safe elsewhere, and keeps them so while they are needed."""

    def review(self, request_id: str, tokens: int) -> Leave | None:
        """What may leave before the sequence's step with ``tokens`` tokens. None: nothing."""

    def left(self, request_id: str, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """These blocks went, and these slots were added."""

    def least_slots(self, request_id: str, tokens: int) -> int:
        """Slots without which a step with ``tokens`` tokens cannot be computed."""

    def ended(self, request_id: str) -> None:
        """The sequence gave up all its blocks and slots. It may not have been known."""


class OffloadManager(FullAttentionManager):
    """vLLM's manager of full attention, plus leaves. Without a keeper nothing ever leaves."""

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.keeper: Keeper | None = None
        self._slots: dict[str, list[Any]] = {}

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        if self.keeper is None or request_id not in self.req_to_blocks:
            return
        leave = self.keeper.review(request_id, processed_computed_tokens + 1)
        if leave is None:
            return
        leaving = self.req_to_blocks[request_id][leave.first : leave.end]
        held = len(self._slots.get(request_id, ()))
        room = self.block_pool.get_num_free_blocks() + sum(one.ref_cnt == 1 for one in leaving)
        if room < leave.least - held:
            return
        ids = [block.block_id for block in leaving]
        self._remove_blocks_in_range(request_id, leave.first, leave.end)
        wanted = min(leave.slots - held, self.block_pool.get_num_free_blocks())
        self.keeper.left(request_id, ids, self._add_slots(request_id, wanted))

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        blocks = super().get_num_blocks_to_allocate(request_id, num_tokens, *args, **kwargs)
        return blocks + self._lacking(request_id, num_tokens)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        lacking = self._lacking(request_id, num_tokens)
        if lacking:
            assert self.keeper is not None
            self.keeper.left(request_id, (), self._add_slots(request_id, lacking))
        return blocks

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        blocks = super().pop_blocks_for_free(request_id)
        if self.keeper is not None:
            self.keeper.ended(request_id)
        return [*blocks, *self._slots.pop(request_id, [])]

    def _lacking(self, request_id: str, tokens: int) -> int:
        if self.keeper is None or request_id not in self._slots:
            return 0
        return max(0, self.keeper.least_slots(request_id, tokens) - len(self._slots[request_id]))

    def _add_slots(self, request_id: str, count: int) -> list[int]:
        new = self.block_pool.get_new_blocks(max(0, count))
        self._slots.setdefault(request_id, []).extend(new)
        return [block.block_id for block in new]
