"""What is asked of a device, counted: by one around any other; and without one, on PyTorch's
``meta`` device, which has no memory. What reads a tensor back there cannot run, and every operation
is seen. For the benchmarks, and for tests of what an order and a step cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvrecall.attention.kernels import device as kernels
from kvrecall.attention.kernels.device import Piece
from kvrecall.attention.selection import slots_of, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.backend import RetrievalAttention
from kvrecall.engines.vllm.attention.base import AttentionParameters, KernelShape, RetrievalLayer
from kvrecall.engines.vllm.attention.cuda import TritonKernel
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence, Records
from kvrecall.engines.vllm.attention.room import Most
from kvrecall.engines.vllm.attention.step import BatchRow, Freshness, StepPlanner, StepWork
from kvrecall.engines.vllm.device.accelerator import AcceleratorDevice
from kvrecall.engines.vllm.device.base import Addresses, Batch, Event
from kvrecall.engines.vllm.device.inline import InlineDevice, Moment

META = torch.device("meta")
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "_reshape_alias", "lift_fresh"}
"""Operations that start nothing, beside views."""
_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


# -- a device that counts -------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """``calls``: of the driver that queue copies or kernels. ``items``: runs of bytes in them, and
    ``nbytes`` of all. ``host_waits``: how often a thread was blocked until work was complete."""

    calls: int = 0
    items: int = 0
    nbytes: int = 0
    host_waits: int = 0

    def add(self, batch: Batch, calls: int) -> None:
        self.calls += calls
        self.items += len(batch.sizes)
        self.nbytes += batch.nbytes


@contextmanager
def counted(device: torch.device) -> Iterator[Counts]:
    """Counts what is asked of devices of this type by objects that are made in here, also later."""
    counts = Counts()
    plain = devices.FORMS.get(device.type, AcceleratorDevice)
    with _form(device.type, lambda one: CountingDevice(plain(one), counts)):
        yield counts


@contextmanager
def _form(kind: str, make: Callable[[torch.device], Any]) -> Iterator[None]:
    """Devices of this type that are made in here are made so."""
    devices.device_of.cache_clear()
    with patch.dict(devices.FORMS, {kind: make}):
        try:
            yield
        finally:
            devices.device_of.cache_clear()


class _Counting:
    """Passes on to what it is around all that is not counted."""

    def __init__(self, plain: Any, counts: Counts) -> None:
        self.plain = plain
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


class CountingEvent(_Counting):
    def wait(self) -> None:
        self._counts.host_waits += 1
        self.plain.wait()

    def seconds_since(self, earlier: CountingEvent) -> float:
        return float(self.plain.seconds_since(earlier.plain))


class CountingStream(_Counting):
    def record(self) -> CountingEvent:
        return CountingEvent(self.plain.record(), self._counts)

    def wait(self, event: CountingEvent) -> None:
        self.plain.wait(event.plain)

    def copy(self, batch: Batch) -> None:
        self._counts.add(batch, calls=1)
        self.plain.copy(batch)


class CountingDevice(_Counting):
    """See the module. ``move`` counts as two calls: the addresses' copy, and the kernel."""

    def stream(self, name: str) -> CountingStream:
        return CountingStream(self.plain.stream(name), self._counts)

    def current(self) -> CountingStream:
        return CountingStream(self.plain.current(), self._counts)

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        self._counts.add(Batch.of_pieces(sources, targets, piece), calls=2)
        self.plain.move(sources, targets, piece)

    def send(self, values: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        self._count_one(values)
        return self.plain.send(values, into)

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, CountingEvent]:
        self._count_one(values)
        here, event = self.plain.fetch(values)
        return here, CountingEvent(event, self._counts)

    def _count_one(self, values: torch.Tensor) -> None:
        self._counts.calls += 1
        self._counts.items += 1
        self._counts.nbytes += values.nbytes


# -- without a device -----------------------------------------------------------------------


@dataclass(slots=True)
class Operations:
    """``device``: names of the operations a device is given, in order; ``waits``: of those for
    which the host waits until the device is done."""

    device: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, operations: Operations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if _is(one)]
        there = any(one.is_meta for one in given)
        if there and (name in _READS or _copies_back(name, given, kwargs)):
            self._operations.waits.append(name)
        if there and name.startswith("index") and any(_waits_as_index(one) for one in given[1:]):
            self._operations.waits.append(name)
        result = func(*args, **kwargs)
        sent = _is(result) and result.is_meta and not there and bool(given)
        if sent and not kwargs.get("non_blocking"):
            self._operations.waits.append(name)
        if (there or sent) and not func.is_view and name not in _FREE:
            self._operations.device.append(name)
        return result


def _is(one: object) -> bool:
    return isinstance(one, torch.Tensor)


def _waits_as_index(one: torch.Tensor) -> bool:
    """A mask is counted first; an index on the host is copied from memory that is not locked."""
    return one.dtype in (torch.bool, torch.uint8) or not one.is_meta


def _copies_back(name: str, given: list[torch.Tensor], kwargs: Any) -> bool:
    if name == "_to_copy":
        return str(kwargs.get("device", "meta")) != "meta"
    return name == "copy_" and not given[0].is_meta


class MetaDevice(InlineDevice):
    """A device without memory, behind locked host memory."""

    in_step = False

    def send(self, values: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        if into is not None:
            return into.copy_(values, non_blocking=True)
        return values.to(META, non_blocking=True)

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        return torch.zeros(values.clone().shape, dtype=values.dtype), Moment()


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the kernels launched within, in their order."""
    names: list[str] = []
    launch = kernels._launch

    def note(name: str, *args: Any, **sizes: Any) -> None:
        names.append(name)
        launch(name, *args, **sizes)

    with patch.object(kernels, "_launch", note):
        yield names


@contextmanager
def recorded() -> Iterator[list[Callable[[], None]]]:
    """What launches the kernels launched within once more, each with its tensors and scalars of
    then, in their order: a captured graph."""
    record: list[Callable[[], None]] = []
    launch = kernels._launch

    def note(*args: Any, **sizes: Any) -> None:
        record.append(lambda: launch(*args, **sizes))
        launch(*args, **sizes)

    with patch.object(kernels, "_launch", note):
        yield record


@contextmanager
def counting() -> Iterator[Operations]:
    """Counts what runs within on ``META``."""
    operations = Operations()
    with (
        _form("meta", MetaDevice),
        launches() as operations.device,
        _Mode(operations),
    ):
        yield operations


# -- a decode step --------------------------------------------------------------------------


class _Attention(RetrievalAttention):
    """A layer whose dense attention is not run."""

    def __init__(self, layer: RetrievalLayer) -> None:
        self.sparse_layer = layer

    def _parameters(self, layer: Any) -> AttentionParameters:
        return AttentionParameters(1.0)

    def _dense(self, *args: Any) -> torch.Tensor:
        raise AssertionError("the batch has no dense part")


class SparseSteps:
    """Decode steps of sequences that are all attended to sparsely, or all replayed as graphs, over
    a cache of so many ``blocks``, the same for all layers. What an engine keeps for a step is for
    the greatest of ``most``, and its place is the same in each step of as many sequences."""

    def __init__(
        self,
        shape: KernelShape,
        settings: RetrievalSettings,
        layers: int,
        blocks: int = 1 << 14,
        most: Most | None = None,
    ) -> None:
        size = blocks, shape.kv_heads, shape.block_size, 2 * shape.head_dim
        self.cache = torch.empty(size, dtype=shape.dtype, device=META)
        most = most or Most(tokens=1 << 19)
        self._width = -(-most.tokens // shape.block_size)
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._shape = shape
        self._settings = settings
        activity = Activity()
        self.kernel = kernel = TritonKernel(shape, META, most)
        self.planner = StepPlanner(settings, kernel, Freshness(), activity)
        self._layers = [
            kernel.layer(str(at), settings, activity, lambda *_: None) for at in range(layers)
        ]

    def run(self, *lengths: int, offloaded: bool = False, graph: bool = False) -> Operations:
        """One step, in which each sequence has so many tokens. ``offloaded``: all middle blocks
        have left the device before it. ``graph``: as one that is captured."""
        shape, count, width, cache = self._shape, len(lengths), self._width, self.cache
        table = torch.arange(count * width, dtype=torch.int32).view(count, width)
        if count not in self._kept:
            query = torch.empty(count, shape.heads, shape.head_dim, dtype=shape.dtype, device=META)
            self._kept[count] = [query, torch.empty_like(query), table.to(META)]
        query, output, there = self._kept[count]
        left: dict[int, OffloadedSequence] = {}
        if offloaded:
            with counting():
                left = {at: self._depart(at, tokens) for at, tokens in enumerate(lengths)}
        rows = [BatchRow(1, tokens, False) for tokens in lengths]
        with counting() as operations:
            step = self.planner.plan(rows, table, left, there, graph)
            metadata = _Metadata(StepWork(step))
            for layer in self._layers:
                none: Any = None
                _Attention(layer).forward(none, query, none, none, cache, metadata, output)
        for sequence in left.values():
            for layer in self._layers:
                layer.forget(sequence.key)
        return operations

    def _depart(self, at: int, tokens: int) -> OffloadedSequence:
        """All middle blocks of a sequence, which have one record here, leave the device."""
        split = split_of(tokens, self._shape.block_size, self._settings)
        most = slots_of(split, split.middle, self._settings)[1]
        places = {str(number): 0 for number in range(len(self._layers))}
        records = Records(np.zeros(self.cache[0].nbytes, dtype=np.uint8), places)
        offsets, slots = np.zeros(split.middle, dtype=np.int64), torch.arange(1, 1 + most)
        made = OffloadedSequence(str(at), split.init, offsets, slots.to(torch.int32), records)
        for layer in self._layers:
            layer.depart(made, torch.arange(split.middle), self.cache)
        return made


@dataclass(frozen=True, slots=True)
class _Metadata:
    retrieval: StepWork
