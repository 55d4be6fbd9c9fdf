"""The search compiled for this processor, where llvmlite is there, which vLLM brings.

PyTorch multiplies bytes by large matrices well, but a query has few heads: on a Xeon with AMX its
product takes 2.5 times as long as reading the digests does. These loops read them as fast as memory
gives them and keep only each block's best product.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvrecall.attention.kernels.assembly import (
    CHUNK,
    CODING,
    FIELDS,
    LANES,
    MOST_IN_A_GROUP,
    module_of,
)

_LOG = logging.getLogger(__name__)
_SHARED_FROM = 256 << 10
"""Bytes from which on a search is worth waking other threads."""
_LINES_AHEAD = 64
"""Of memory, of CHUNK bytes each: as many as are asked for before the first of them is needed."""
_Call = Callable[[int], None]
_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class PackedQuery:
    """Coded queries as the loops read them, in one piece of memory: at the addresses ``codes``,
    ``turned`` and ``scales``; see ``assembly.FIELDS``."""

    def __init__(self, heads: int, group: int, chunks: int) -> None:
        """Not filled yet."""
        self.chunks = chunks
        count, nbytes = heads * group, heads * group * chunks * CHUNK
        self.memory = torch.empty(CHUNK + nbytes + 8 * count, dtype=torch.uint8)
        self.codes = -(-self.memory.data_ptr() // CHUNK) * CHUNK
        self.turned = self.codes + nbytes
        self.scales = self.turned + 4 * count

    def equals(self, other: PackedQuery) -> bool:
        """Whether it says the same."""
        mine, theirs = (
            one.memory[one.codes - one.memory.data_ptr() :][: len(one.memory) - CHUNK]
            for one in (self, other)
        )
        return torch.equal(mine, theirs)

    @classmethod
    def of(cls, codes: torch.Tensor, scales: torch.Tensor) -> PackedQuery:
        """Of int8 ``[heads, group, width]`` and float32 ``[heads, group, 1]``."""
        heads, group, width = codes.shape
        made = cls(heads, group, width // CHUNK)
        begin = made.codes - made.memory.data_ptr()
        room = made.memory[begin:]
        into = room[: codes.numel()].view(torch.int8).view(heads, made.chunks, group, CHUNK)
        into.copy_(codes.view(heads, group, made.chunks, CHUNK).transpose(1, 2))
        beside = room[codes.numel() :][: 8 * heads * group].view(torch.int32)
        beside[: heads * group] = (128 * codes.sum(-1, dtype=torch.int32)).flatten()
        beside[heads * group :].view(torch.float32)[:] = scales.flatten()
        return made


class NativeSearch:
    """For one number of query heads a KV head. Thread-safe."""

    def __init__(self, group: int) -> None:
        """Raises ImportError or RuntimeError if it cannot be compiled here."""
        self._group = group
        self._team = _team()
        compiled = _compiled(group, self._team is not None)
        self._engine, self._search, self._share, self._code = compiled

    def best(
        self,
        query: PackedQuery,
        coded: torch.Tensor,
        places: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``best_products``. ``coded``: rows without gaps, of any other strides."""
        heads, blocks, rows, _ = coded.shape
        count = blocks if places is None else places.shape[1]
        found = torch.empty(heads, self._group, count)
        if not found.numel():
            return found
        kept = None if places is None else places.contiguous()
        ahead = max(1, _LINES_AHEAD // max(1, rows * query.chunks))
        task = (ctypes.c_int64 * len(FIELDS))(
            coded.data_ptr(), *coded.stride()[:3], heads, count, rows, query.chunks, ahead,
            0 if kept is None else kept.data_ptr(), query.codes, query.turned, query.scales,
            found.data_ptr(),
        )  # fmt: skip
        self._run(task, heads * count * rows * query.chunks * CHUNK)
        return found

    def code(self, query: torch.Tensor, scale: float, split: bool) -> PackedQuery:
        """Rounds queries ``[heads, group, dim]``, if ``codes_natively`` allows them, and packs
        them. ``scale``: what products are multiplied by; ``split``: codes above zero, then
        those below."""
        heads, _, dim = query.shape
        packed = PackedQuery(heads, self._group, dim * (1 + split) // CHUNK)
        plain, factor = query.float().contiguous(), ctypes.c_float(scale)
        task = (ctypes.c_int64 * len(CODING))(
            plain.data_ptr(), heads, packed.chunks, dim, split, ctypes.addressof(factor),
            packed.codes, packed.turned, packed.scales,
        )  # fmt: skip
        self._code(ctypes.addressof(task))
        return packed

    def _run(self, task: ctypes.Array[ctypes.c_int64], nbytes: int) -> None:
        threads = torch.get_num_threads()
        if self._team is None or threads == 1 or nbytes < _SHARED_FROM:
            self._search(ctypes.addressof(task))
        else:
            self._team(self._share, ctypes.addressof(task), threads, 0)


def native_search(group: int, width: int) -> NativeSearch | None:
    """None: this processor, this environment or these shapes are none for it."""
    if width % CHUNK or not 0 < group <= MOST_IN_A_GROUP:
        return None
    return _search_of(group)


def codes_natively(dim: int, split: bool | None) -> bool:
    """Whether ``NativeSearch.code`` takes such queries; see ``Digest.split``."""
    return split is not None and dim % LANES == 0 and dim * (1 + split) % CHUNK == 0


@functools.cache
def _search_of(group: int) -> NativeSearch | None:
    if platform.machine() != "x86_64":
        return None
    try:
        search = NativeSearch(group)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        _LOG.info("the search for blocks is PyTorch's: %s", error)
        return None
    if not _is_right(search, group):
        _LOG.warning("the search for blocks is PyTorch's: the compiled one finds other products")
        return None
    return search


def _is_right(search: NativeSearch, group: int) -> bool:
    """Whether it finds what whole numbers say, of a few blocks."""
    heads, blocks, rows, width = 2, 5, 3, 2 * CHUNK
    numbers = torch.arange(heads * blocks * rows * (width + 4)) * 7919 % 255 - 127
    coded = numbers.to(torch.int8).view(heads, blocks, rows, -1)
    coded[..., width:] = torch.ones(1).view(torch.int8)  # the scales
    query = (torch.arange(heads * group * width) * 104729 % 255 - 127).to(torch.int8)
    query = query.view(heads, group, width)
    products = torch.einsum("hgw,hbrw->hgbr", query.long(), coded[..., :width].long())
    packed = PackedQuery.of(query, torch.ones(heads, group, 1))
    found = search.best(packed, coded, None)
    return torch.equal(found, products.amax(-1).float()) and _codes_right(search, group)


def _codes_right(search: NativeSearch, group: int) -> bool:
    """Whether it codes queries of small whole numbers, and one of zeros, as they are."""
    heads, dim = 2, CHUNK
    query = (torch.arange(heads * group * dim) * 7919 % 255 - 127).float().view(heads, group, dim)
    query[..., 0] = 127.0
    query[0, 0] = 0.0
    scales = torch.full((heads, group, 1), 0.5)
    scales[0, 0] = torch.finfo(torch.float32).tiny / 2
    for split in (False, True):
        codes = torch.cat([query.clamp(min=0), query.clamp(max=0)], -1) if split else query
        want = PackedQuery.of(codes.to(torch.int8), scales)
        if not search.code(query, 0.5, split).equals(want):
            return False
    return True


def _compiled(group: int, has_team: bool) -> tuple[Any, _Call, Any, _Call]:
    """What keeps the code, ``search`` to call, the address of ``share``, and ``code`` to call."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    if not (features.get("avx512vnni") and features.get("avx512f")):
        raise RuntimeError("the processor has no AVX512-VNNI")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if not has_team:
        for name in ("omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, ctypes.cast(_NOBODY, ctypes.c_void_p).value)
    module = llvm.parse_assembly(module_of(group))
    module.verify()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, target)
    engine.finalize_object()
    search: Any = _TASK(engine.get_function_address("search"))
    code: Any = _TASK(engine.get_function_address("code"))
    return engine, search, engine.get_function_address("share"), code


_NOBODY = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)  # ``share`` is never called then


@functools.cache
def _team() -> Any:
    """OpenMP's call that has a team of threads run a function, as PyTorch is bound to it: another
    copy of the library would have threads of its own. None: there is none."""
    own = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for scope in (None, str(own)):  # what was loaded ahead of all comes first for PyTorch, too
        library = ctypes.CDLL(scope)
        if hasattr(library, "GOMP_parallel"):
            return _known(library)
    return None


def _known(library: ctypes.CDLL) -> Any:
    import llvmlite.binding as llvm

    for name in ("omp_get_thread_num", "omp_get_num_threads"):
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        llvm.add_symbol(name, address)
    team = library.GOMP_parallel
    team.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    team.restype = None
    return team
