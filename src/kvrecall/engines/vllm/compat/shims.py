"""What differs between the supported versions of vLLM: one function each, which names the versions
that it is for. Without them the code is that of 0.32.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from kvrecall.block import TierName
from kvrecall.engines.vllm.compat.versions import engine_version


def hit_sources(tokens: Mapping[TierName, int]) -> dict[Any, int]:
    """Tokens of a hit by vLLM's names for tiers. 0.30 and 0.31 have none, and never ask."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    names = {
        TierName.HOST: CacheHitSource.HOST,
        TierName.DISK: CacheHitSource.DISK,
        TierName.REMOTE: CacheHitSource.P2P,
    }
    return {names[tier]: count for tier, count in tokens.items() if count}


def said_of_return(request: Any) -> tuple[str | None, list[tuple[str, Any]]]:
    """The id of the session that a request belongs to, and its ``kv_hints`` by type. 0.30 and 0.31
    take neither."""
    envelope = getattr(request, "kv_hints", None)
    actions = [] if envelope is None else envelope.actions
    hints = [(action.action_type, action.payload) for action in actions]
    return getattr(request, "session_id", None), hints


def hash_block_size(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens per block hash. In 0.30 and 0.31 the engine core does not write it into the KV cache's
    configuration, so it is resolved again."""
    if hasattr(kv_cache_config, "hash_block_size"):
        return int(kv_cache_config.hash_block_size or vllm_config.cache_config.block_size)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def hits_inside_blocks(groups: Sequence[Any], tokens: int, managers: Sequence[Any]) -> bool:
    """Whether hits of these KV groups can end every ``tokens`` tokens. Not in 0.30 and 0.31, where
    the connector does not learn at which unit the device's hits end."""
    from vllm.v1.core import kv_cache_utils

    enabled = getattr(kv_cache_utils, "partial_hash_hits_enabled", None)
    return enabled is not None and bool(enabled(groups, tokens, manager_classes=managers))


def saves_without_computing() -> bool:
    """Whether vLLM calls ``wait_for_save`` in steps that compute nothing, as at the end of a
    request. 0.30 does not: its device blocks would be held forever."""
    return engine_version() != "0.30"


def tp_replicas(groups: Sequence[Any], ranks: int) -> int:
    """How many of so many tensor-parallel ranks hold the same KV of these groups, as vLLM counts.
    0.33 moved the function; 0.30 has none."""
    for name in ("kv_cache_utils", "kv_cache_planning"):
        if importlib.util.find_spec(f"vllm.v1.core.{name}") is not None:
            module = importlib.import_module(f"vllm.v1.core.{name}")
            if hasattr(module, "kv_cache_groups_tp_replicas"):
                return int(module.kv_cache_groups_tp_replicas(groups, ranks))
    return 1


_CLI_ARGS = "vllm.entrypoints.launchers.cli_args"


def command_line() -> tuple[Any, Any, Any]:
    """vLLM's ``make_arg_parser``, ``validate_parsed_serve_args`` and ``cli_env_setup``, which 0.33
    moved."""
    parsing, starting = _CLI_ARGS, "vllm.entrypoints.serve.utils.api_utils"
    if importlib.util.find_spec(_CLI_ARGS) is None:
        parsing, starting = "vllm.entrypoints.common.cli_args", "vllm.entrypoints.common.startup"
    parser, start = importlib.import_module(parsing), importlib.import_module(starting)
    return parser.make_arg_parser, parser.validate_parsed_serve_args, start.cli_env_setup
