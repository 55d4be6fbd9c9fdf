"""A chain of sparse layers on a device, without an engine: what a decode step's attention costs,
launched by the host and replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from kvrecall.attention.selection import slots_of, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.bench.report import percentiles
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import AttentionParameters, KernelShape, SparseSequence
from kvrecall.engines.vllm.attention.cuda import TritonKernel
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence, Records
from kvrecall.engines.vllm.attention.room import Most
from kvrecall.engines.vllm.device import device_of
from kvrecall.gpu_check import CheckError

Launch = Callable[[], object]

_CACHES = 4
"""KV caches, in turn those of the layers: more than one, so that none stays in the device's own
caches; fewer than layers, so that long contexts fit."""

_RECORDS = 512
"""Of blocks off the device, in host memory: more have the same ones in turn."""


class Chain:
    """``layers`` sparse layers over random KV of sequences of these ``lengths``. ``share``: of the
    blocks to select; None: every layer attends to all of them, by the same kernel. ``missed``: the
    middle blocks are off the device, and of the selected ones so many are in no slot; None: all
    blocks are on it."""

    def __init__(
        self,
        shape: KernelShape,
        settings: RetrievalSettings,
        layers: int,
        lengths: Sequence[int],
        share: float | None,
        device: torch.device,
        missed: float | None = None,
    ) -> None:
        settings = replace(settings, topk_share=share or 1.0)
        kernel, activity = TritonKernel(shape, device, Most(tokens=max(lengths))), Activity()
        blocks = -(-max(lengths) // shape.block_size)
        count = (blocks + (0 if missed is None else blocks)) * len(lengths)
        size = (count, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        self._device = device
        self._caches = [
            torch.randn(size, device=device, dtype=shape.dtype)
            .to(shape.fp8 or shape.dtype)
            .view(shape.stored)
            for _ in range(min(layers, _CACHES))
        ]
        output = torch.randn(
            len(lengths), shape.heads, shape.head_dim, device=device, dtype=shape.dtype
        )
        self._query = output.to(shape.query or shape.dtype)
        self._layers: list[Any] = [
            kernel.layer(str(at), settings, activity) for at in range(layers)
        ]
        self._locked: list[torch.Tensor] = []
        table = torch.arange(blocks * len(lengths), dtype=torch.int32).view(len(lengths), blocks)
        splits = [split_of(length, shape.block_size, settings) for length in lengths]
        if share is None:
            splits = [replace(split, local=split.init, chosen=0) for split in splits]
        elif not all(split.middle for split in splits):
            raise CheckError(f"{min(lengths)} tokens leave no blocks to select from")
        every = torch.arange(blocks * len(lengths))
        for layer, cache in zip(self._layers, self._turns(), strict=True):
            layer.digest(cache, every)
        sequences = [SparseSequence(at, at, split, table[at]) for at, split in enumerate(splits)]
        if missed is not None:
            free = iter(range(len(every), count))
            sequences = [self._left(one, settings, free) for one in sequences]
        self._lost = torch.tensor(
            [
                slot
                for one in sequences
                if one.offloaded is not None
                for slot in one.offloaded.slots[: round((missed or 0) * one.split.chosen)].tolist()
            ],
            dtype=torch.int64,
            device=device,
        )
        self._step = kernel.schedule(
            torch.empty(0, dtype=torch.int64),
            sequences,
            settings.layout(shape.block_size, narrows=False),
            table.to(device),
        )
        self._outputs = [torch.empty_like(output) for _ in self._layers]
        self._terms = AttentionParameters(shape.head_dim**-0.5)

    def _turns(self) -> list[torch.Tensor]:
        return [self._caches[at % len(self._caches)] for at in range(len(self._layers))]

    def _left(
        self, one: SparseSequence, settings: RetrievalSettings, free: Iterator[int]
    ) -> SparseSequence:
        """Without its middle blocks, each of which has a record in locked host memory."""
        split, page = one.split, self._caches[0][0].nbytes
        memory = torch.zeros(min(split.middle, _RECORDS) * page, dtype=torch.uint8)
        device = device_of(self._device)
        device.lock(memory, memory.numel)
        self._locked.append(memory)
        device.wait_locked()
        records = Records(memory.numpy(), {layer.name: 0 for layer in self._layers})
        offsets = np.arange(split.middle, dtype=np.int64) % _RECORDS * page
        slots = list(islice(free, slots_of(split, split.middle, settings)[1]))
        gone = OffloadedSequence(
            str(one.row), split.init, offsets, torch.tensor(slots, dtype=torch.int32), records
        )
        for layer, cache in zip(self._layers, self._turns(), strict=True):
            layer.depart(gone, one.blocks.to(torch.int64), cache)
        if not gone.is_readable:
            raise CheckError("the device cannot read host memory")
        return replace(one, table=gone.named(one.table), offloaded=gone)

    def close(self) -> None:
        """All of its work is done."""
        for memory in self._locked:
            device_of(self._device).unlock(memory)

    def launch(self) -> None:
        """Launches the attention of all layers of one step; does not wait."""
        for layer, cache, output in zip(self._layers, self._turns(), self._outputs, strict=True):
            if len(self._lost):
                layer._residency.state[0].index_fill_(1, self._lost, 0)
            layer.attend(self._query, cache, self._step, self._terms, output)

    def ways(self) -> Mapping[str, Launch]:
        """Ways to launch a step, of which each writes the same outputs."""
        if self._device.type != "cuda":
            return {"eager": self.launch}
        self.launch()
        torch.accelerator.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.launch()
        return {"eager": self.launch, "graph": graph.replay}

    def measure(self, rounds: int = 20) -> dict[str, Any]:
        """Microseconds a layer by the device's clock, of each way. Raises CheckError if two ways
        differ in a bit."""
        ways = self.ways()
        found: dict[str, Any] = {}
        first: torch.Tensor | None = None
        for name, launch in ways.items():
            for output in self._outputs:
                output.fill_(float("nan"))
            launch()
            outputs = torch.stack(self._outputs)
            first = outputs if first is None else first
            if not torch.equal(outputs, first):
                raise CheckError(f"{name}: other outputs than {next(iter(ways))}")
            times = [self._seconds(launch) / len(self._layers) * 1e6 for _ in range(rounds)]
            found[name] = percentiles(times)
        return found

    def _seconds(self, launch: Launch) -> float:
        stream = device_of(self._device).current()
        begin = stream.record()
        launch()
        end = stream.record()
        end.wait()
        return float(end.seconds_since(begin))
