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

from kvrecall.retrieval.assembly import CHUNK, FIELDS, MOST_IN_A_GROUP, module_of

_LOG = logging.getLogger(__name__)
_SHARED_FROM = 256 << 10
"""Bytes from which on a search is worth waking other threads."""
_LINES_AHEAD = 64
"""Of memory, of CHUNK bytes each: as many as are asked for before the first of them is needed."""
_Call = Callable[[int], None]
_TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class NativeSearch:
    """For one number of query heads a KV head. Thread-safe."""

    def __init__(self, group: int) -> None:
        """Raises ImportError or RuntimeError if it cannot be compiled here."""
        self._group = group
        self._team = _team()
        self._engine, self._search, self._share = _compiled(group, self._team is not None)

    def best(
        self,
        query: torch.Tensor,
        scales: torch.Tensor,
        coded: torch.Tensor,
        places: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ``best_products``. ``query``: int8 ``[heads, group, width]``; ``scales``: float32
        ``[heads, group, 1]``; ``coded``: rows without gaps, of any other strides."""
        heads, blocks, rows, _ = coded.shape
        count = blocks if places is None else places.shape[1]
        found = torch.empty(heads, self._group, count)
        if not found.numel():
            return found
        packed, keeps = _packed(query)
        turned = 128 * query.sum(-1, dtype=torch.int32)
        scales = scales.contiguous()
        kept = None if places is None else places.contiguous()
        chunks = query.shape[-1] // CHUNK
        ahead = max(1, _LINES_AHEAD // max(1, rows * chunks))
        task = (ctypes.c_int64 * len(FIELDS))(
            coded.data_ptr(), *coded.stride()[:3], heads, count, rows, chunks, ahead,
            0 if kept is None else kept.data_ptr(), packed, turned.data_ptr(), scales.data_ptr(),
            found.data_ptr(),
        )  # fmt: skip
        self._run(task, heads * count * rows * query.shape[-1])
        del keeps
        return found

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
    found = search.best(query, torch.ones(heads, group, 1), coded, None)
    return torch.equal(found, products.amax(-1).float())


def _packed(query: torch.Tensor) -> tuple[int, torch.Tensor]:
    """The address of ``[heads, chunks, group, CHUNK]``, aligned, and what holds the memory."""
    heads, group = query.shape[:2]
    memory = torch.empty(query.numel() + CHUNK, dtype=torch.int8)
    offset = -memory.data_ptr() % CHUNK
    into = memory[offset : offset + query.numel()].view(heads, -1, group, CHUNK)
    into.copy_(query.view(heads, group, -1, CHUNK).transpose(1, 2))
    return memory.data_ptr() + offset, memory


def _compiled(group: int, has_team: bool) -> tuple[Any, _Call, Any]:
    """What keeps the code, ``search`` to call, and the address of ``share``."""
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
    return engine, search, engine.get_function_address("share")


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
