"""What the server says of itself: service, model, bounds, configuration, state.

The members are those MindIE gives, by its source (Ascend/MindIE-LLM, src/server/endpoint:
``parse_protocol.cpp`` and ``http_handler.cpp``, read in April 2026) and its documents of 2.3 and
3.1 (hiascend.com, mindiellm/llmdev). What MindIE does not have is added and replaces nothing.
"""

from __future__ import annotations

from pathlib import PurePath

from kvrecall.config import RecallSettings, parse_size
from kvrecall.engines.base import EngineInfo, Load, Role
from kvrecall.server.plan import Plan

Json = dict[str, object]

PLATFORM = "kvrecall"  # MindIE: "MindIE Server"
_GIB = 1 << 30
_ROLES = {Role.BOTH: "none", Role.PREFILL: "prefill", Role.DECODE: "decode"}


def service(info: EngineInfo, plan: Plan) -> Json:
    """``GET /v2``. The policies are MindIE's 0, first come, first served (and priorities)."""
    return {
        "name": PLATFORM,
        "version": info.version,
        "extensions": {
            "max_iter_times": _longest_answer(info, plan),
            "prefill_policy_type": 0,
            "decode_policy_type": 0,
            "max_prefill_batch_size": info.max_running,
            "max_prefill_tokens": info.max_step_tokens,
        },
    }


def model(name: str) -> Json:
    """``GET /v2/models/{m}``."""
    one = {"datatype": "UINT32", "shape": [-1]}
    return {
        "name": name,
        "platform": PLATFORM,
        "inputs": [{"name": "input0", **one}],
        "outputs": [{"name": "output0", **one}],
    }


def model_config(name: str, info: EngineInfo, plan: Plan) -> Json:
    """``GET /v2/models/{m}/config``. Sizes are GB; of the weights' path only the last part."""
    return {
        "model_name": name,
        "input_datatype": "UINT32",
        "output_datatype": "UINT32",
        "max_seq_len": info.max_model_len,
        "npu_mem_size": _device_gb(plan),
        "cpu_mem_size": _host_gb(plan),
        "world_size": info.devices,
        "model_weight_path": PurePath(info.model).name,
        "model_instance_type": "Standard",
    }


def endpoint(info: EngineInfo, plan: Plan) -> Json:
    """``GET /info``, TGI's: what the model is, and the bounds of a request."""
    limits = plan.spec.limits
    described: Json = {
        "model_id": info.names[0],
        "model_dtype": info.dtype,
        "model_device_type": info.device,
        "model_pipeline_tag": "text-generation",
        "model_sha": None,
        "max_total_tokens": info.max_model_len,
    }
    unknown = (
        "docker_label max_stop_sequences max_waiting_tokens sha validation_workers "
        "waiting_served_ratio"
    )
    return {
        **described,
        "models": [described],
        "max_concurrent_requests": info.max_running,
        "max_input_length": _longest_prompt(info, plan),
        "max_batch_prefill_tokens": info.max_step_tokens,
        "max_batch_total_tokens": info.blocks * info.block_size,
        "max_best_of": limits.max_n,
        "version": info.version,
        **dict.fromkeys(unknown.split()),
    }


def configuration(info: EngineInfo, plan: Plan) -> Json:
    """``GET /v1/config``."""
    return {
        "modelName": info.names[0],
        "maxSeqLen": info.max_model_len,
        "npuMemSize": _device_gb(plan),
        "cpuMemSize": _host_gb(plan),
        "worldSize": info.devices,
        "maxOutputLen": _longest_answer(info, plan),
        "cacheBlockSize": info.block_size,
        "maxInputTokenLen": _longest_prompt(info, plan),
        "maxBatchSize": info.max_running,
        "maxPrefillTokens": info.max_step_tokens,
        "npuBlockNum": info.blocks,
        "kvPool": None if plan.spec.recall is None else dict(plan.spec.recall),
    }


def status(load: Load, plan: Plan, draining: bool) -> Json:
    """``GET /v1/status``. vLLM swaps no requests and keeps no blocks of its own in host memory,
    so these numbers are 0; the pool's are metrics."""
    free = free_blocks(load)
    return {
        "service": {**_service_role(plan), "draining": draining},
        "resource": {
            "availSlotsNum": _free_slots(load),
            "availBlockNum": free,
            "waitingRequestNum": load.waiting,
            "runningRequestNum": load.running,
            "swappedRequestNum": 0,
            "freeNpuBlockNums": free,
            "freeCpuBlockNums": 0,
            "totalNpuBlockNums": load.blocks,
            "totalCpuBlockNums": 0,
        },
        "linkStatus": {"peers": []},
    }


def status_v2(load: Load, plan: Plan) -> Json:
    """``GET /v2/status``: there is one group of devices, so the largest is the whole."""
    free = free_blocks(load)
    return {
        "service": _service_role(plan),
        "resource": {
            "totalAvailNpuSlotsNum": _free_slots(load),
            "totalAvailNpuBlockNum": free,
            "maxAvailNpuBlockNum": free,
        },
        "linkStatus": {"peers": []},
    }


def slots(info: EngineInfo, load: Load) -> Json:
    """``GET /v2/models/{m}/getSlotCount``."""
    return {
        "total_slots": load.max_running,
        "free_slots": _free_slots(load),
        "available_tokens_length": free_blocks(load) * info.block_size,
    }


def free_blocks(load: Load) -> int:
    """Blocks of the device cache that no request uses."""
    return round(load.blocks * (1 - load.used_share))


def _free_slots(load: Load) -> int:
    return max(load.max_running - load.running, 0)


def _service_role(plan: Plan) -> Json:
    return {"roleStatus": "RoleReady", "currentRole": _ROLES[plan.spec.role]}


def _longest_answer(info: EngineInfo, plan: Plan) -> int:
    return plan.spec.limits.max_new_tokens or info.max_model_len


def _longest_prompt(info: EngineInfo, plan: Plan) -> int:
    return plan.spec.limits.max_input_tokens or info.max_model_len - 1


def _device_gb(plan: Plan) -> int:
    """npuMemSize: whole GB of device cache, -1 where the engine takes what is there."""
    size = plan.spec.options.get("kv-cache-memory-bytes")
    return -1 if size is None else parse_size(str(size), "kv-cache-memory-bytes") // _GIB


def _host_gb(plan: Plan) -> int:
    """cpuMemSize: whole GB of the pool's host tier, 0 without a pool of the engine's own."""
    recall = plan.spec.recall
    if recall is None or recall.get("backend", "embedded") != "embedded":
        return 0
    return RecallSettings.from_mapping(recall, "kvrecall").pool.host_bytes // _GIB
