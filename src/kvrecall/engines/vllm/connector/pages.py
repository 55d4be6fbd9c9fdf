"""The KV cache of one rank as bytes: the location of each layer's blocks on the device.

A block of a layer is a run of bytes, or several, whatever the backend packs into it (K and V, of
all heads of the rank, fp8 or bf16): the pool moves bytes and never interprets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from kvrecall.engines.vllm.compat.config import ALONE, LayerPlacement, Scaled, Sharing
from kvrecall.errors import EngineError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Rows of one layer: uint8 ``[num_blocks, page_bytes]``, row stride ``block_stride`` bytes.

    Rows that are not one run of bytes have more dimensions, which are copied in their order.
    ``dtype``: of the values in them, as far as known; uint8 means bytes of any format. ``parts``:
    bytes and dtype of the tensors that a row consists of, if there are several. ``scaled``: of
    values with scales between them. ``heads``: KV heads whose bytes follow each other in a row; 0
    if they are interleaved, or there are none. ``tokens``: of a row, if each one's bytes are
    together (within its head, if there are heads); 0 if they are not.
    """

    name: str
    rows: torch.Tensor
    layout: str
    dtype: torch.dtype = torch.uint8
    parts: tuple[tuple[int, torch.dtype], ...] = ()
    scaled: Scaled | None = None
    heads: int = 0
    tokens: int = 0

    @property
    def page_bytes(self) -> int:
        return int(self.rows[0].numel())


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The layers of a KV group on this rank. ``starts``: where each one's bytes begin within a
    record of the group; one after the other from ``offset`` on if absent. ``sharing``: with the
    other ranks of its stage."""

    pages: tuple[LayerPages, ...]
    offset: int = 0
    starts: tuple[int, ...] = ()
    sharing: Sharing = ALONE

    @property
    def places(self) -> tuple[int, ...]:
        """Where each layer's bytes begin within a record."""
        sizes = (page.page_bytes for page in self.pages)
        return self.starts or tuple(accumulate(sizes, initial=self.offset))[: len(self.pages)]

    @property
    def end(self) -> int:
        """Where this rank's last bytes end within a record."""
        runs = zip(self.places, self.pages, strict=True)
        return max((at + self._extent(page) for at, page in runs), default=0)

    def piece_bytes(self, page: LayerPages) -> int:
        """Bytes of a page that lie together in a record: all, or the tokens of one turn in a head
        if the ranks share a block's tokens and the kernel does not pack them."""
        if self.sharing.contexts == 1 or not page.tokens:
            return page.page_bytes
        return page.page_bytes // max(1, page.heads) // page.tokens * self.sharing.run

    def read(self, number: int, record: Bytes) -> Bytes:
        """The bytes of the layer ``number`` in a record: uint8 ``[page bytes]``."""
        at, page = self.places[number], self.pages[number]
        piece = self.piece_bytes(page)
        shared = record[at : at + self._extent(page)]
        if piece == page.page_bytes:
            return shared
        shape, steps = (page.page_bytes // piece, piece), (piece * self.sharing.contexts, 1)
        return np.lib.stride_tricks.as_strided(shared, shape, steps).reshape(-1)

    def _extent(self, page: LayerPages) -> int:
        """From the first of its bytes in a record to the last."""
        piece = self.piece_bytes(page)
        return (page.page_bytes // piece - 1) * piece * self.sharing.contexts + piece


def pages_of(
    kv_caches: Mapping[str, torch.Tensor],
    placements: Mapping[str, LayerPlacement],
    num_blocks: int,
    fp8: torch.dtype | None = None,
    contexts: int = 1,
) -> tuple[LayerPages, ...]:
    """Pages of every layer of a KV group that owns memory, in the order of ``placements``. Layers
    that share another layer's blocks are omitted. Raises EngineError for a layout in which a block
    of a layer is not one run of bytes. ``fp8``: the type of byte caches. ``contexts``: ranks that
    share a block's tokens; where tokens lie apart, layouts are those of all of them."""
    pages: list[LayerPages] = []
    seen: set[int] = set()
    for name, place in placements.items():
        tensor = kv_caches.get(name)
        if tensor is None or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(tensor.untyped_storage())
        start = tensor.storage_offset() * tensor.element_size()
        last = start + (num_blocks - 1) * place.block_stride + place.page_bytes
        if last > whole.numel() or not _is_one_run(tensor, place, num_blocks):
            raise EngineError(
                f"layer {name}: this KV cache layout (shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()}, {tensor.dtype}) does not keep a block's bytes together, which "
                "the pool needs; choose another attention backend or KV cache layout"
            )
        rows = whole.as_strided((num_blocks, place.page_bytes), (place.block_stride, 1), start)
        heads = _heads(tensor, place, num_blocks)
        tokens = _tokens(tensor, place, num_blocks, heads)
        inner = _inner(tensor, place)[1 if heads > 1 else 0 :]
        of_head = place.page_bytes // max(1, heads)
        if tokens:
            inner = [(n * contexts, at) if n * at == of_head else (n, at) for n, at in inner]
            of_head *= contexts
        layout = f"{inner} {tensor.dtype} {of_head}"
        values = fp8 if fp8 is not None and tensor.dtype is torch.uint8 else tensor.dtype
        parts, scaled = place.parts, place.scaled
        pages.append(LayerPages(name, rows, layout, values, parts, scaled, heads, tokens))
    return tuple(pages)


def _dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Extent and step in bytes of every dimension that has more than one element."""
    size = tensor.element_size()
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return [(extent, step * size) for extent, step in shape if extent > 1]


def _inner(tensor: torch.Tensor, place: LayerPlacement) -> list[tuple[int, int]]:
    """Dimensions within a block, outermost first."""
    return [(extent, step) for extent, step in _dims(tensor) if extent * step <= place.block_stride]


def _heads(tensor: torch.Tensor, place: LayerPlacement, num_blocks: int) -> int:
    """KV heads of ``[blocks, heads, tokens, bytes]`` if each has one run of bytes; else 0."""
    if place.parts or place.scaled or tensor.dim() != 4 or tensor.shape[0] != num_blocks:
        return 0
    heads = int(tensor.shape[1])
    step = tensor.stride(1) * tensor.element_size()
    return heads if heads == 1 or step * heads == place.page_bytes else 0


def _tokens(tensor: torch.Tensor, place: LayerPlacement, num_blocks: int, heads: int) -> int:
    """Tokens of a block of ``[blocks, heads, tokens, bytes]`` if they lie one after the other, each
    with its bytes together; else 0."""
    if place.tokens < 2 or place.parts or place.scaled or tensor.dim() < 3:
        return 0
    nbytes = tensor.stride(-2) * tensor.element_size() * place.tokens * max(1, heads)
    is_known = (tensor.shape[0], tensor.shape[-2]) == (num_blocks, place.tokens)
    return place.tokens if is_known and nbytes == place.page_bytes else 0


def _is_one_run(tensor: torch.Tensor, place: LayerPlacement, num_blocks: int) -> bool:
    """Whether the first page_bytes at each block stride are exactly one block's elements.

    A kernel may split a block into several of its own, so the dimensions within a (kernel) block
    must fill it without gaps, a whole number of kernel blocks must fill the page, and the one
    dimension left must step from (kernel) block to (kernel) block.
    """
    inner = _inner(tensor, place)
    reach = filled = tensor.element_size()
    for extent, step in inner:
        reach += (extent - 1) * step
        filled *= extent
    outer = [step for extent, step in _dims(tensor) if (extent, step) not in inner]
    splits = tensor.numel() * tensor.element_size() // (num_blocks * filled)
    blocks_in_order = len(outer) <= 1 and all(s in (filled, place.block_stride) for s in outer)
    return reach == filled and splits * filled == place.page_bytes and blocks_in_order


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Contiguous bytes of a block on the device: in block 0 at ``address``, ``stride`` bytes
    further in each next block; in a block's record at ``at``."""

    address: int
    stride: int
    at: int
    nbytes: int


def runs_of(group: GroupPages) -> list[ByteRun]:
    """The runs of all layers; those that follow each other in a record and on the device, too
    (layouts with all layers of a block together), are one."""
    runs: list[ByteRun] = []
    for page, at in zip(group.pages, group.places, strict=True):
        dims = list(zip(page.rows.shape[1:], page.rows.stride()[1:], strict=True))
        nbytes = 1
        while dims and (dims[-1][0] == 1 or dims[-1][1] == nbytes):
            nbytes *= dims.pop()[0]
        places = [0]
        for extent, step in dims:
            places = [place + index * step for place in places for index in range(extent)]
        stride = page.rows.stride(0)
        piece = min(nbytes, group.piece_bytes(page))
        places = [place + start for place in places for start in range(0, nbytes, piece)]
        further = piece * (group.sharing.contexts if piece < nbytes else 1)
        for place in places:
            run = ByteRun(page.rows.data_ptr() + place, stride, at, piece)
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.stride == stride
                and last.address + last.nbytes == run.address
                and last.at + last.nbytes == at
            ):
                runs[-1] = ByteRun(last.address, stride, last.at, last.nbytes + piece)
            else:
                runs.append(run)
            at += further
    return runs
