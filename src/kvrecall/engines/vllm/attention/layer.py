"""One attention layer's digests, and its sparse attention over them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from kvrecall.attention.coding import encode
from kvrecall.attention.kernels.native import native_search
from kvrecall.attention.layout import Layout
from kvrecall.attention.selection import Choice, selector_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.attention.split import Split
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.recalled import (
    OffloadedSequence,
    RecalledBlocks,
    digests_of_layer,
    seals_of_layer,
)
from kvrecall.engines.vllm.attention.rest import Chosen, RestEstimator
from kvrecall.engines.vllm.attention.room import DigestRoom, Digests
from kvrecall.engines.vllm.attention.rows import RowKernel
from kvrecall.engines.vllm.attention.seals import SEAL_BYTES, broken, seals_of
from kvrecall.engines.vllm.attention.steps import SparseSequence, SparseStep
from kvrecall.engines.vllm.connector.wire import Departure
from kvrecall.engines.vllm.serving.warmth import WORKER

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
        self._settings = settings
        self._kernel = kernel
        self._shape = shape = kernel.shape
        self._activity = activity
        self._layout = Layout.of(settings, shape.block_size)
        self._selector = selector_of(settings, self._layout)
        if kernel.device.type == "cpu":  # compiled now, and not while the first token waits
            native_search(shape.group, self._layout.kind.parts * shape.head_dim)
        self._rest = RestEstimator(kernel, self._layout) if self._layout.rest else None
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

    def settle(self) -> None:
        """Ends all copies made ahead."""
        for recalled in self._recalled.values():
            recalled.settle()

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
        grouped = query.reshape(-1, shape.group, shape.head_dim)
        found = self._choices(grouped, step, scale)
        table, seq_lens, plan = step.table, step.seq_lens, step.plan
        if any(one.taken is not None for one in found):
            table, seq_lens = _shortened(step, found, shape.block_size)
            plan = self._kernel.plan(seq_lens, step.starts)
        attended = self._kernel.attend(
            grouped, kv_cache, table, seq_lens, step.starts, plan, scale, softcap
        )
        output = attended.output
        if self._rest is not None:
            output = self._rest.added(
                attended, grouped, kv_cache, table, seq_lens, found, scale, softcap
            )
        return output.view(len(step.sequences), shape.heads, shape.head_dim)

    def choose(self, query: torch.Tensor, step: SparseStep, scale: float) -> None:
        """Writes every sequence's chosen blocks into the step's table: those that ``attend`` would
        attend to. ``query``: ``[sequences, heads, dim]``."""
        self._choices(query.reshape(-1, self._shape.group, self._shape.head_dim), step, scale)

    def _choices(self, grouped: torch.Tensor, step: SparseStep, scale: float) -> list[Chosen]:
        """As ``choose``. ``grouped``: ``[sequences * kv_heads, group, dim]``."""
        heads = self._shape.kv_heads
        found = []
        for at, sequence in enumerate(step.sequences):
            rows = slice(at * heads, (at + 1) * heads)
            found.append(self._choose(grouped[rows], sequence, step.table[rows], scale))
        return found

    def _choose(
        self, query: torch.Tensor, sequence: SparseSequence, rows: torch.Tensor, scale: float
    ) -> Chosen:
        """Writes the chosen blocks into the sequence's rows of the table."""
        split = sequence.split
        if sequence.away is not None:
            ids, chosen = self._recall(query, sequence, sequence.away, scale)
        else:
            ids, chosen = self._on_device(query, sequence, scale)
        heads = self._shape.kv_heads
        rows[:, split.init : split.init + split.chosen] = ids * heads + self._head
        untaken = 0 if chosen.taken is None else int((~chosen.taken).sum())
        self._activity.layers_sparse += 1
        self._activity.blocks_considered += split.middle * heads
        self._activity.blocks_selected += split.chosen * heads - untaken
        self._activity.blocks_attended += split.attended_blocks * heads - untaken
        return chosen

    def _on_device(
        self, query: torch.Tensor, sequence: SparseSequence, scale: float
    ) -> tuple[torch.Tensor, Chosen]:
        """Device blocks of those chosen: int32 ``[kv_heads, chosen]``."""
        assert self._room is not None
        if sequence.runs:
            runs = [self._room.part(slice(first, end)) for first, end in sequence.runs]
        else:
            runs = [self._room.part(sequence.blocks[sequence.places])]
        choice = self._chosen(query, runs, sequence.split.chosen, scale)
        # In the sequence's order, so that the sum does not depend on where the blocks lie.
        places, taken = _in_order(sequence.places[choice.blocks], choice.taken)
        self._see(places, sequence.split)
        digests = None
        if self._rest is not None:
            digests = self._rows[:, sequence.blocks]
        return sequence.blocks[places], Chosen(places, taken, sequence.split, digests)

    def _recall(
        self,
        query: torch.Tensor,
        sequence: SparseSequence,
        away: OffloadedSequence,
        scale: float,
    ) -> tuple[torch.Tensor, Chosen]:
        """As ``_on_device``, after loading what is missing of the blocks that have left."""
        recalled = self._recalled[away.key]
        stayed = sequence.blocks[away.count :]
        runs = [recalled.digests]
        if len(stayed):
            assert self._room is not None
            runs.append(self._room.part(stayed))
        split = sequence.split
        ahead = min(self._ahead_of(split), split.middle - split.chosen)
        choice = self._chosen(query, runs, split.chosen, scale, ahead)
        places, taken = _in_order(choice.blocks, choice.taken)
        self._see(places, split)
        left = places < away.count
        wanted = left if taken is None else left & taken
        slots = recalled.fetch(places.cpu().numpy(), wanted.cpu().numpy())
        into = away.slots[torch.from_numpy(slots)].to(places.device)
        ids = torch.where(left, into, sequence.blocks[places])
        if ahead:
            later = choice.later.cpu()
            recalled.fetch_ahead(later.numpy(), (later < away.count).numpy())
        digests = torch.cat([run.rows for run in runs], 1) if self._rest is not None else None
        return ids, Chosen(places, taken, split, digests)

    def _chosen(
        self,
        query: torch.Tensor,
        runs: Sequence[Digests],
        count: int,
        scale: float,
        ahead: int = 0,
    ) -> Choice:
        rows = [run.rows for run in runs]
        coarse = [run.coarse for run in runs if run.coarse is not None]
        return self._selector.choose(query, rows, count, scale, ahead, coarse or None)

    def _see(self, chosen: torch.Tensor, split: Split) -> None:
        """Notes, now and then, which of the middle blocks were chosen: ``[kv_heads, chosen]``."""
        if self._number is not None and self._activity.steps_sparse % SEEN_EVERY == 1:
            middle = np.arange(split.init, split.local)
            WORKER.note(self._number, middle, chosen.cpu().numpy() + split.init, split.blocks)

    def _ahead_of(self, split: Split) -> int:
        return math.ceil(split.middle * self._settings.prefetch_share)

    def _digests_of(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """As they are kept: int8 ``[blocks, kv_heads, rows, width]``."""
        keys = self._kernel.keys.read(kv_cache, block_ids)
        values = None if self._rest is None else self._kernel.values.read(kv_cache, block_ids)
        return encode(self._layout.rows_of(keys, values), self._layout.rest)

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


def _in_order(
    places: torch.Tensor, taken: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chosen blocks ``[kv_heads, chosen]`` in the sequence's order, and which of them are taken:
    those that are not come last, and name a block that is."""
    if taken is None:
        return places.sort(-1).values, None
    order = places.masked_fill(~taken, torch.iinfo(places.dtype).max).sort(-1)
    taken = taken.gather(1, order.indices)
    return torch.where(taken, order.values, order.values[:, :1]), taken


def _shortened(
    step: SparseStep, found: Sequence[Chosen], block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The step's table and lengths without the blocks that are not taken."""
    heads = len(step.table) // len(found)
    lacking = torch.cat([one.untaken(heads) for one in found])
    device = step.table.device
    ends = torch.tensor([one.split.init + one.split.chosen for one in found], device=device)
    after = ends.repeat_interleave(heads) - lacking
    places = torch.arange(step.table.shape[1], device=device)[None]
    places = places + (places >= after[:, None]) * lacking[:, None]
    table = step.table.gather(1, places.clamp(max=step.table.shape[1] - 1))
    return table, step.seq_lens - lacking.to(torch.int32) * block_size
