"""vLLM's manager of full attention for sequences whose middle blocks leave the device."""

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
class Offload:
    """Blocks ``[first, end)`` of a sequence may leave the device, or, for a starting sequence, need
    not be loaded. The sequence then needs at least ``least`` slots, and benefits from ``slots``."""

    first: int
    end: int
    least: int
    slots: int


class BlockPlanner(Protocol):
    """Decides which blocks of long sequences leave the device."""

    def left_in_pool(self, request_id: str) -> Offload | None:
        """The blocks of a starting request that stay in the pool."""

    def arrived(self, request_id: str, slots: Sequence[int]) -> None:
        """The request has started with the blocks of ``left_in_pool`` left there, and these
        slots."""

    def review(self, request_id: str, tokens: int) -> Offload | None:
        """The blocks that may leave the device now, of a sequence whose next step makes it that
        long."""

    def left(self, request_id: str, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """The sequence has released its next blocks and received additional slots."""

    def least_slots(self, request_id: str, tokens: int) -> int:
        """Minimum number of slots to decode the sequence at that length."""

    def ended(self, request_id: str) -> None:
        """The sequence has left the batch: ends its leases, unless steps under way read what they
        keep and their results count."""


class OffloadManager(FullAttentionManager):
    """vLLM's manager of full attention, which frees the blocks that the planner names. Without a
    planner no block leaves the device."""

    def __init__(self, kv_cache_spec: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.planner: BlockPlanner | None = None
        self._slots: dict[str, list[Any]] = {}

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        if self.planner is None or request_id not in self.req_to_blocks:
            return
        offload = self.planner.review(request_id, processed_computed_tokens + 1)
        if offload is None:
            return
        leaving = self.req_to_blocks[request_id][offload.first : offload.end]
        held = len(self._slots.get(request_id, ()))
        room = self.block_pool.get_num_free_blocks() + sum(one.ref_cnt == 1 for one in leaving)
        if room < offload.least - held:
            return
        ids = [block.block_id for block in leaving]
        self._remove_blocks_in_range(request_id, offload.first, offload.end)
        wanted = min(offload.slots - held, self.block_pool.get_num_free_blocks())
        self.planner.left(request_id, ids, self._add_slots(request_id, wanted))

    def get_num_blocks_to_allocate(
        self, request_id: str, tokens: int, found: Any, total: int, local: int, *etc: Any, **by: Any
    ) -> int:
        given = request_id, tokens, found, total, local, *etc
        blocks = super().get_num_blocks_to_allocate(*given, **by)
        left_in_pool = self._expected(request_id, total - local)
        if left_in_pool is None:
            return blocks + self._lacking(request_id, tokens)
        unneeded = found[left_in_pool.first : left_in_pool.end]
        lacking = left_in_pool.end - max(left_in_pool.first, len(found))
        spared = lacking + self._get_num_evictable_blocks(unneeded)
        return blocks - spared + left_in_pool.slots

    def add_local_computed_blocks(
        self, request_id: str, found: Sequence[Any], local: int, external: int
    ) -> None:
        left_in_pool = self._expected(request_id, external)
        if left_in_pool is None:
            super().add_local_computed_blocks(request_id, found, local, external)
            return
        kept = list(found)
        gone = len(kept[left_in_pool.first : left_in_pool.end])
        kept[left_in_pool.first : left_in_pool.end] = [self._null_block] * gone
        self.block_pool.touch([block for block in kept if not block.is_null])
        self.req_to_blocks[request_id].extend(kept)
        self.num_cached_block[request_id] = len(kept)

    def allocate_external_computed_blocks(
        self, request_id: str, local: int, external: int, **zeroing: bool
    ) -> None:
        """``zeroing``: what vLLM 0.32 and later say of it."""
        left_in_pool = self._expected(request_id, external)
        if left_in_pool is None:
            super().allocate_external_computed_blocks(request_id, local, external, **zeroing)
            return
        assert self.planner is not None
        blocks = self.req_to_blocks[request_id]
        total = (local + external) // self.block_size
        blocks.extend(self.block_pool.get_new_blocks(max(0, left_in_pool.first - len(blocks))))
        blocks.extend([self._null_block] * (left_in_pool.end - len(blocks)))
        blocks.extend(self.block_pool.get_new_blocks(max(0, total - len(blocks))))
        self.planner.arrived(request_id, self._add_slots(request_id, left_in_pool.slots))

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[Any]:
        blocks = super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        lacking = self._lacking(request_id, num_tokens)
        if lacking:
            assert self.planner is not None
            self.planner.left(request_id, (), self._add_slots(request_id, lacking))
        return blocks

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        blocks = super().pop_blocks_for_free(request_id)
        if self.planner is not None:
            self.planner.ended(request_id)
        return [*blocks, *self._slots.pop(request_id, [])]

    def _expected(self, request_id: str, external_tokens: int) -> Offload | None:
        if self.planner is None or external_tokens <= 0 or request_id in self._slots:
            return None
        return self.planner.left_in_pool(request_id)

    def _lacking(self, request_id: str, tokens: int) -> int:
        if self.planner is None or request_id not in self._slots:
            return 0
        return max(0, self.planner.least_slots(request_id, tokens) - len(self._slots[request_id]))

    def _add_slots(self, request_id: str, count: int) -> list[int]:
        new = self.block_pool.get_new_blocks(max(0, count))
        self._slots.setdefault(request_id, []).extend(new)
        return [block.block_id for block in new]
