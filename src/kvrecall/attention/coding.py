"""Digest rows in eight bits: whole numbers, and behind them the scale they are multiples of.

A search reads every row of every candidate, so its time goes with their bytes; and a processor
multiplies whole numbers faster than bfloat16 where it has no instructions for that. Products are
exact sums of whole numbers, so they do not depend on how rows lie in memory (docs/digest-study.md
has what the rounding costs).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kvrecall.attention.kernels.native import PackedQuery, native_search
from kvrecall.attention.kernels.search import best_by_triton, fits

SCALE_BYTES = 4
_MOST = 127
_EXACT_IN_FLOAT = (1 << 24) // _MOST**2
"""So many products of two numbers up to ``_MOST`` add up in single precision without rounding."""


def coded_width(width: int) -> int:
    """Bytes of a row of ``width`` coordinates."""
    return width + SCALE_BYTES


@dataclass(frozen=True, slots=True)
class CodedQuery:
    """Rounded as rows are: int8 ``codes`` ``[heads, group, width]``, float32 ``scales``
    ``[heads, group, 1]``."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, point: torch.Tensor) -> CodedQuery:
        """``[heads, group, width]``."""
        point = point.float()
        scales = _scales(point.abs().amax(-1, keepdim=True))
        return cls((point / scales).round_().to(torch.int8), scales)


def encode(rows: torch.Tensor, fine: int = 0) -> torch.Tensor:
    """float ``[..., rows, width]`` of a block each -> int8 ``[..., rows + fine, width + 4]``.

    A block's rows have one scale; but the last ``fine`` ones have their own, and another row each,
    at the end, for what rounding took from them.
    """
    plain, precise = rows[..., : rows.shape[-2] - fine, :], rows[..., rows.shape[-2] - fine :, :]
    most = plain.abs().amax((-1, -2), keepdim=True)
    parts = [_coded(plain, most.expand(*plain.shape[:-1], 1))]
    if fine:
        parts.append(_coded(precise, precise.abs().amax(-1, keepdim=True)))
        rest = precise - decode(parts[1])
        parts.append(_coded(rest, rest.abs().amax(-1, keepdim=True)))
    return torch.cat(parts, -2)


def decode(coded: torch.Tensor) -> torch.Tensor:
    """int8 ``[..., width + 4]`` -> float32 ``[..., width]``, each row by itself."""
    return coded[..., :-SCALE_BYTES].float() * _scales_of(coded)


def decode_fine(coded: torch.Tensor, fine: int) -> torch.Tensor:
    """The last ``fine`` rows that were encoded: float32 ``[..., fine, width]``."""
    return decode(coded[..., -2 * fine : -fine, :]) + decode(coded[..., -fine:, :])


def coded_products(query: CodedQuery, coded: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Of the query with coded rows ``[heads, blocks, rows, width + 4]`` of one scale a block, times
    ``scale``: float32 ``[heads, group, blocks * rows]``."""
    heads, blocks, rows, _ = coded.shape
    factors = ((query.scales * scale) * _of_blocks(coded).transpose(1, 2)).unsqueeze(-1)
    sums = _sums(query.codes, coded.flatten(1, 2)[..., :-SCALE_BYTES])
    products = torch.empty(heads, sums.shape[1], blocks, rows, device=coded.device)
    torch.mul(sums.view(*products.shape), factors, out=products)
    return products.flatten(2)


def best_products(
    query: CodedQuery,
    coded: torch.Tensor,
    scale: float = 1.0,
    places: torch.Tensor | None = None,
) -> torch.Tensor:
    """The largest of each block's ``coded_products``, to the bit: float32 ``[heads, group,
    blocks]``. ``places``: int64 ``[heads, count]``, only of these blocks."""
    scales = query.scales * scale
    if on_device(coded) and fits(coded):
        return best_by_triton(query.codes, scales, coded, places)
    native = native_search(*query.codes.shape[1:]) if coded.is_cpu else None
    if native is not None and coded.stride(-1) == 1:
        return native.best(PackedQuery.of(query.codes, scales), coded, places)
    if places is not None:
        coded = coded[torch.arange(len(coded), device=coded.device)[:, None], places]
    heads, blocks, rows, _ = coded.shape
    sums = _sums(query.codes, coded.flatten(1, 2)[..., :-SCALE_BYTES])
    best = sums.reshape(heads, -1, blocks, rows).amax(-1) if blocks else sums
    return best * (scales * _of_blocks(coded).transpose(1, 2))


def on_device(tensor: torch.Tensor) -> bool:
    """Whether it lies where Triton compiles for."""
    return not tensor.is_cpu


def _of_blocks(coded: torch.Tensor) -> torch.Tensor:
    """The scale of each block: ``[heads, blocks, 1]``."""
    return _scales_of(coded[:, :, 0])


def _coded(rows: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """``most``: the largest coordinate of each row, ``[..., 1]``."""
    scales = _scales(most.float())
    size = (*rows.shape[:-1], coded_width(rows.shape[-1]))
    coded = torch.empty(size, dtype=torch.int8, device=rows.device)
    coded[..., :-SCALE_BYTES] = (rows / scales).round()
    coded[..., -SCALE_BYTES:] = scales.contiguous().view(torch.int8)
    return coded


def _scales(most: torch.Tensor) -> torch.Tensor:
    # By a tensor, as on a GPU a plain number is divided by to another last bit than on a CPU.
    return (most / torch.full_like(most, _MOST)).clamp(min=torch.finfo(torch.float32).tiny)


def _scales_of(coded: torch.Tensor) -> torch.Tensor:
    return coded[..., -SCALE_BYTES:].contiguous().view(torch.float32)


def _sums(point: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """``[heads, group, width]`` by ``[heads, rows, width]``, whole numbers:
    ``[heads, group, rows]``, int32, in whatever order in memory."""
    if not codes.is_cpu:
        return _sums_anywhere(point, codes)
    first, second = (codes, point) if _ROWS_FIRST else (point, codes)
    sums = torch.empty(len(first), first.shape[1], second.shape[1], dtype=torch.int32)
    if sums.numel():
        for one, other, into in zip(first, second, sums, strict=True):
            _sum(one, other, into)
    return sums.transpose(1, 2) if _ROWS_FIRST else sums


def _sums_anywhere(point: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """As ``_sums``, by what every device has. Parts of sums are exact in single precision."""
    both = (torch.split(point, _EXACT_IN_FLOAT, -1), torch.split(codes, _EXACT_IN_FLOAT, -1))
    parts = zip(*both, strict=True)
    sums = [torch.bmm(one.float(), other.float().transpose(1, 2)).int() for one, other in parts]
    return torch.stack(sums).sum(0, dtype=torch.int32)


def _sum(first: torch.Tensor, second: torch.Tensor, into: torch.Tensor) -> None:
    """``[m, width]`` by ``[n, width]``, whole numbers: ``[m, n]``."""
    if _MULTIPLIES_BYTES:
        torch._int_mm(first, second.T, out=into)
    elif first.shape[1] > _EXACT_IN_FLOAT:
        into.copy_(functional.linear(first.double(), second.double()))
    else:
        into.copy_(functional.linear(first.float(), second.float()))


def _multiplies_bytes() -> bool:
    """Whether the processor has instructions for sums of products of bytes, which PyTorch uses."""
    told = getattr(torch.cpu, "_is_vnni_supported", None)
    return told is not None and bool(told()) and hasattr(torch, "_int_mm")


def _has_tiles() -> bool:
    """Whether the processor multiplies in tiles (AMX): then rows had better come first."""
    told = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return told is not None and bool(told())


_MULTIPLIES_BYTES = _multiplies_bytes()
_ROWS_FIRST = _MULTIPLIES_BYTES and _has_tiles()
