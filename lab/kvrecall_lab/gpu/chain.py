"""A chain of sparse layers on a device, without an engine: what a decode step's attention costs,
launched by the host and replayed as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvrecall.attention.selection import split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.bench.report import percentiles
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import AttentionParameters, KernelShape, SparseSequence
from kvrecall.engines.vllm.attention.cuda import TritonKernel
from kvrecall.engines.vllm.attention.room import Most
from kvrecall.engines.vllm.device import device_of
from kvrecall.gpu_check import CheckError

Launch = Callable[[], object]

_CACHES = 4
"""KV caches, in turn those of the layers: more than one, so that none stays in the device's own
caches; fewer than layers, so that long contexts fit."""


class Chain:
    """``layers`` sparse layers over random KV of sequences of these ``lengths``. ``share``: of the
    blocks to select; None: every layer attends to all of them, by the same kernel."""

    def __init__(
        self,
        shape: KernelShape,
        settings: RetrievalSettings,
        layers: int,
        lengths: Sequence[int],
        share: float | None,
        device: torch.device,
    ) -> None:
        settings = replace(settings, topk_share=share or 1.0)
        kernel, activity = TritonKernel(shape, device, Most(tokens=max(lengths))), Activity()
        blocks = -(-max(lengths) // shape.block_size)
        count = blocks * len(lengths)
        size = (count, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        self._device = device
        self._caches = [
            torch.randn(size, device=device, dtype=shape.dtype) for _ in range(min(layers, _CACHES))
        ]
        self._query = torch.randn(
            len(lengths), shape.heads, shape.head_dim, device=device, dtype=shape.dtype
        )
        self._layers = [kernel.layer(str(at), settings, activity) for at in range(layers)]
        table = torch.arange(count, dtype=torch.int32).view(len(lengths), blocks)
        splits = [split_of(length, shape.block_size, settings) for length in lengths]
        if share is None:
            splits = [replace(split, local=split.init, chosen=0) for split in splits]
        elif not all(split.middle for split in splits):
            raise CheckError(f"{min(lengths)} tokens leave no blocks to select from")
        self._step = kernel.schedule(
            torch.empty(0, dtype=torch.int64),
            [SparseSequence(at, at, split, table[at]) for at, split in enumerate(splits)],
            settings.layout(shape.block_size, narrows=False),
            table.to(device),
        )
        every = torch.arange(count)
        for layer, cache in zip(self._layers, self._turns(), strict=True):
            layer.digest(cache, every)
        self._outputs = [torch.empty_like(self._query) for _ in self._layers]
        self._terms = AttentionParameters(shape.head_dim**-0.5)

    def _turns(self) -> list[torch.Tensor]:
        return [self._caches[at % len(self._caches)] for at in range(len(self._layers))]

    def launch(self) -> None:
        """Launches the attention of all layers of one step; does not wait."""
        for layer, cache, output in zip(self._layers, self._turns(), self._outputs, strict=True):
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
