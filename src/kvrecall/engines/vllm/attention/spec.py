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


@dataclass(frozen=True, slots=True)
class Absence:
    """Blocks ``[first, end)`` of a sequence that begins need not come to the device: they are safe
    elsewhere. It gets ``slots`` slots instead."""

    first: int
    end: int
    slots: int


class Keeper(Protocol):
    """Who knows which blocks are safe elsewhere, and keeps them so while they are needed."""

    def expected(self, request_id: str) -> Absence | None:
        """What of the blocks that are to be loaded for a sequence may stay where they are."""

    def arrived(self, request_id: str, slots: Sequence[int]) -> None:
        """The sequence has its blocks but for those, and these slots."""

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
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        blocks = super().get_num_blocks_to_allocate(
            request_id,
            num_tokens,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            *args,
            **kwargs,
        )
        external = total_computed_tokens - num_local_computed_tokens
        absence = self._expected(request_id, external)
        if absence is None:
            return blocks + self._lacking(request_id, num_tokens)
        unneeded = new_computed_blocks[absence.first : absence.end]
        lacking = absence.end - max(absence.first, len(new_computed_blocks))
        spared = lacking + self._get_num_evictable_blocks(unneeded)
        return blocks - spared + absence.slots

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Any],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        absence = self._expected(request_id, num_external_computed_tokens)
        found = list(new_computed_blocks)
        if absence is not None:
            gone = len(found[absence.first : absence.end])
            found[absence.first : absence.end] = [self._null_block] * gone
            self.block_pool.touch([block for block in found if not block.is_null])
            self.req_to_blocks[request_id].extend(found)
            self.num_cached_block[request_id] = len(found)
            return
        super().add_local_computed_blocks(
            request_id, found, num_local_computed_tokens, num_external_computed_tokens
        )

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        absence = self._expected(request_id, num_external_computed_tokens)
        if absence is None:
            super().allocate_external_computed_blocks(
                request_id,
                num_local_computed_tokens,
                num_external_computed_tokens,
                record_for_zeroing,
            )
            return
        assert self.keeper is not None
        blocks = self.req_to_blocks[request_id]
        total = (num_local_computed_tokens + num_external_computed_tokens) // self.block_size
        blocks.extend(self.block_pool.get_new_blocks(max(0, absence.first - len(blocks))))
        blocks.extend([self._null_block] * (absence.end - len(blocks)))
        blocks.extend(self.block_pool.get_new_blocks(max(0, total - len(blocks))))
        self.keeper.arrived(request_id, self._add_slots(request_id, absence.slots))

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

    def _expected(self, request_id: str, external_tokens: int) -> Absence | None:
        if self.keeper is None or external_tokens <= 0 or request_id in self._slots:
            return None
        return self.keeper.expected(request_id)

    def _lacking(self, request_id: str, tokens: int) -> int:
        if self.keeper is None or request_id not in self._slots:
            return 0
        return max(0, self.keeper.least_slots(request_id, tokens) - len(self._slots[request_id]))

    def _add_slots(self, request_id: str, count: int) -> list[int]:
        new = self.block_pool.get_new_blocks(max(0, count))
        self._slots.setdefault(request_id, []).extend(new)
        return [block.block_id for block in new]
