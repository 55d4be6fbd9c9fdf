"""What a rank's worker has loaded, and whether it has loaded anything since the scheduler side
learnt of it: weights, adapters, and what sleep took away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from kvrecall.engines.fingerprint import Fingerprint, Memory

logger = logging.getLogger("vllm.kvrecall")

_CHUNK = 1 << 28  # bytes of a tensor that are brought to the host at a time

LoadedAdapter = tuple[int, str]
"""How often a rank has loaded an adapter, and the digest of its files; "" if it is not known."""


@dataclass(frozen=True, slots=True)
class Look:
    """What the ranks have now. ``tensors``: digest of all parameters; None if it was not asked for,
    or if they are not there (sleep, an update under way). ``is_opaque``: a kernel keeps weights in
    a form of its own, which the digest does not cover. ``is_reloaded``: the model has loaded
    weights since the last look, or slept without keeping them; ``is_whole``: the last load had all
    parameters. ``sleeps``: the weights' memory is taken away. ``swapped``: adapters whose content
    is another since then."""

    tensors: str | None = None
    is_opaque: bool = False
    is_reloaded: bool = False
    is_whole: bool = False
    sleeps: bool = False
    adapters: dict[int, LoadedAdapter] = field(default_factory=dict)
    swapped: frozenset[int] = frozenset()


class RankWeights:
    """What one rank has loaded. Owned by its worker; called from the worker's thread only."""

    def __init__(self, memory: Memory) -> None:
        """``memory``: of digests of files."""
        self._memory = memory
        self._adapters: dict[int, LoadedAdapter] = {}
        self._named: dict[str, str] = {}  # digests of adapters by the name that vLLM hashes
        self._untold: dict[int, LoadedAdapter] = {}
        self._swapped: set[int] = set()
        self._is_reloaded = self._is_whole = self._sleeps = False

    def loading(self, model: nn.Module, load: Callable[..., Any]) -> Callable[..., Any]:
        """A model's ``load_weights`` that is noted; ``load``: the plain one."""

        def load_weights(*args: Any, **kwargs: Any) -> Any:
            names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
            self._is_reloaded, self._is_whole = True, False
            loaded = load(*args, **kwargs)
            self._is_whole = loaded is not None and names <= set(loaded)
            return loaded

        return load_weights

    def load_adapter(self, request: Any, place: str, load: Callable[[], Any]) -> Any:
        """Loads an adapter by ``load`` from the folder ``place`` and notes the digest of its files,
        if they did not change meanwhile."""
        files = Fingerprint(Path(place), memory=self._memory)
        files.wait()
        loaded = load()
        digest = files.digest if files.digest is not None and files.still_holds() else ""
        if not digest:
            reason = files.failure or "its files changed while it was loaded"
            logger.warning("kvrecall: adapter %s is not pooled: %s", request.lora_name, reason)
        number, name = int(request.lora_int_id), str(request.lora_name)
        times, before = self._adapters.get(number, (0, None))
        is_other = before is not None and (before != digest or not digest)
        if is_other or self._named.get(name, digest) != digest:
            self._swapped.add(number)
        self._named[name] = digest
        self._adapters[number] = self._untold[number] = times + 1, digest
        return loaded

    def slept(self, level: int) -> None:
        """The memory of weights is gone. From level 2 on they do not come back."""
        self._sleeps = True
        self._is_reloaded |= level > 1

    def woke(self) -> None:
        self._sleeps = False

    def news(self) -> Look:
        """What was loaded since the last call, or the last look."""
        look = Look(
            is_reloaded=self._is_reloaded and not self._sleeps,
            adapters=self._untold,
            swapped=frozenset(self._swapped),
        )
        self._untold, self._swapped = {}, set()
        self._is_reloaded &= self._sleeps
        return look

    def look(self, worker: Any, weigh: bool) -> Look:
        """What there is now. ``weigh``: whether to read all parameters of the worker's models."""
        news, is_whole, self._is_whole = self.news(), self._is_whole, False
        tensors, is_opaque = None, False
        if weigh and not self._sleeps and not getattr(worker, "_weight_update_active", False):
            draft = worker.get_draft_model() if hasattr(worker, "get_draft_model") else None
            try:
                tensors, is_opaque = digest_of(
                    [model for model in (worker.get_model(), draft) if model is not None]
                )
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                logger.warning("kvrecall: cannot read the model's parameters: %s", error)
        return replace(
            news, tensors=tensors, is_opaque=is_opaque, is_whole=is_whole, sleeps=self._sleeps
        )


def digest_of(models: list[nn.Module]) -> tuple[str | None, bool]:
    """Digest of all bytes of all parameters, None if one has no memory; and whether a parameter is
    empty, as where a kernel has packed it."""
    digest, is_opaque = blake3(max_threads=blake3.AUTO), False
    for number, model in enumerate(models):
        for name, whole in model.named_parameters():
            for tensor in _parts(whole):
                if tensor.is_meta:
                    return None, False
                is_opaque |= tensor.numel() == 0
                digest.update(f"{number} {name} {tensor.dtype} {tuple(tensor.shape)};".encode())
                plain = tensor.detach().contiguous()  # one number may have any stride
                flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
                for first in range(0, flat.numel(), _CHUNK):
                    digest.update(flat[first : first + _CHUNK].cpu().numpy().data)
    return digest.hexdigest(16), is_opaque


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that have the bytes of a parameter: some are wrappers."""
    partitions = getattr(tensor, "partitions", None)
    if isinstance(partitions, dict):
        for part in partitions.values():
            yield from _parts(part)
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def together(looks: list[Look]) -> Look:
    """What all ranks have, in their order. An adapter that they have not read alike is unknown."""
    tensors = [look.tensors for look in looks if look.tensors is not None]
    return Look(
        " ".join(tensors) if looks and len(tensors) == len(looks) else None,
        any(look.is_opaque for look in looks),
        any(look.is_reloaded for look in looks),
        all(look.is_whole for look in looks),
        any(look.sleeps for look in looks),
        adapters_of([look.adapters for look in looks]),
        frozenset().union(*(look.swapped for look in looks)),
    )


def adapters_of(ranks: list[dict[int, LoadedAdapter]]) -> dict[int, LoadedAdapter]:
    """The adapters that ranks have loaded: of each the last load; no digest if ranks differ."""
    found: dict[int, LoadedAdapter] = {}
    for rank in ranks:
        for number, (times, digest) in rank.items():
            known, before = found.get(number, (times, digest))
            if known == times and before != digest:
                digest = ""
            if times >= known:
                found[number] = times, digest
    return found
