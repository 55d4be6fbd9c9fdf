"""What the bytes of a page depend on that SGLang's page hash does not carry.

SGLang's hash of a page covers the tokens up to it, the request's ``cache_salt``, its ``extra_key``
and the id of its adapter. The id of an adapter that the server starts with is of its name and path
alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvrecall.block import BlockKey, Namespace
from kvrecall.config import RecallSettings
from kvrecall.engines.fingerprint import default_memory, fingerprint_of
from kvrecall.errors import ConfigError

SECTION = "kvrecall"
"""Key of kvrecall's settings in SGLang's extra config."""
_SOURCE = f"hicache-storage-backend-extra-config: {SECTION}"

_NO_INFLUENCE = re.compile(
    # where it listens, and whom it answers
    r"host|port|\w+_port|nccl_port|dist_\w+|nnodes|node_rank|base_gpu_id|gpu_id_step|numa_node"
    r"|\w*api_key|ssl_\w+|enable_ssl_refresh|fastapi_root_path|smg_\w+|grpc_\w+|\w*http2?_\w+"
    r"|sidecar\w*|served_model_name|model_path|download_dir|use_ray|custom_sigquit_handler"
    # how it tokenizes, samples, streams and formats
    r"|\w*tokenizer\w*|\w*chat_template\w*|completion_template|reasoning_parser|tool_\w+|stream_\w+"
    r"|random_seed|sampling_defaults|preferred_sampling_params|\w*watermark\w*|grammar_backend"
    r"|sampling_backend|constrained_json_\w+|batch_notify_size|incremental_streaming_output"
    # what it says about itself
    r"|log_\w+|uvicorn_\w+|decode_log_interval|crash_dump_folder|show_time_cost|\w*metrics?\w*"
    r"|bucket_\w+|\w+_buckets|gc_\w+|\w*watchdog\w*|sleep_on_idle|kv_events_config|stat_loggers"
    r"|load_publish_endpoint|load_snapshot_\w+|forward_pass_\w+|\w*trace\w*|otlp_\w+"
    # which requests it takes when, and what it keeps
    r"|max_running_requests|max_queued_requests|max_total_tokens|mem_fraction_static|schedule_\w+"
    r"|\w*priority\w*|prefill_delayer\w*|radix_eviction_\w+|load_balance_method|warmups"
    r"|skip_server_warmup|enable_cache_report|max_mamba_cache_size|int8_mamba_ckpt_size"
    r"|hicache_(?!mem_layout)\w+"
)
"""Settings of SGLang that shape no byte of KV. All others are part of a page's identity."""

_FILES = (
    "speculative_draft_model_path",
    "quantization_param_path",
    "uno_lora_path",
    "modelopt_checkpoint_restore_path",
    "kt_weight_path",
    "decrypted_config_file",
    "decrypted_draft_config_file",
)
"""Settings that name a file or folder whose content shapes KV."""


def key_of(namespace: Namespace, page_hash: str) -> BlockKey:
    """Key of the page with this SGLang hash, or any other text."""
    return namespace.key(hashlib.sha256(page_hash.encode()).digest())


def page_of(host_pool: Any) -> dict[str, str]:
    """How a host pool lays out a page. Its type is that of storage (``uint8`` for any fp8); the
    device's is that of the values."""
    device_pool = getattr(host_pool, "device_pool", None)
    names = {"layout": host_pool, "dtype": host_pool, "page_size": host_pool}
    layout = {name: str(getattr(owner, name, "")) for name, owner in names.items()}
    return layout | {"device_dtype": str(getattr(device_pool, "dtype", ""))}


def read_settings(
    extra: Mapping[str, Any] | None, server: Mapping[str, Any], ranks: int
) -> tuple[RecallSettings, str]:
    """kvrecall's settings from SGLang's extra config, and the digest of the model's weights.
    ``server``: SGLang's own settings, resolved. Raises ConfigError if one is wrong, or if several
    ranks would each open the same folder."""
    raw = (extra or {}).get(SECTION)
    if not isinstance(raw, Mapping):
        raise ConfigError(
            f'{_SOURCE} must be an object, for example {{"model_path": "/models/m", '
            '"host_size": "8GiB"}'
        )
    left = dict(raw)
    path, revision = left.pop("model_path", None), left.pop("revision", None)
    served = str(server["model_path"])
    if isinstance(revision, str) and revision:
        weights = f"revision {revision} of {served}"
    elif isinstance(path, str) and path:
        if Path(served).exists() and Path(served).resolve() != Path(path).resolve():
            raise ConfigError(
                f"{_SOURCE}: model_path: {path!r} is not what the server loads; give its "
                f"--model-path, {served!r}"
            )
        weights = _digest("model_path", path, bool(server["trust_remote_code"]))
    else:
        raise ConfigError(
            f"{_SOURCE}: identify the model's weights: set model_path (their folder) or revision "
            "(any text that changes with them)"
        )
    settings = RecallSettings.from_mapping(left, _SOURCE)
    if settings.access not in ("both", "read") or (settings.access == "read" and settings.service):
        raise ConfigError(
            f"{SECTION}: access is {settings.access!r}, which only a vLLM engine can have here; "
            "leave it out"
        )
    if ranks > 1 and settings.pool.disk is not None:
        raise ConfigError(
            f"{SECTION}: disk_path serves one process, but this engine has {ranks} ranks; run "
            '`kvrecall pool serve` on the node and set "backend": "service"'
        )
    return settings, weights


def _digest(setting: str, path: str, code: bool = False) -> str:
    """Of the content of a local file or folder. ConfigError if it cannot be had."""
    try:
        return fingerprint_of(Path(path), code, default_memory())
    except OSError as error:
        raise ConfigError(
            f"{_SOURCE}: {setting}: the content of {path!r} cannot be identified ({error}); give "
            "a local file or folder"
        ) from error


def settings_of(server: Mapping[str, Any]) -> dict[str, str]:
    """What SGLang's settings add to the identity of pages: the values of all that may shape KV as
    one digest, and the content of the files that they name. Raises ConfigError if such a file
    cannot be read, or the weights are random."""
    if server.get("load_format") == "dummy":
        raise ConfigError(
            f"{_SOURCE}: --load-format: 'dummy' makes random weights, whose KV differs from "
            "another start's; load weights, or remove --hicache-storage-backend"
        )
    shaping = {name: v for name, v in server.items() if not _NO_INFLUENCE.fullmatch(name)}
    text = json.dumps(shaping, sort_keys=True, default=str)
    parts = {"settings": hashlib.sha256(text.encode()).hexdigest()}
    for setting, path in _named(server):
        parts[f"{setting} {path}"] = _digest(f"--{setting.replace('_', '-')}", path)
    return parts


def _named(server: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The settings that name files, each with a path."""
    for setting in _FILES:
        if path := server.get(setting):
            yield setting, str(path)
    for adapter in server.get("lora_paths") or ():
        if isinstance(adapter, str):
            yield "lora_paths", adapter.partition("=")[2] or adapter
        else:
            path = adapter["lora_path"] if isinstance(adapter, dict) else adapter.lora_path
            yield "lora_paths", str(path)


def base_of(config: Any, weights: str, engine: Mapping[str, str]) -> Namespace:
    """What all pages of an engine's rank share. ``config``: SGLang's ``HiCacheStorageConfig``.
    ``engine``: its version and device, and ``settings_of``."""
    return Namespace.of(
        {
            "engine": "sglang",
            "model": str(config.model_name),
            "weights": weights,
            "pp": f"{config.pp_rank}/{config.pp_size}",
            "attn_cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
            "dcp": f"{getattr(config, 'dcp_rank', 0)}/{getattr(config, 'dcp_size', 1)}",
            "mla": str(config.is_mla_model),
            **engine,
        }
    )


def namespace_of(
    base: Namespace, config: Any, pool: str, nbytes: int, form: str, page: Mapping[str, str]
) -> Namespace:
    """Of pages of one kind (SGLang's pool name), size and form. ``page``: how the pool lays one
    out. Those of MLA are the same on all tensor-parallel ranks."""
    is_shared = config.is_mla_model and pool == "kv"
    rank = {} if is_shared else {"tp": f"{config.tp_rank}/{config.tp_size}"}
    return base.derive(pool=pool, page_bytes=str(nbytes), form=form, **page, **rank)
