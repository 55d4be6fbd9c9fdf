"""One attention layer's digests, and its sparse attention over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvrecall.attention.kernels import int8
from kvrecall.attention.layout import Layout, encode
from kvrecall.attention.selection import selector_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.attention.split import Split
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.recalled import (
    OffloadedSequence,
    RecalledBlocks,
    digests_of_layer,
    seals_of_layer,
)
from kvrecall.engines.vllm.attention.room import DigestRoom, Digests
from kvrecall.engines.vllm.attention.rows import RowKernel
from kvrecall.engines.vllm.attention.seals import SEAL_BYTES, broken, seals_of
from kvrecall.engines.vllm.attention.steps import SparseSequence, SparseStep
from kvrecall.engines.vllm.connector.wire import Departure
from kvrecall.engines.vllm.serving.heat import WORKER_HEAT

SEEN_EVERY = 16
"""Of so many sparse steps it is noted in one where blocks were chosen."""

AT_ONCE = 64
"""Blocks unpacked at a time while digesting."""


class RetrievalLayer:
    """Digests of one layer, coded in eight bits, and attention to what is chosen by them.

    Memory: about ``rows * parts / (4 * block_size)`` of a layer's KV cache of 16 bits (a
    thirty-second by default), taken from the system as blocks are first digested and never more.
    """

    def __init__(
        self,
        settings: RetrievalSettings,
        kernel: RowKernel,
        activity: Activity,
        number: int | None = None,
    ) -> None:
        """``number``: the layer's, under which it is told where it chose blocks; None: nowhere."""
        self._number = number
        self._kernel = kernel
        self._shape = shape = kernel.shape
        self._activity = activity
        self._layout = Layout.of(settings, shape.block_size)
        self._selector = selector_of(settings, self._layout)
        int8.prepare()
        self._room: DigestRoom | None = None
        self._seals = torch.empty(0, SEAL_BYTES, dtype=torch.uint8)
        self._head = torch.arange(shape.kv_heads, dtype=torch.int32, device=kernel.device)[:, None]
        self._recalled: dict[str, RecalledBlocks] = {}

    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Computes the digests of these blocks from the keys they hold. Must be full blocks."""
        if not len(block_ids):
            return
        room = self._room_for(kv_cache)
        for ids in torch.split(block_ids.to(self._kernel.device), AT_ONCE):
            room.write(ids, self._digests_of(kv_cache, ids).transpose(0, 1))

    def seal(self, block_ids: torch.Tensor) -> None:
        """These blocks, whose digests are fresh, go to the pool: notes their digests' checksums."""
        ids = block_ids.to(self._kernel.device)
        self._seals[ids] = seals_of(self._rows[:, ids].transpose(0, 1))

    def unsealed(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Those of these blocks, which came from the pool, whose digests came damaged. The others'
        are taken."""
        ids = block_ids.to(self._kernel.device)
        assert self._room is not None
        self._room.wrote(ids)
        rows = self._room.rows[:, ids].transpose(0, 1)
        damaged = block_ids[broken(rows, self._seals[ids]).cpu()]
        self._activity.digests_mended += len(damaged)
        return damaged

    def depart(
        self,
        sequence: OffloadedSequence,
        departure: Departure,
        kv_cache: torch.Tensor,
        name: str,
    ) -> None:
        """Keeps the digests of blocks that are about to leave the device. ``name``: the layer's."""
        room = self._room_for(kv_cache)
        recalled = self._recalled.setdefault(sequence.key, self._begin(sequence, kv_cache, name))
        recalled.depart(room.rows[:, list(departure.block_ids)])

    def arrive(self, sequence: OffloadedSequence, kv_cache: torch.Tensor, name: str) -> None:
        """Takes the digests of a sequence that begins off the device from its blocks' records.
        Those that are damaged there are computed anew from the blocks' keys."""
        records, offsets = sequence.records, sequence.offsets
        heads, _, nbytes = self.digest_rows(kv_cache).transpose(0, 1).shape
        pages = records.pages(offsets, digests_of_layer(name), heads * nbytes)
        seals = torch.from_numpy(records.pages(offsets, seals_of_layer(name), SEAL_BYTES))
        device = self._kernel.device
        stored = torch.from_numpy(pages).view(self._rows.dtype).to(device)
        stored = stored.view(len(pages), heads, *self._rows.shape[2:])
        damaged = broken(stored, seals.to(device)).nonzero().flatten()
        if len(damaged):
            kept = records.pages(offsets[damaged.cpu().numpy()], name, kv_cache[0].nbytes)
            blocks = _blocks_of(torch.from_numpy(kept).to(device), kv_cache)
            ids = torch.arange(len(blocks), device=device)
            stored[damaged] = self._digests_of(blocks, ids)
            self._activity.digests_mended += len(damaged)
        recalled = self._begin(sequence, kv_cache, name)
        recalled.depart(stored.transpose(0, 1))
        self._recalled[sequence.key] = recalled
        self._activity.bytes_digests += pages.nbytes + seals.nbytes

    def _begin(
        self, sequence: OffloadedSequence, kv_cache: torch.Tensor, name: str
    ) -> RecalledBlocks:
        """A sequence with nothing off the device yet."""
        room = DigestRoom(self._kernel, self._layout)
        return RecalledBlocks(sequence, self._kernel.writer(kv_cache), room, name, self._activity)

    def digest_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The digests' bytes, a row a block: uint8 ``[blocks, kv_heads, bytes]``, a view."""
        return self._room_for(kv_cache).rows.flatten(2).view(torch.uint8).transpose(0, 1)

    def seal_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The digests' checksums, a row a block: uint8 ``[blocks, SEAL_BYTES]``, not a copy."""
        self._room_for(kv_cache)
        return self._seals

    def forget(self, key: str) -> None:
        """The sequence is no more."""
        self._recalled.pop(key, None)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        scale: float,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Attention of the step's sparse tokens, in order: ``[sequences, heads, dim]``."""
        shape = self._shape
        self.choose(query, step, scale)
        output = self._kernel.attend(
            query.reshape(-1, shape.group, shape.head_dim), kv_cache, step.table, step.seq_lens,
            step.starts, step.plan, scale, softcap,
        )  # fmt: skip
        return output.view(len(step.sequences), shape.heads, shape.head_dim)

    def choose(self, query: torch.Tensor, step: SparseStep, scale: float) -> None:
        """Writes every sequence's chosen blocks into the step's table, as ``attend`` does.

        ``query``: ``[sequences, heads, dim]``."""
        heads = self._shape.kv_heads
        grouped = query.reshape(-1, self._shape.group, self._shape.head_dim)
        for at, sequence in enumerate(step.sequences):
            rows = slice(at * heads, (at + 1) * heads)
            split = sequence.split
            choose = self._on_device if sequence.away is None else self._recall
            ids = choose(grouped[rows], sequence, scale)
            step.table[rows, split.init : split.init + split.chosen] = ids * heads + self._head
            self._activity.layers_sparse += 1
            self._activity.blocks_considered += split.middle * heads
            self._activity.blocks_selected += split.chosen * heads
            self._activity.blocks_attended += split.attended_blocks * heads

    def _on_device(
        self, query: torch.Tensor, sequence: SparseSequence, scale: float
    ) -> torch.Tensor:
        """Device blocks of those chosen: int32 ``[kv_heads, chosen]``."""
        assert self._room is not None
        if sequence.runs:
            runs = [self._room.part(slice(first, end)) for first, end in sequence.runs]
        else:
            runs = [self._room.part(sequence.blocks[sequence.places])]
        chosen = self._chosen(query, runs, sequence.split.chosen, scale)
        # In the sequence's order, so that the sum does not depend on where the blocks lie.
        places = sequence.places[chosen].sort(-1).values
        self._see(places, sequence.split)
        return sequence.blocks[places]

    def _recall(self, query: torch.Tensor, sequence: SparseSequence, scale: float) -> torch.Tensor:
        """As ``_on_device``, after loading what is missing of the blocks that have left."""
        away = sequence.away
        assert away is not None
        recalled = self._recalled[away.key]
        stayed = sequence.blocks[away.count :]
        runs = [recalled.digests]
        if len(stayed):
            assert self._room is not None
            runs.append(self._room.part(stayed))
        places = self._chosen(query, runs, sequence.split.chosen, scale).sort(-1).values
        self._see(places, sequence.split)
        left = places < away.count
        slots = recalled.fetch(places.cpu().numpy(), left.cpu().numpy())
        into = away.slots[torch.from_numpy(slots)].to(places.device)
        return torch.where(left, into, sequence.blocks[places])

    def _chosen(
        self, query: torch.Tensor, runs: Sequence[Digests], count: int, scale: float
    ) -> torch.Tensor:
        rows = [run.rows for run in runs]
        coarse = [run.coarse for run in runs if run.coarse is not None]
        return self._selector.choose(query, rows, count, scale, coarse or None)

    def _see(self, chosen: torch.Tensor, split: Split) -> None:
        """Notes, now and then, which of the middle blocks were chosen: ``[kv_heads, chosen]``."""
        if self._number is not None and self._activity.steps_sparse % SEEN_EVERY == 1:
            middle = np.arange(split.init, split.local)
            WORKER_HEAT.note(self._number, middle, chosen.cpu().numpy() + split.init, split.blocks)

    def _digests_of(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """As they are kept: int8 ``[blocks, kv_heads, rows, width]``."""
        return encode(self._layout.rows_of(self._kernel.keys.read(kv_cache, block_ids)))

    @property
    def _rows(self) -> torch.Tensor:
        """Of all blocks on the device."""
        assert self._room is not None
        return self._room.rows

    def _room_for(self, kv_cache: torch.Tensor) -> DigestRoom:
        if self._room is None:
            blocks = len(kv_cache)
            self._kernel.check(kv_cache)
            self._room = DigestRoom(self._kernel, self._layout, blocks)
            self._seals = torch.empty(blocks, SEAL_BYTES, dtype=torch.uint8, device=kv_cache.device)
        return self._room


def _blocks_of(pages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Pages as they are kept, uint8 ``[blocks, bytes]``, as blocks of a cache like that."""
    values = pages.view(like.dtype)
    return values.as_strided((len(values), *like.shape[1:]), (values.shape[1], *like.stride()[1:]))
