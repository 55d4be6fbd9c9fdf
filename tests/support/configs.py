"""``config.json`` of published models, as far as the size of their KV cache depends on it."""

from __future__ import annotations

from typing import Any

GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "num_local_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": 201088, "torch_dtype": "bfloat16",
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
LLAMA_4_SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
        "num_experts_per_tok": 1, "attention_chunk_size": 8192, "vocab_size": 202048,
        "torch_dtype": "bfloat16", "interleave_moe_layer_step": 1,
        "max_position_embeddings": 10485760,
    },
}  # fmt: skip
MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "sliding_window": 4096, "vocab_size": 32000,
    "torch_dtype": "bfloat16", "max_position_embeddings": 32768,
}  # fmt: skip
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "torch_dtype": "bfloat16",
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36,
    "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 512, "vocab_size": 151936, "torch_dtype": "bfloat16",
    "max_position_embeddings": 262144,
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"], "model_type": "jamba", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attn_layer_offset": 4, "attn_layer_period": 8,
    "expert_layer_offset": 1, "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 16,
    "mamba_expand": 2, "num_experts": 16, "num_experts_per_tok": 2, "vocab_size": 65536,
    "torch_dtype": "bfloat16",
}  # fmt: skip
BAMBA_9B: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"], "model_type": "bamba", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "mamba_d_conv": 4,
    "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 128, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
GRANITE_4_SMALL: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
    "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
    "num_local_experts": 72, "num_experts_per_tok": 10, "shared_intermediate_size": 1536,
    "vocab_size": 100352, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "layer_types": [
        "attention" if place in (5, 15, 25, 35) else "mamba" for place in range(40)
    ],
}  # fmt: skip
NEMOTRON_H_8B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 4096,
    "intermediate_size": 21504, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "n_groups": 8, "ssm_state_size": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "conv_kernel": 4, "expand": 2,
    "vocab_size": 131072, "torch_dtype": "bfloat16",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "vocab_size": 129280, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V32: dict[str, Any] = {
    **DEEPSEEK_V3, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "hidden_size": 2304,
    "intermediate_size": 9216, "num_hidden_layers": 27, "num_attention_heads": 32,
    "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_intermediate_size": 1024,
    "num_experts": 256, "num_experts_per_token": 8, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "vocab_size": 163840, "torch_dtype": "bfloat16",
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
        "kda_layers": [n for n in range(1, 27) if n % 4], "short_conv_kernel_size": 4,
    },
}  # fmt: skip
WHISPER: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper",
    "is_encoder_decoder": True, "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32,
}  # fmt: skip
MLLAMA_11B: dict[str, Any] = {
    "architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama",
    "text_config": {
        "model_type": "mllama_text_model", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 40,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "vocab_size": 128256,
        "torch_dtype": "bfloat16", "max_position_embeddings": 131072,
    },
}  # fmt: skip
