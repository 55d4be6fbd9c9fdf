"""The simulated device and its tensors: what PyTorch is asked to do with them is queued on the
stream on which the engine computes, like every kernel, and done late.

To PyTorch they are on its ``meta`` device. What the host itself has sent, and what follows from
that alone, is known when work is queued, so that an operation's accesses are known to the row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from ctypes import memmove
from typing import Any, Self

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvrecall.attention.kernels.device import Piece
from kvrecall.engines.vllm.device.base import Addresses, Batch, Device, Event, Stream

from .device import CELL, Cells, LateStream, Machine, Style

META = torch.device("meta")
_SMALL = 1 << 14
"""Elements of a tensor whose values are known, at most."""

_VIEWS = {"detach", "_unsafe_view", "_reshape_alias", "lift_fresh"}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_WAITS = {"nonzero", "_local_scalar_dense"}


class LateTensor(torch.Tensor):
    """``plain``: the same memory, as the host's. ``known``: what it will hold once all that is
    queued by now is done; None: that depends on the device."""

    plain: torch.Tensor
    known: torch.Tensor | None
    machine: Machine
    is_cpu = False
    device = property(lambda _: META)

    @staticmethod
    def __new__(
        cls, machine: Machine, plain: torch.Tensor, known: torch.Tensor | None = None
    ) -> LateTensor:
        made: LateTensor = torch.Tensor._make_subclass(cls, plain)
        made.plain, made.known, made.machine = plain, known, machine
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{func} of device memory, by what is no kernel")

    def told(self) -> torch.Tensor:
        """What is known of it. It must be."""
        known = self.machine.value_of(self)
        assert known is not None, "the host cannot know this"
        return known

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        """The host waits for the device."""
        self.machine.torch_waits()
        return self.plain.clone()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the host reads device memory")

    tolist = item = numpy


class FetchedTensor(torch.Tensor):
    """In host memory, written by a queued copy."""

    plain: torch.Tensor
    machine: Machine

    @staticmethod
    def __new__(cls, machine: Machine, plain: torch.Tensor) -> FetchedTensor:
        made: FetchedTensor = torch.Tensor._make_subclass(cls, plain)
        made.plain, made.machine = plain, machine
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __getitem__(self, at: Any) -> Self:
        return type(self)(self.machine, self.plain[at])  # type: ignore[return-value]

    def numpy(self, *_: Any, **__: Any) -> Any:
        first, step = self.plain.data_ptr(), self.plain.element_size()
        extent = step + sum(
            (n - 1) * by * step for n, by in zip(self.shape, self.stride(), strict=True)
        )
        self.machine.host(
            set(self.machine.cells(first, extent)), set(), "the host, of a fetched tensor,"
        )
        return self.plain.numpy()

    def tolist(self) -> Any:
        return self.numpy().tolist()


class Queueing(TorchDispatchMode):
    """Queues operations on tensors of the device."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        late = [one for one in _leaves(args) if isinstance(one, LateTensor)]
        goes_there = getattr(kwargs.get("device"), "type", "") == "meta"
        if not late and not goes_there:
            return func(*args, **kwargs)
        if goes_there:
            kwargs["device"] = torch.device("cpu")
        name = func.overloadpacket.__name__
        plain = _mapped(args, lambda one: one.plain), kwargs
        knowns = [self.machine.value_of(one) for one in late]
        known = None
        if all(one is not None for one in knowns):
            known = _mapped(args, self.machine.value_of), kwargs

        def here(of: Any) -> Any:
            return func(*of[0], **of[1])

        if name == "set_":
            with torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
            return here(plain) is not None and args[0]
        if func.is_view or name in _VIEWS:
            return self._wrapped(here(plain), None if known is None else here(known))
        if not late or name in _EMPTY:
            made = here(plain)
            is_known = late == [] and name not in _EMPTY and made.numel() <= _SMALL
            return self._wrapped(made, made.clone() if is_known else None)
        if name in _WAITS:
            self.machine.torch_waits()
            found = here(plain)
            return self._wrapped(found, found.clone()) if isinstance(found, torch.Tensor) else found
        reads, writes = self._accesses(name, func, args)
        if func._schema.is_mutable:
            (written,) = [
                one
                for one, told in zip(args, func._schema.arguments, strict=False)
                if told.alias_info is not None and told.alias_info.is_write
            ]
            if known is None:
                self.machine.unknown(written)
            else:
                here(known)
            self._queue(lambda: here(plain), reads, writes)
            return written
        # Its shape is as of now, and so are its values, which nothing may read yet.
        made = here(plain if known is None else known)
        into = torch.empty_like(made)
        self._queue(lambda: into.copy_(here(plain)), reads, writes)
        return self._wrapped(into, None if known is None or made.numel() > _SMALL else made)

    def _queue(self, work: Callable[[], object], reads: Cells, writes: Cells) -> None:
        self.machine.computing.launch(work, reads, writes, "torch's operations")

    def _wrapped(self, made: Any, known: Any) -> Any:
        if isinstance(made, torch.Tensor):
            return LateTensor(self.machine, made, known)
        knowns = known if known is not None else [None] * len(made)
        return type(made)(
            LateTensor(self.machine, *both) for both in zip(made, knowns, strict=True)
        )

    def _accesses(self, name: str, func: Any, args: Any) -> tuple[Cells, Cells]:
        """Cells read and written of the memory that not this stream alone accesses."""
        reads: Cells = set()
        writes: Cells = set()
        for at, one in enumerate(_leaves(args)):
            if not isinstance(one, LateTensor) or not self.machine.is_shared(one.data_ptr()):
                continue
            places, into = _places(one), reads
            if at == 0:
                if name in ("index", "index_put_"):
                    places = torch.ops.aten.index.Tensor(places, _mapped(args[1], LateTensor.told))
                elif name in ("index_select", "index_fill_"):
                    places = places.index_select(args[1], args[2].told())
                into = writes if func._schema.is_mutable else reads
            for place in np.unique(places.numpy()).tolist():
                into.update(self.machine.cells(place, one.element_size()))
        return reads, writes


def _leaves(args: Iterable[Any]) -> Iterator[Any]:
    """The arguments of an operation, and those in lists of them."""
    for one in args:
        if isinstance(one, list | tuple):
            yield from one
        else:
            yield one


def _mapped(args: Iterable[Any], of: Callable[[LateTensor], Any]) -> list[Any]:
    """The same, with something for each device tensor."""
    return [
        _mapped(one, of)
        if isinstance(one, list | tuple)
        else of(one)
        if isinstance(one, LateTensor)
        else one
        for one in args
    ]


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """The address of each element."""
    size = tensor.element_size()
    places = torch.zeros((), dtype=torch.int64) + tensor.data_ptr()
    for count, step in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(count) * (step * size)
    return places


class LateDevice(Device):
    """A device whose work its machine does. ``in_step``: False."""

    in_step = False

    def __init__(self, machine: Machine, meta: bool = False) -> None:
        """``meta``: the device's tensors are not the host's."""
        self.machine = machine
        self.locked: set[int] = set()
        self._meta = meta

    def stream(self, name: str) -> Stream:
        return self.machine.stream(name)

    def thread(self, name: str) -> Executor:
        return self.machine.thread(name)

    def current(self) -> Stream:
        return self.machine.computing

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        self.machine.computing.copy(Batch.of_pieces(sources, targets, piece))

    def can_read(self, addresses: Addresses, nbytes: int) -> bool:
        return True

    def send(self, values: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        sent = values.clone()  # by this stream, whose later work alone reads it
        if into is None:
            return LateTensor(self.machine, sent, sent.clone()) if self._meta else sent
        assert isinstance(into, LateTensor)
        if into.known is not None:
            into.known.copy_(sent)
        place = into.plain
        self.machine.computing.launch(lambda: place.copy_(sent), set(), set(), "a step's facts")
        return into

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        machine, address, nbytes = self.machine, values.data_ptr(), values.nbytes
        if not self._meta:
            here = torch.zeros_like(values)
        else:  # in cells of its own, of garbage
            memory = torch.full((nbytes + 2 * CELL,), 0xEE, dtype=torch.uint8)
            start = -memory.data_ptr() % CELL
            room = memory[start : start + nbytes].view(values.dtype)
            here = FetchedTensor(machine, room.view(tuple(values.shape)))
        reads = set(machine.cells(address, nbytes)) if machine.is_shared(address) else set()
        writes = set(machine.cells(here.data_ptr(), nbytes))

        def work() -> None:  # it keeps both until the copy is made
            memmove(here.data_ptr(), values.data_ptr(), nbytes)

        machine.computing.launch(work, reads, writes, "fetching")
        return here, machine.computing.record()

    def lock(self, memory: torch.Tensor, populated: Callable[[], int]) -> None:
        assert memory.data_ptr() not in self.locked, "locked twice"
        self.locked.add(memory.data_ptr())

    def unlock(self, memory: torch.Tensor) -> None:
        self.machine.free(memory.data_ptr(), memory.numel())
        self.locked.remove(memory.data_ptr())

    def wait_locked(self, seconds: float = 0.0) -> None:
        return


class _EngineStream(LateStream):
    """An engine's that computes on the host, at once, what it does not queue here."""

    def wait(self, event: Event) -> None:
        event.wait()


PATIENCE = 3


def late_device(_: object = None) -> LateDevice:
    """Copies are made when they are waited for, or when they were asked for ``PATIENCE`` times."""
    style = Style(eager=0.0, patience=PATIENCE - 1, only_needed=True, speeds=(1.0,))
    machine = Machine(random.Random(0), style)
    machine.streams[0] = machine.computing = _EngineStream(machine, "compute", 1)
    return LateDevice(machine)
