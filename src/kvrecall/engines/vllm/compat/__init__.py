"""All that depends on vLLM's versions: ``versions`` says which is supported, ``config`` reads its
configuration and layouts, ``patches`` lists every replaced part, the other modules hold those
parts. docs/compat.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def note_overwritten(vllm_config: Any, block_ids: Iterable[int]) -> None:
    """Tells attention layers that keep something about blocks which ones a load is writing."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        note = getattr(getattr(layer, "impl", None), "note_overwritten", None)
        if note is not None:
            note(block_ids)


def _attention(vllm_config: Any) -> tuple[Any, dict[str, Any]]:
    """An attention layer that speaks for its group in what it keeps beside KV, None if there is
    none; and the KV caches of all layers by name."""
    layers = vllm_config.compilation_config.static_forward_context
    caches = {name: getattr(layer, "kv_cache", None) for name, layer in layers.items()}
    impls = (getattr(layer, "impl", None) for layer in layers.values())
    return next((impl for impl in impls if hasattr(impl, "take_offload")), None), caches


def digest_pages(vllm_config: Any) -> Mapping[str, torch.Tensor]:
    """What attention layers keep of a block beside its KV, and the pool is to keep with it."""
    impl, caches = _attention(vllm_config)
    return impl.digest_pages(caches) if impl is not None else {}


def before_store(vllm_config: Any, block_ids: Iterable[int]) -> None:
    """Tells attention layers that these blocks go to the pool with what they keep of them."""
    impl, caches = _attention(vllm_config)
    if impl is not None:
        impl.before_store(block_ids, caches)


def note_restored(vllm_config: Any, block_ids: Iterable[int]) -> None:
    """Tells attention layers that a load has written these blocks and what they keep of them."""
    impl, _ = _attention(vllm_config)
    if impl is not None:
        impl.note_restored(block_ids)


def take_offload(vllm_config: Any, orders: Any, records: Any) -> set[str]:
    """Hands a step's offload orders to the attention layers, which share them; see ``Offload``.
    Returns the requests for which they could not be carried out."""
    impl, caches = _attention(vllm_config)
    return set() if impl is None else impl.take_offload(orders, caches, records)


def attention_activity(vllm_config: Any) -> Mapping[str, int]:
    """Totals of what this worker's attention layers did, if they count it."""
    for layer in vllm_config.compilation_config.static_forward_context.values():
        totals = getattr(getattr(layer, "impl", None), "activity", None)
        if totals is not None:
            return dict(totals())
    return {}
