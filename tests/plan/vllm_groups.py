"""vLLM's own KV groups of a model, without its weights: ``python -m plan.vllm_groups FOLDER...``.

Prints a line of JSON for each folder: the groups with their specs' names, layers, block tokens, and
bytes of a layer's page with and without padding, for a ``--block-size`` of 64, as on a GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

BLOCK = 64
MARK = "vllm-groups "


def groups_of(folder: str) -> list[dict[str, Any]]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    from vllm.v1.worker.utils import customize_attention_spec

    # On processors with AVX512_BF16 vLLM keeps every recurrent state in float32, unlike a GPU.
    torch.cpu._is_avx512_bf16_supported = lambda: False
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, enforce_eager=True, load_format="dummy",
        block_size=BLOCK, max_model_len=2048, enable_prefix_caching=True,
    ).create_engine_config()  # fmt: skip
    config.cache_config.kv_cache_layout = "LBHNC"
    torch.set_default_dtype(config.model_config.dtype)
    with set_current_vllm_config(config), torch.device("meta"):
        model = initialize_model(vllm_config=config)
    current_platform.update_block_size_for_backend(config)
    specs = {}
    with set_current_vllm_config(config):
        for name, layer in config.compilation_config.static_forward_context.items():
            if not hasattr(layer, "get_kv_cache_spec"):
                continue
            if spec := layer.get_kv_cache_spec(config):
                backend = layer.get_attn_backend()
                is_state = type(spec).__name__ == "MambaSpec"
                specs[name] = spec if is_state else customize_attention_spec(backend, spec)
        made = get_kv_cache_groups(config, specs)
    del model
    return [
        {
            "spec": type(group.kv_cache_spec).__name__,
            "layers": len(group.layer_names),
            "block_tokens": group.kv_cache_spec.block_size,
            "page": group.kv_cache_spec.page_size_bytes,
            "real": group.kv_cache_spec.real_page_size_bytes,
        }
        for group in made
    ]


def main(folders: list[str]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with tempfile.TemporaryDirectory() as place, set_current_vllm_config(VllmConfig()):
        where = f"file://{Path(place) / 'store'}"
        init_distributed_environment(1, 0, where, 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        for folder in folders:
            print(MARK + json.dumps(groups_of(folder)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
