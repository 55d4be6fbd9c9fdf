"""Which of vLLM's settings shape the bytes of KV: a decision for each field and variable.

The namespace holds the value of every setting that is ``Fate.IN_NAMESPACE`` here. Settings that
these tables do not know, because a newer vLLM has added them, count as such: an upgrade may cost
hits, and never brings wrong ones. tests/engine/test_fields.py fails for a setting of the installed
vLLM that is not decided.
``python -m kvrecall.engines.vllm.identity.fields docs/identity.md`` writes the
tables into the docs.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import vllm.envs as envs

from kvrecall.engines.vllm import generated_page
from kvrecall.engines.vllm.identity.weights import draft_model


class Fate(enum.Enum):
    """What becomes of a setting. The value says it to people."""

    IN_NAMESPACE = "in the namespace by its value"
    ADAPTER = "in the namespaces of LoRA adapters"
    PARTS = "decided part by part, below"
    LOADED_MODEL = "read off the loaded model"
    FILES = "identified by the content of files"
    BLOCK_HASH = "carried by vLLM's block hash"
    NAMESPACE_OTHERWISE = "in the namespace in another form"
    NO_EFFECT = "no effect on KV"


@dataclass(frozen=True, slots=True)
class Decision:
    """The fate of settings, and the reason they share."""

    fate: Fate
    reason: str


_in = partial(Decision, Fate.IN_NAMESPACE)
_out = partial(Decision, Fate.NO_EFFECT)
_adapter = partial(Decision, Fate.ADAPTER)
_loaded = partial(Decision, Fate.LOADED_MODEL)
_hash = partial(Decision, Fate.BLOCK_HASH)
_otherwise = partial(Decision, Fate.NAMESPACE_OTHERWISE)

UNKNOWN = _in("Unknown to this version of kvrecall.")
PARTS = Decision(Fate.PARTS, "A configuration of its own.")

KERNELS = _in("Chooses kernels or how the graph is compiled, and so how sums are rounded.")
NUMBERS = _in("The type or precision of weights, activations, states or KV.")
REACH = _in("Which tokens a token attends to, and for which a layer computes KV.")
CODE = _in("Which code computes the model.")
RANKS = _in("How work is spread over ranks, and so in which order sums are taken.")
MEDIA = _in(
    "How media become input. vLLM's hash of media holds a request's value, not the engine's."
)
ENCODER = _in("How the encoder of images, video and audio computes.")
DRAFT = _in("Shapes the draft model's layers, whose KV lies in the same blocks; unset without one.")
LOADING = _in("Which tensors of the model's folder are read, and what is made of them.")

ADAPTERS = _adapter("How an adapter's part is computed; requests without share KV.")
FILES = Decision(Fate.FILES, "Where files are found; their content is the fingerprint of weights.")

LIMITS = _loaded("A limit that shapes KV only through rope caches and switches of the model.")
TOKENS = _hash("Decides which tokens there are, and the hash is over tokens.")
INPUT = _hash("What a request brings; the hash holds its embeddings and media.")
LAYOUT = _otherwise("Block size, layout, and the layers and heads of every rank.")
CONFIG = _otherwise("The model's configuration as read, overrides applied.")
MACHINE = _otherwise("The device and the instruction set that kernels are chosen for.")

BATCHES = _out("How many tokens a step takes; prefix caching mixes steps of all sizes anyway.")
MEMORY = _out("How much memory there is, where it lies and when it is given back.")
PLACES = _out("Addresses, ports, ranks, paths, names, credentials and time limits.")
STARTUP = _out("How the same weights and kernels are loaded, warmed up or kept for a restart.")
REPORTS = _out("Logs, metrics, traces, profiles and checks.")
SERVICE = _out("Which requests are served, when, and how answers are sent.")
LAUNCH = _out("How processes, workers and their groups are started.")
HEADS = _out("Acts on the last hidden states, behind the last layer that has KV.")
TRANSFER = _out("Carries KV or encoder outputs from elsewhere, and changes no byte of them.")
STREAMS = _out("Which work overlaps; the kernels and their order of sums stay.")
DRAFTING = _out("Which tokens a draft proposes; the model decides which of them stay.")
MARKS = _out("Permits, marks or warns, and computes nothing.")
BUILD = _out("How vLLM was built; the engine's version tells.")

TABLE: Mapping[str, Mapping[Decision, str]] = {
    "VllmConfig": {
        PARTS: "model_config cache_config parallel_config scheduler_config device_config "
        "load_config offload_config attention_config aux_output_config engram_config mamba_config "
        "kernel_config lora_config speculative_config watermark_config diffusion_config "
        "structured_outputs_config observability_config logging_config compilation_config "
        "profiler_config kv_transfer_config kv_events_config ec_transfer_config ec_manager_config "
        "reasoning_config weight_transfer_config",
        KERNELS: "performance_mode",
        CODE: "additional_config",
        _otherwise("Made of the quantization settings and the checkpoint."): "quant_config",
        _otherwise("Only sets other fields, which are decided here."): "optimization_level",
        PLACES: "instance_id shutdown_timeout",
    },
    "ModelConfig": {
        PARTS: "multimodal_config pooler_config",
        NUMBERS: "dtype quantization quantization_config",
        CODE: "trust_remote_code code_revision model_class_overrides model_impl convert",
        KERNELS: "enforce_eager enable_prompt_embeds disable_cascade_attn",
        REACH: "disable_sliding_window",
        FILES: "model model_weights revision word_embeddings_untied_by_checkpoint",
        CONFIG: "hf_config hf_text_config hf_config_path hf_overrides config_format",
        LIMITS: "max_model_len spec_target_max_model_len",
        _loaded("Sampling, but for Llama 4's attention temperature."): "generation_config "
        "override_generation_config",
        TOKENS: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init "
        "return_sampling_mask use_fp64_gumbel enable_trace_replay logits_processors "
        "io_processor_plugin",
        _otherwise("Part of the weights' fingerprint where these are random."): "seed",
        _otherwise("Resolved in SchedulerConfig.runner_type."): "runner",
        MEMORY: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
        "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator",
        HEADS: "max_logprobs logprobs_mode",
        PLACES: "served_model_name hf_token allowed_local_media_path allowed_media_domains",
        SERVICE: "renderer_num_workers",
        MARKS: "allow_deprecated_quantization is_submodel_config",
    },
    "MultiModalConfig": {
        MEDIA: "media_io_kwargs mm_processor_kwargs mm_device_do_normalize video_pruning_rate "
        "video_pruning_method",
        ENCODER: "mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path",
        _in("Modalities that are off change the model's graph."): "language_model_only "
        "limit_per_prompt",
        INPUT: "enable_mm_embeds mm_hasher_algorithm",
        TOKENS: "interleave_mm_strings",
        MEMORY: "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
        "mm_ipc_gpu_memory_gb",
        STARTUP: "skip_mm_profiling mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin",
        TRANSFER: "mm_tensor_ipc allow_missing_mm_embeddings",
    },
    "PoolerConfig": {
        HEADS: "task pooling_type seq_pooling_type tok_pooling_type use_activation "
        "enable_flash_late_interaction dimensions logit_mean logit_sigma step_tag_id "
        "returned_token_ids",
        TOKENS: "enable_chunked_processing max_embed_len",
    },
    "QuantizationConfigArgs": {
        NUMBERS: "linear moe ignore targets",
    },
    "QuantSpec": {
        NUMBERS: "weight activation",
    },
    "CacheConfig": {
        NUMBERS: "cache_dtype kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype",
        REACH: "sliding_window swa_bounded_replay kv_sharing_fast_prefill",
        KERNELS: "mamba_cache_mode replayssm_buffer_len use_replayssm use_kda_recoverssm",
        LAYOUT: "block_size kv_cache_layout mamba_page_size_padded skip_page_size_padded",
        CONFIG: "is_attention_free",
        _otherwise("The hash and the seed it starts from."): "prefix_caching_hash_algo",
        _hash("How many tokens one hash covers; it covers all before them."): "prefix_match_unit "
        "hash_block_size cache_hit_alignment_tokens",
        _out("Where recurrent states are kept, and these are not pooled."): "mamba_block_size "
        "enable_mamba_shared_prefix_checkpoint",
        MEMORY: "gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override "
        "num_gpu_blocks num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency "
        "prefix_cache_retention_interval effective_attention_block_size",
        TRANSFER: "kv_offloading_size kv_offloading_backend",
        _out("There is no pool without it."): "enable_prefix_caching",
        _out("How the block size was given."): "user_specified_block_size _block_size_resolved",
    },
    "ParallelConfig": {
        PARTS: "eplb_config fault_tolerance_config",
        RANKS: "prefill_context_parallel_size decode_context_parallel_size "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size dcp_comm_backend "
        "dcp_q_replicate enable_hc_sp enable_expert_parallel expert_placement_strategy "
        "enable_eplb enable_elastic_ep all2all_backend enable_fault_tolerance "
        "disable_custom_all_reduce enable_dbo ubatch_size",
        _in("For models with experts only, which all these ranks share."): "data_parallel_size",
        _in("As far as one replica spans nodes, whose sums travel otherwise."): "nnodes",
        CODE: "worker_cls worker_extension_cls",
        LAYOUT: "pipeline_parallel_size tensor_parallel_size world_size",
        CONFIG: "is_moe_model",
        TOKENS: "enable_batch_sharded_sampling",
        BATCHES: "dbo_decode_token_threshold dbo_prefill_token_threshold",
        STARTUP: "enable_ep_weight_filter max_parallel_loading_workers",
        MEMORY: "enable_shm_tensor_arena elastic_ep_max_dp_size numa_bind numa_bind_nodes "
        "numa_bind_cpus",
        LAUNCH: "distributed_executor_backend data_parallel_backend data_parallel_external_lb "
        "data_parallel_hybrid_lb dp_sync_interval disable_nccl_for_dp_synchronization "
        "ray_workers_use_nsight ray_runtime_env placement_group assigned_physical_gpu_ids "
        "_allow_auto_resolve_cp_interleave_size _api_process_count _api_process_rank",
        PLACES: "data_parallel_size_local data_parallel_rank data_parallel_rank_local "
        "data_parallel_index data_parallel_master_ip data_parallel_master_port "
        "data_parallel_rpc_port _data_parallel_master_port_list _coord_store_port master_addr "
        "master_port node_rank rank distributed_timeout_seconds cpu_distributed_timeout_seconds",
    },
    "EPLBConfig": {
        RANKS: "num_redundant_experts policy",
        _out("When and how experts move; where each lies follows the traffic."): "window_size "
        "step_interval use_async communicator enable_migration_batching",
        REPORTS: "log_balancedness log_balancedness_interval",
    },
    "FaultToleranceConfig": {PLACES: "engine_recovery_timeout_sec"},
    "SchedulerConfig": {
        CODE: "runner_type",
        REACH: "disable_chunked_mm_input",
        CONFIG: "is_multimodal_model",
        LAYOUT: "disable_hybrid_kv_cache_manager",
        BATCHES: "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs "
        "max_num_active_seqs long_prefill_token_threshold long_prefill_token_threshold_adaptive "
        "enable_chunked_prefill max_num_encoder_input_tokens prefill_schedule_interval",
        MEMORY: "encoder_cache_size scheduler_reserve_full_isl watermark",
        SERVICE: "max_num_queued_reqs max_num_queued_tokens policy scheduler_cls "
        "async_scheduling stream_interval",
    },
    "DeviceConfig": {MACHINE: "device device_type"},
    "LoadConfig": {
        LOADING: "load_format model_loader_extra_config ignore_patterns device",
        FILES: "download_dir",
        STARTUP: "safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location",
    },
    "OffloadConfig": {
        PARTS: "uva prefetch",
        KERNELS: "offload_backend",
    },
    "UVAOffloadConfig": {MEMORY: "cpu_offload_gb cpu_offload_params"},
    "PrefetchOffloadConfig": {
        _in("Puts operations between layers, across which nothing is fused."): "offload_group_size "
        "offload_num_in_group offload_params",
        STREAMS: "offload_prefetch_step",
    },
    "AttentionConfig": {
        PARTS: "hisparse_config",
        KERNELS: "backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version "
        "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
        "tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend "
        "indexer_sparse_logits sparse_mla_force_mqa flex_attn_block_m flex_attn_block_n "
        "flex_attn_q_block_size flex_attn_kv_block_size",
        NUMBERS: "disable_flashinfer_q_quantization use_prefill_query_quantization "
        "indexer_kv_dtype",
        REACH: "use_non_causal",
        BATCHES: "sparse_mla_prefill_workspace_factor",
    },
    "HiSparseConfig": {
        KERNELS: "eager_host_mirror",
        MEMORY: "device_buffer_size",
    },
    "AuxOutputConfig": {
        KERNELS: "enable_return_routed_experts",
        MEMORY: "max_bytes",
    },
    "EngramConfig": {MEMORY: "cpu_offload embedding_across_dp dp_shared_memory use_thp"},
    "MambaConfig": {
        KERNELS: "backend ssu_algorithm",
        NUMBERS: "enable_stochastic_rounding stochastic_rounding_philox_rounds",
    },
    "KernelConfig": {
        PARTS: "ir_op_priority",
        KERNELS: "moe_backend linear_backend linear_backend_per_quant "
        "sparse_indexer_topk_backend enable_flashinfer_autotune "
        "enable_rocm_segmented_attn_autotune",
        STARTUP: "enable_cutedsl_warmup enable_jit_warmup",
    },
    "IrOpPriorityConfig": {KERNELS: "rms_norm fused_add_rms_norm gelu_and_mul_sparse"},
    "LoRAConfig": {
        ADAPTERS: "max_lora_rank fully_sharded_loras lora_dtype target_modules "
        "enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
        _adapter("With hand-tuned kernels only, which it selects."): "max_loras",
        _hash("The adapter of a request, by name and path."): "default_mm_loras",
        MEMORY: "max_cpu_loras",
        STARTUP: "specialize_active_lora",
        HEADS: "max_lora_cls_labels",
    },
    "SpeculativeConfig": {
        PARTS: "draft_model_config draft_load_config",
        DRAFT: "method num_speculative_tokens num_speculative_tokens_per_batch_size "
        "parallel_drafting index_share_for_mtp_iteration quantization moe_backend "
        "attention_backend kv_cache_dtype enforce_eager draft_tensor_parallel_size "
        "code_revision",
        FILES: "model revision",
        LIMITS: "max_model_len",
        _otherwise("The model and the ranks that are decided above."): "target_model_config "
        "target_parallel_config draft_parallel_config",
        BATCHES: "disable_padded_drafter_batch enable_adaptive_verification",
        DRAFTING: "use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max "
        "prompt_lookup_min suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests "
        "suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_sample_method "
        "dspark_draft_topk",
        TOKENS: "rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length",
        _out("Which blocks vLLM takes as a hit."): "disable_eagle_block_drop",
        MARKS: "tensor_parallel_size",
    },
    "DiffusionConfig": {KERNELS: "canvas_length max_denoising_steps"},
    "WatermarkConfig": {
        TOKENS: "key algorithm alpha context_width deduplicate_contexts "
        "deduplicate_contexts_max_history prf allow_target_only_watermarking",
    },
    "StructuredOutputsConfig": {
        TOKENS: "backend disable_any_whitespace disable_additional_properties reasoning_parser "
        "reasoning_parser_plugin enable_in_reasoning",
    },
    "ReasoningConfig": {
        TOKENS: "reasoning_parser reasoning_start_str reasoning_end_str "
        "_reasoning_start_token_ids _reasoning_end_token_ids _natural_reasoning_end_token_ids "
        "_enabled",
    },
    "CompilationConfig": {
        PARTS: "pass_config dynamic_shapes_config",
        KERNELS: "mode backend custom_ops ir_enable_torch_wrap splitting_ops "
        "inductor_compile_config inductor_passes cudagraph_mode use_inductor_graph_partition "
        "cudagraph_decoder_replay decoder_replay_trim_threshold",
        ENCODER: "compile_mm_encoder cudagraph_mm_encoder",
        _loaded("The loaded layers."): "static_forward_context static_all_moe_layers",
        _otherwise("What custom_ops does to the model's layers."): "enabled_custom_ops "
        "disabled_custom_ops",
        BATCHES: "compile_sizes compile_ranges_endpoints cudagraph_capture_sizes "
        "max_cudagraph_capture_size decoder_replay_cudagraph_capture_sizes "
        "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
        "encoder_cudagraph_max_frames_per_batch",
        STARTUP: "cudagraph_num_of_warmups compile_cache_save_format fast_moe_cold_start",
        _out("Whether graphs copy their input before they read it."): "cudagraph_copy_inputs",
        _out("Whether requests without adapter pay for adapters, which add nothing to them."): (
            "cudagraph_specialize_lora"
        ),
        PLACES: "debug_dump_path cache_dir local_cache_dir",
        REPORTS: "traced_files compilation_time encoder_compilation_time",
    },
    "PassConfig": {
        KERNELS: "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops "
        "fuse_allreduce_rms enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla "
        "fuse_act_padding fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache "
        "rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb",
    },
    "DynamicShapesConfig": {KERNELS: "type evaluate_guards assume_32_bit_indexing"},
    "ObservabilityConfig": {
        REPORTS: "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
        "per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample "
        "custom_histogram_buckets cudagraph_metrics enable_layerwise_nvtx_tracing "
        "enable_mfu_metrics enable_mm_processor_stats enable_logging_iteration_details "
        "jit_monitor_mode jit_monitor_verbose",
    },
    "LoggingConfig": {
        REPORTS: "log_level formatter configure_logging pylogging_config_file",
    },
    "ProfilerConfig": {
        REPORTS: "profiler torch_profiler_dir torch_profiler_activities proton_profiler_dir "
        "proton_context proton_data proton_backend proton_mode proton_hook proton_output_format "
        "proton_graph_attribution torch_profiler_with_stack torch_profiler_with_flops "
        "torch_profiler_use_gzip torch_profiler_dump_cuda_time_total "
        "torch_profiler_record_shapes torch_profiler_with_memory capture_torch_profiler "
        "detailed_trace_annotation ignore_frontend delay_iterations max_iterations "
        "warmup_iterations active_iterations wait_iterations",
    },
    "KVTransferConfig": {
        TRANSFER: "kv_connector kv_role kv_connector_extra_config kv_connector_module_path",
        LAYOUT: "enable_permute_local_kv",
        MEMORY: "kv_buffer_device",
        PLACES: "engine_id kv_port",
        _out("What happens to a request whose KV is lost."): "kv_load_failure_policy",
    },
    "KVEventsConfig": {
        REPORTS: "enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm "
        "max_queue_size topic",
    },
    "ECTransferConfig": {
        TRANSFER: "ec_connector ec_role ec_connector_extra_config ec_connector_module_path",
        MEMORY: "ec_buffer_device ec_buffer_size",
        PLACES: "engine_id ec_ip ec_port",
        CONFIG: "mm_encoder_output_widths",
    },
    "EncoderCacheManagerConfig": {CODE: "encoder_cache_manager_cls manager_config"},
    "WeightTransferConfig": {
        _in("Weights change while the engine runs."): "backend",
    },
}
"""Fields of the configurations reachable from ``VllmConfig``, by class and decision."""

ELSEWHERE: Mapping[str, str] = {
    "ModelArchitectureConfig": "derived from the model's configuration",
    "SpeechToTextConfig": "how the front end cuts audio; the media hash holds the pieces",
    "SpeechToTextParams": "parameters of one request",
    "Range": "a range of step sizes",
    "BaseDummyOptions": "counts and sizes for profiling; see MultiModalConfig.limit_per_prompt",
    "VideoDummyOptions": "as BaseDummyOptions",
    "ImageDummyOptions": "as BaseDummyOptions",
    "AudioDummyOptions": "as BaseDummyOptions",
}
"""Configurations of vLLM that no field of ``VllmConfig`` holds, and what stands for them."""

HASHED_ALL_THE_SAME: Mapping[str, str] = {
    "Compiled graphs hold buffers of that size, and may index them with 32 bits.": (
        "SchedulerConfig.max_num_batched_tokens SchedulerConfig.max_num_seqs"
    ),
    "Compiled graphs are specialized by size. A block may come from any size of step already, and "
    "these follow from limits that differ between restarts.": (
        "CompilationConfig.compile_sizes CompilationConfig.compile_ranges_endpoints "
        "CompilationConfig.cudagraph_capture_sizes CompilationConfig.max_cudagraph_capture_size "
        "CompilationConfig.decoder_replay_cudagraph_capture_sizes "
        "CompilationConfig.encoder_cudagraph_token_budgets "
        "CompilationConfig.encoder_cudagraph_max_vision_items_per_batch "
        "CompilationConfig.encoder_cudagraph_max_frames_per_batch"
    ),
    "A factor of max_model_len, and itself 5 or 2 by max_model_len: how much context one chunk of "
    "a prefill gathers.": "AttentionConfig.sparse_mla_prefill_workspace_factor",
    "The batch is split above so many tokens; whether it is split at all is in the namespace.": (
        "ParallelConfig.dbo_decode_token_threshold ParallelConfig.dbo_prefill_token_threshold"
    ),
    "vLLM hashes every field it does not list as harmless, and has not listed these.": (
        "CacheConfig.kv_offloading_size CacheConfig.kv_offloading_backend "
        "CompilationConfig.compile_cache_save_format CompilationConfig.cudagraph_num_of_warmups "
        "CompilationConfig.cudagraph_specialize_lora CompilationConfig.fast_moe_cold_start "
        "ModelConfig.allow_deprecated_quantization ModelConfig.is_submodel_config "
        "ModelConfig.max_logprobs ModelConfig.renderer_num_workers ModelConfig.enable_sleep_mode "
        "ModelConfig.sleep_preserve_parameter_names ModelConfig.sleep_mode_backend "
        "ModelConfig.sleep_mode_offload_cudagraph ModelConfig.enable_nccl_comm_suspend "
        "ModelConfig.enable_cumem_allocator ParallelConfig.distributed_timeout_seconds "
        "ParallelConfig.cpu_distributed_timeout_seconds ParallelConfig.enable_ep_weight_filter "
        "ParallelConfig._allow_auto_resolve_cp_interleave_size"
    ),
    "Input buffers of graphs are copied or not; the values in them are the same.": (
        "CompilationConfig.cudagraph_copy_inputs"
    ),
    "Recurrent states are cached every so many tokens. They are not pooled, and without prefix "
    "caching the field is max_model_len.": "CacheConfig.mamba_block_size",
    "Embedding rows lie on the host or on other ranks. A lookup copies a row, and the all-reduce "
    "adds zeros to it; dp_shared_memory follows from free memory.": (
        "EngramConfig.cpu_offload EngramConfig.embedding_across_dp "
        "EngramConfig.dp_shared_memory EngramConfig.use_thp"
    ),
    "The graph reads weights through the bus; they are the same weights.": (
        "UVAOffloadConfig.cpu_offload_gb UVAOffloadConfig.cpu_offload_params"
    ),
    "The graph fetches weights earlier; they are the same weights.": (
        "PrefetchOffloadConfig.offload_prefetch_step"
    ),
    "Rows kept on the device; those missing are fetched, and attended to all the same.": (
        "HiSparseConfig.device_buffer_size"
    ),
    "Ranks of one deployment must agree on it, or they wait for each other.": (
        "ParallelConfig.dp_sync_interval ParallelConfig.disable_nccl_for_dp_synchronization "
        "ParallelConfig.elastic_ep_max_dp_size EPLBConfig.window_size EPLBConfig.step_interval "
        "EPLBConfig.use_async EPLBConfig.communicator EPLBConfig.enable_migration_batching "
        "EPLBConfig.log_balancedness EPLBConfig.log_balancedness_interval "
        "FaultToleranceConfig.engine_recovery_timeout_sec"
    ),
    "Adapters' classification heads; no layer with KV.": "LoRAConfig.max_lora_cls_labels",
    "The graph gives out confidences of drafts for the next step's size.": (
        "SpeculativeConfig.enable_adaptive_verification"
    ),
}
"""Why vLLM's ``compute_hash`` holds fields whose fate here is ``NO_EFFECT``."""

ENVIRONMENT: Mapping[Decision, str] = {
    KERNELS: "VLLM_BATCH_INVARIANT VLLM_TRITON_USE_TD VLLM_USE_STANDALONE_COMPILE "
    "VLLM_ENABLE_PREGRAD_PASSES VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_LAYERNAME "
    "VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING "
    "VLLM_CPU_CI_ENV VLLM_CPU_ATTN_SPLIT_KV VLLM_ZENTORCH_WEIGHT_PREPACK VLLM_XLA_USE_SPMD "
    "VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_INC_WNA16_BACKEND VLLM_USE_TRITON_AWQ "
    "VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_DISABLED_KERNELS VLLM_USE_HW_AGNOSTIC "
    "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_GDN_DECODE_KERNEL VLLM_USE_OINK_OPS "
    "VLLM_MLA_DISABLE VLLM_MARLIN_USE_ATOMIC_ADD VLLM_HUMMING_MOE_GEMM_TYPE VLLM_USE_DEEP_GEMM "
    "VLLM_MOE_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES "
    "VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_MOE_SKIP_PADDING VLLM_ENABLE_GEMM_RS "
    "VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER "
    "VLLM_USE_FLASHINFER_MOE_INT4 VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS "
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION "
    "VLLM_USE_V2_MODEL_RUNNER VLLM_ENABLE_HPC_OPS VLLM_DBO_COMM_SMS VLLM_ROCM_USE_AITER "
    "VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MOE "
    "VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_MLA "
    "VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_USE_AITER_MHA "
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA "
    "VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FP4BMM "
    "VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS "
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_MONO_DECODE "
    "VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_SKINNY_GEMM VLLM_ROCM_FP8_PADDING "
    "VLLM_ROCM_MOE_PADDING VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    _in("Kernel settings in a folder, by their content."): "VLLM_TUNED_CONFIG_FOLDER",
    NUMBERS: "VLLM_FLOAT32_MATMUL_PRECISION VLLM_CPU_INT4_W4A8 VLLM_MARLIN_INPUT_DTYPE "
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM "
    "VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_USE_DEEP_GEMM_E8M0 VLLM_B12X_MOE_FP4_FORCE_A16 "
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD "
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_ROCM_USE_AITER_MOE_SITUV2 "
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_QUICK_REDUCE_QUANTIZATION "
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB",
    RANKS: "VLLM_REPLICATE_EMBED VLLM_DISABLE_PYNCCL VLLM_ALLREDUCE_USE_SYMM_MEM "
    "VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC "
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_USE_NCCL_SYMM_MEM VLLM_ROCM_USE_AITER_CUSTOM_AR "
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB "
    "VLLM_DCP_Q_REPLICATE VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_Q_GATHER "
    "VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE "
    "VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE "
    "VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION "
    "VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT",
    MEDIA: "VLLM_VIDEO_LOADER_BACKEND VLLM_MEDIA_CONNECTOR VLLM_USE_RUST_FRONTEND",
    _adapter("How an adapter's part is added."): "VLLM_LORA_ENABLE_DUAL_STREAM",
    _loaded("What plug-ins put into the model: its code and backends."): "VLLM_PLUGINS",
    LIMITS: "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    FILES: "VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH",
    LAYOUT: "VLLM_KV_CACHE_LAYOUT VLLM_SSM_CONV_STATE_LAYOUT VLLM_PP_LAYER_PARTITION "
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
    _otherwise("ParallelConfig.data_parallel_size."): "VLLM_DP_SIZE",
    MACHINE: "VLLM_TARGET_DEVICE VLLM_TPU_USING_PATHWAYS",
    TOKENS: "VLLM_USE_FASTOKENS VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL "
    "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS "
    "VLLM_SYSTEM_START_DATE VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_ENFORCE_STRICT_TOOL_CALLING "
    "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT",
    BATCHES: "VLLM_XPU_PP_MICROBATCH VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN "
    "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",
    _out("How many cores share the work; as with steps, blocks of all counts mix."): (
        "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU"
    ),
    STREAMS: "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD "
    "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_LORA_DISABLE_PDL",
    MEMORY: "VLLM_CPU_KVCACHE_SPACE VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE "
    "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE "
    "VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS "
    "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA "
    "VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_ENABLE_STARTUP_PLAN VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME",
    STARTUP: "VLLM_USE_AOT_COMPILE VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_BYTECODE_HOOK "
    "VLLM_FORCE_AOT_LOAD VLLM_DISABLE_COMPILE_CACHE VLLM_COMPILE_CACHE_SAVE_FORMAT "
    "VLLM_DEEP_GEMM_WARMUP VLLM_HAS_FLASHINFER_CUBIN VLLM_ENABLE_CUDAGRAPH_GC "
    "VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_TRITON_JIT_WARMUP_NUM_THREADS "
    "VLLM_TEST_FORCE_LOAD_FORMAT VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_SKIP_P2P_CHECK "
    "VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ELASTIC_EP_DRAIN_REQUESTS",
    TRANSFER: "VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS "
    "VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_MQ_MAX_CHUNK_BYTES_MB "
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT "
    "VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO "
    "VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_STORE_TIER_LOG VLLM_NIXL_SIDE_CHANNEL_HOST "
    "VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT "
    "VLLM_P2P_MAX_PEERS VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S "
    "VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT MOONCAKE_PREFERRED_SEGMENT "
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME",
    LAUNCH: "VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_USE_SPINLOOP_EXT "
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE "
    "VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_WRAPPED_PP_COMM "
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES "
    "VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS "
    "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_EXTRA_ENV_VARS_TO_COPY "
    "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES "
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES RAY_EXPERIMENTAL_NOSET_HABANA_VISIBLE_MODULES "
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES "
    "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR "
    "RAY_EXPERIMENTAL_NOSET_RBLN_RT_VISIBLE_DEVICES "
    "RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES RAY_EXPERIMENTAL_NOSET_TPU_VISIBLE_CHIPS",
    PLACES: "VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH VLLM_LOOPBACK_IP VLLM_DP_RANK "
    "VLLM_DP_RANK_LOCAL VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT LOCAL_RANK CUDA_VISIBLE_DEVICES "
    "LD_LIBRARY_PATH CUDA_HOME VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE "
    "VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_XLA_CACHE_PATH VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR "
    "VLLM_NCCL_SO_PATH VLLM_NCCL_INCLUDE_PATH VLLM_CUDART_SO_PATH VLLM_ENABLE_CUDA_COMPATIBILITY "
    "VLLM_CUDA_COMPATIBILITY_PATH VLLM_RUST_FRONTEND_PATH VLLM_GPU_NIC_PCIE_MAPPING "
    "VLLM_NIC_SELECTION_VARS VLLM_PROCESS_NAME_PREFIX VLLM_API_KEY S3_ACCESS_KEY_ID "
    "S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL VLLM_LORA_RESOLVER_CACHE_DIR "
    "VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_ENGINE_READY_TIMEOUT_S "
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
    SERVICE: "VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT "
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_MAX_N_SEQUENCES "
    "VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS "
    "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_XGRAMMAR_CACHE_MB VLLM_REGEX_COMPILATION_TIMEOUT_S "
    "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_V1_USE_OUTLINES_CACHE "
    "VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API VLLM_SERVER_DEV_MODE "
    "VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_V1_OUTPUT_PROC_CHUNK_SIZE "
    "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_DISABLE_REQUEST_ID_RANDOMIZATION "
    "VLLM_USE_RUST_BENCH VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT "
    "VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB "
    "VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB "
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT "
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_DURATION_S "
    "VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_EMBED_DECODE_BYTES "
    "VLLM_MAX_IMAGE_PIXELS",
    REPORTS: "VLLM_GPU_SYNC_CHECK VLLM_PATTERN_MATCH_DEBUG VLLM_DEBUG_DUMP_PATH "
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS "
    "VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH "
    "VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR NO_COLOR "
    "FORCE_COLOR VLLM_LOG_STATS_INTERVAL VLLM_TRACE_FUNCTION VLLM_XLA_CHECK_RECOMPILATION "
    "VLLM_LOG_BATCHSIZE_INTERVAL VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_COMPUTE_NANS_IN_LOGITS "
    "VLLM_RAISE_ON_LOGIT_NANS VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING "
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_GC_DEBUG VLLM_DEBUG_WORKSPACE "
    "VLLM_LOG_MODEL_INSPECTION VLLM_DEBUG_MFU_METRICS VLLM_DISABLE_LOG_LOGO",
    BUILD: "VLLM_MAIN_CUDA_VERSION MAX_JOBS NVCC_THREADS VLLM_USE_PRECOMPILED "
    "VLLM_USE_PRECOMPILED_RUST VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT "
    "VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG CMAKE_BUILD_TYPE VERBOSE "
    "VLLM_SKIP_VERSION_SUFFIX",
}
"""Variables of ``vllm.envs`` and those its ``compile_factors`` adds, by decision."""

LIBRARIES = (
    "NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE ONEDNN_DEFAULT_FPMATH_MODE MKL_CBWR "
    "CUBLAS_WORKSPACE_CONFIG NCCL_ALGO NCCL_PROTO TRITON_F32_DEFAULT TORCHDYNAMO_DISABLE "
    "TORCH_COMPILE_DISABLE FORCE_NUM_KV_SPLITS FLA_TRIL_PRECISION FLA_USE_FAST_OPS FLA_USE_TMA "
    "USE_DEFAULT_FLA_NORM INKLING_MULTIMEM_AR INKLING_SPLIT_KV INKLING_GFX950_GLUON "
    "LAMPORT_RS_SCONV XPU_USE_TRITON_KERNEL USE_FLAGOS XHS_VIDEO_JPEG_QUALITY"
).split()
"""Variables outside ``vllm.envs`` by which vLLM's models and the libraries below it choose kernels
and precision. In the namespace when set."""


def ingredients(vllm_config: Any) -> dict[str, str]:
    """Fields in the namespace, ``Class.field`` to canonical text, for an engine's configuration.

    Holds the values that are not the defaults of the installed vLLM and a digest of these defaults:
    equal results mean equal values of all fields. The same in every process and on every machine
    for the same configuration.
    """
    return _Walk(vllm_config, Fate.IN_NAMESPACE).result()


def adapter_ingredients(vllm_config: Any) -> dict[str, str]:
    """What ``ingredients`` is to the engine's blocks, for those of LoRA adapters. Empty without
    LoRA. Blocks of the base model are shared with engines that serve no adapters."""
    if vllm_config.lora_config is None:
        return {}
    return _Walk(vllm_config, Fate.ADAPTER).result() | _variables(Fate.ADAPTER, None)


def environment(getters: Mapping[str, Callable[[], Any]] | None = None) -> dict[str, str]:
    """Environment variables in the namespace, as ``ingredients`` has fields.

    ``getters``: vLLM's function for each variable; those of ``vllm.envs`` by default.
    """
    set_below = {name: os.environ[name] for name in LIBRARIES if name in os.environ}
    return _variables(Fate.IN_NAMESPACE, getters) | set_below


def unrepeatable(vllm_config: Any) -> str:
    """Why no other engine can compute this one's KV; empty if one can."""
    if vllm_config.weight_transfer_config is not None:
        return "weight_transfer_config replaces the weights while the engine runs"
    media = vllm_config.model_config.multimodal_config
    is_fp8 = media is not None and media.mm_encoder_attn_dtype == "fp8"
    if is_fp8 and media.mm_encoder_fp8_scale_path is None:
        return (
            "mm_encoder_attn_dtype fp8 without mm_encoder_fp8_scale_path takes its scales from "
            "the media served so far"
        )
    return ""


class _Walk:
    """Gathers the fields of one fate from a configuration and its parts."""

    def __init__(self, root: Any, fate: Fate) -> None:
        self._root = root
        self._fate = fate
        self._found: dict[str, str] = {}
        self._defaults: dict[str, str] = {}
        self._labels: set[str] = set()

    def result(self) -> dict[str, str]:
        self._config(self._root, "VllmConfig")
        return self._found | {"defaults of fields": _digest(self._defaults)}

    def _config(self, config: Any, label: str) -> None:
        """Adds a configuration's fields, their names beginning with ``label``."""
        self._labels.add(label)
        decided = decisions(type(config).__name__)
        for field in dataclasses.fields(config):
            decision = decided.get(field.name, UNKNOWN)
            name = f"{type(config).__name__}.{field.name}"
            value = getattr(config, field.name, None)
            if decision is PARTS and not (value is None or dataclasses.is_dataclass(value)):
                decision = UNKNOWN
            if decision is PARTS:
                self._part(value, f"{label}.{field.name}", name)
            elif decision.fate is self._fate:
                self._add(f"{label}.{field.name}", name, value, field, decision is not UNKNOWN)

    def _part(self, part: Any, key: str, name: str) -> None:
        """Adds the fields of a part, and the part itself where being there means something."""
        draftless = name == "VllmConfig.speculative_config" and not _has_draft(self._root)
        if part is None or draftless:
            return
        kind = type(part).__name__
        counts = _COUNTS_ITSELF.get(name, _never)
        if self._fate is Fate.IN_NAMESPACE and counts(self._root):
            self._found[key] = kind
        self._config(part, kind if kind not in self._labels else key)

    def _add(self, key: str, name: str, value: Any, field: Any, known: bool) -> None:
        take = _TAKEN_AS.get(name, _as_it_is)
        text = canonical(take(value, self._root))
        default = _default(field)
        default_text = "" if default is _NONE else canonical(take(default, self._root))
        if known:
            self._defaults[name] = default_text
        if default is _NONE or text != default_text:
            self._found[key] = text


def decisions(class_name: str) -> dict[str, Decision]:
    """The decision for each field of a configuration class, by the field's name."""
    return dict(_flat(TABLE.get(class_name, {})))


def _flat(table: Mapping[Decision, str]) -> Iterator[tuple[str, Decision]]:
    for decision, names in table.items():
        for name in names.split():
            yield name, decision


_NONE = object()


def _default(field: Any) -> Any:
    """The default of a dataclass's field, ``_NONE`` without one."""
    default, factory = field.default, field.default_factory
    if hasattr(default, "default_factory"):  # pydantic.Field
        default, factory = default.default, default.default_factory or dataclasses.MISSING
    if factory is not dataclasses.MISSING:
        return factory()
    return default if _is_stable(default) else _NONE


def _is_stable(value: Any) -> bool:
    """Whether a default is a value, and no mark of its absence."""
    return value is not dataclasses.MISSING and type(value).__name__ != "PydanticUndefinedType"


def _digest(texts: Mapping[str, str]) -> str:
    text = json.dumps(texts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _has_draft(root: Any) -> bool:
    return draft_model(root) is not None


def _is_moe(root: Any) -> bool:
    return bool(root.parallel_config.is_moe_model)


def _never(root: Any) -> bool:
    return False


def _as_it_is(value: Any, root: Any) -> Any:
    return value


_PLAIN_TYPES = (bool, int, float, str, list, tuple, dict, types.NoneType)


def _without_checks(value: Any, root: Any) -> Any:
    """Inductor's settings without assertions, which follow the log level, and without passes,
    which other fields name."""
    return {
        name: setting
        for name, setting in value.items()
        if not name.endswith("_asserts") and isinstance(setting, _PLAIN_TYPES)
    }


def _content(value: Any, root: Any) -> Any:
    """What a file, or the settings in a folder, say, in place of the path."""
    if value is None or not Path(value).exists():
        return None
    path = Path(value)
    if path.is_dir():
        return _digest({file.name: file.read_text() for file in path.glob("*.json")})
    return _digest({"": path.read_text()})


def _sorted(value: Any, root: Any) -> Any:
    return value if value is None else sorted(value)


_TAKEN_AS: Mapping[str, Callable[[Any, Any], Any]] = {
    "CacheConfig.kv_cache_dtype_skip_layers": _sorted,
    "CompilationConfig.inductor_compile_config": _without_checks,
    "LoadConfig.model_loader_extra_config": lambda value, root: dict(value).get("pattern"),
    "LoRAConfig.max_loras": lambda value, root: (
        value if "VLLM_TUNED_CONFIG_FOLDER" in os.environ else None
    ),
    "LoRAConfig.target_modules": _sorted,
    "MultiModalConfig.limit_per_prompt": lambda value, root: sorted(
        name for name, options in value.items() if options.count == 0
    ),
    "MultiModalConfig.mm_encoder_fp8_scale_path": _content,
    "ParallelConfig.data_parallel_size": lambda value, root: value if _is_moe(root) else 1,
    "ParallelConfig.nnodes": lambda value, root: (
        1 if value == 1 else root.parallel_config.nnodes_within_dp
    ),
}
"""What stands for a field where its value says too much: limits, paths, secrets, order."""

_COUNTS_ITSELF: Mapping[str, Callable[[Any], bool]] = {
    "AttentionConfig.hisparse_config": lambda root: True,
    # Experts that serve adapters have kernels of their own, for requests without adapter too.
    "VllmConfig.lora_config": _is_moe,
    "VllmConfig.weight_transfer_config": lambda root: True,
}
"""Parts whose fields may all be defaults, and when their presence shapes KV."""


def _variables(fate: Fate, getters: Mapping[str, Callable[[], Any]] | None) -> dict[str, str]:
    getters = envs.environment_variables if getters is None else getters
    decided = dict(_flat(ENVIRONMENT))
    known = [name for name in getters if name in decided and decided[name].fate is fate]
    found, defaults = {}, {}
    for name in known + (_unknown(getters) if fate is Fate.IN_NAMESPACE else []):
        text, default = _read(name, getters[name])
        if name in decided:
            defaults[name] = default
        if text != default:
            found[name] = text
    return found | {"defaults of variables": _digest(defaults)}


def _unknown(getters: Mapping[str, Callable[[], Any]]) -> list[str]:
    """Variables that no table here knows and that vLLM itself holds to change computation."""
    decided = {name for name, _ in _flat(ENVIRONMENT)}
    unknown = [name for name in getters if name not in decided]
    factors = getattr(envs, "compile_factors", None)
    if not unknown or factors is None:
        return unknown
    kept = factors() if getters is envs.environment_variables else getters
    return [name for name in unknown if name in kept]


def _read(name: str, getter: Callable[[], Any]) -> tuple[str, str]:
    """A variable's value and its value where nothing is set, both as canonical text."""
    take = _content if name == "VLLM_TUNED_CONFIG_FOLDER" else _as_it_is
    try:
        return canonical(take(getter(), None)), canonical(
            take(_where_nothing_is_set(getter)(), None)
        )
    except (ValueError, OSError, TypeError):
        # vLLM refuses such a value when it comes to need it.
        return os.environ.get(name, ""), ""


def _where_nothing_is_set(getter: Any) -> Callable[[], Any]:
    """The same function with another ``os`` in its globals, in whose environment nothing is set."""
    if not isinstance(getter, types.FunctionType):
        return lambda: None
    bare = types.SimpleNamespace(
        environ={}, getenv=lambda name, default=None: default, path=os.path, cpu_count=os.cpu_count
    )
    return types.FunctionType(
        getter.__code__,
        {**getter.__globals__, "os": bare},
        getter.__name__,
        getter.__defaults__,
        getter.__closure__,
    )


def canonical(value: Any) -> str:
    """A value as text that is equal in every process: no address, no order of a set. What has no
    such text is its type's name."""
    try:
        plain = _plain(value)
    except RecursionError:
        plain = _name_of(type(value))
    return plain if isinstance(plain, str) else json.dumps(plain, sort_keys=True)


def _plain(value: Any) -> Any:
    """The value as JSON has it. Enumerations come first, as some are numbers too."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, Mapping):
        return {canonical(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Set):
        return sorted((_plain(one) for one in value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return _name_of(value)
    if dataclasses.is_dataclass(value):
        parts = {f.name: _plain(getattr(value, f.name, None)) for f in dataclasses.fields(value)}
        return {type(value).__name__: parts}
    hashed = getattr(value, "compute_hash", None)
    name = _name_of(type(value))
    return f"{name} {hashed()}" if callable(hashed) else name


def _name_of(named: Any) -> str:
    return f"{named.__module__}.{named.__qualname__}"


def as_markdown() -> str:
    """All decisions as Markdown tables, for docs/identity.md."""
    lines = ["| Configuration | Fate | Why | Fields |", "|---|---|---|---|"]
    for config, table in TABLE.items():
        lines += [
            _row(config, decision, [f"`{name}`" for name in names.split()])
            for decision, names in table.items()
        ]
    lines += ["", "| Environment | Why | Variables |", "|---|---|---|"]
    for decision, names in ENVIRONMENT.items():
        variables = ", ".join(f"`{name}`" for name in names.split())
        lines.append(f"| {decision.fate.value} | {decision.reason} | {variables} |")
    below = ", ".join(f"`{name}`" for name in LIBRARIES)
    lines.append(f"| in the namespace when set | Read below or beside `vllm.envs`. | {below} |")
    lines += ["", "| vLLM hashes it, and here it has no effect | Why |", "|---|---|"]
    for reason, names in HASHED_ALL_THE_SAME.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names.split())} | {reason} |")
    lines += ["", "| Configuration that no engine's has | What stands for it |", "|---|---|"]
    lines += [f"| `{name}` | {reason} |" for name, reason in ELSEWHERE.items()]
    return "\n".join(lines) + "\n"


def _row(config: str, decision: Decision, fields: list[str]) -> str:
    return f"| `{config}` | {decision.fate.value} | {decision.reason} | {', '.join(fields)} |"


BEGIN = generated_page.begin_of("kvrecall.engines.vllm.identity.fields")


if __name__ == "__main__":
    generated_page.write(sys.argv[1:], BEGIN, as_markdown())
