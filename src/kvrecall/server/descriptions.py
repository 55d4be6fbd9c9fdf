"""Descriptions of the server: service, model, bounds, configuration, state.

The members are MindIE's, by its source (Ascend/MindIE-LLM, src/server/endpoint:
``parse_protocol.cpp`` and ``http_handler.cpp``, read in April 2026) and its documents of 2.3 and
3.1 (hiascend.com, mindiellm/llmdev). Further members are additions.
"""

from __future__ import annotations

import re
from pathlib import PurePath

from fastapi import APIRouter

from kvrecall.config import RecallSettings, parse_size
from kvrecall.engines.base import EngineInfo, Role, ServingEngine
from kvrecall.server.plan import Plan
from kvrecall.server.replies import ReplyError

Json = dict[str, object]

PLATFORM = "kvrecall"  # MindIE: "MindIE Server"
_GIB = 1 << 30
_ROLES = {Role.BOTH: "none", Role.PREFILL: "prefill", Role.DECODE: "decode"}
_UNKNOWN = (
    "docker_label max_stop_sequences max_waiting_tokens sha validation_workers waiting_served_ratio"
).split()


def served_model(engine: ServingEngine, model: str) -> str:
    """The name of the model in a path ``/v2/models/{model:path}/...``, which may also name a
    version, of which there is one. Raises ReplyError 404 unless it is served."""
    names = engine.info.names
    name = model if model in names else re.sub("/versions/[^/]+$", "", model)
    if name not in names:
        raise ReplyError(404, f"no model {name!r}; served: {', '.join(names)}")
    return name


def add_business_descriptions(router: APIRouter, engine: ServingEngine, plan: Plan) -> None:
    """Triton's, of the server and the model."""
    info = engine.info

    @router.get("/v2")
    async def service() -> Json:
        """The policies are MindIE's 0, first come, first served (and priorities)."""
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

    @router.get("/v2/models/{model:path}/config")
    async def model_config(model: str) -> Json:
        """Sizes are GB; of the weights' path only the last part."""
        return {
            "model_name": served_model(engine, model),
            "input_datatype": "UINT32",
            "output_datatype": "UINT32",
            "max_seq_len": info.max_model_len,
            "npu_mem_size": _device_gb(plan),
            "cpu_mem_size": _host_gb(plan),
            "world_size": info.devices,
            "model_weight_path": PurePath(info.model).name,
            "model_instance_type": "Standard",
        }

    @router.get("/v2/models/{model:path}")
    async def model_metadata(model: str) -> Json:
        """The tensors of a request of tokens."""
        one = {"datatype": "UINT32", "shape": [-1]}
        return {
            "name": served_model(engine, model),
            "platform": PLATFORM,
            "inputs": [{"name": "input0", **one}],
            "outputs": [{"name": "output0", **one}],
        }


def add_management_descriptions(router: APIRouter, engine: ServingEngine, plan: Plan) -> None:
    """Adds the routes of the management plane that describe model, bounds, load and
    configuration."""
    info = engine.info

    @router.get("/info")
    async def endpoint() -> Json:
        """TGI's description of the model and the bounds of a request."""
        described: Json = {
            "model_id": info.names[0],
            "model_dtype": info.dtype,
            "model_device_type": info.device,
            "model_pipeline_tag": "text-generation",
            "model_sha": None,
            "max_total_tokens": info.max_model_len,
        }
        return {
            **described,
            "models": [described],
            "max_concurrent_requests": info.max_running,
            "max_input_length": _longest_prompt(info, plan),
            "max_batch_prefill_tokens": info.max_step_tokens,
            "max_batch_total_tokens": info.blocks * info.block_size,
            "max_best_of": plan.spec.limits.max_n,
            "version": info.version,
            **dict.fromkeys(_UNKNOWN),
        }

    @router.get("/v1/config")
    async def configuration() -> Json:
        """The effective configuration."""
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

    role: Json = {"roleStatus": "RoleReady", "currentRole": _ROLES[plan.spec.role]}

    @router.get("/v1/status")
    async def status() -> Json:
        """vLLM swaps no requests and keeps no blocks of its own in host memory, so these numbers
        are 0; the pool's are metrics."""
        load = engine.load()
        return {
            "service": {**role, "draining": engine.draining},
            "resource": {
                "availSlotsNum": load.free_slots,
                "availBlockNum": load.free_blocks,
                "waitingRequestNum": load.waiting,
                "runningRequestNum": load.running,
                "swappedRequestNum": 0,
                "freeNpuBlockNums": load.free_blocks,
                "freeCpuBlockNums": 0,
                "totalNpuBlockNums": load.blocks,
                "totalCpuBlockNums": 0,
            },
            "linkStatus": {"peers": []},
        }

    @router.get("/v2/status")
    async def status_v2() -> Json:
        """There is one group of devices, so the maximum over groups is the total."""
        load = engine.load()
        return {
            "service": role,
            "resource": {
                "totalAvailNpuSlotsNum": load.free_slots,
                "totalAvailNpuBlockNum": load.free_blocks,
                "maxAvailNpuBlockNum": load.free_blocks,
            },
            "linkStatus": {"peers": []},
        }

    @router.get("/v2/models/{model:path}/getSlotCount")
    async def slots(model: str) -> Json:
        """Total and free places in the batch."""
        served_model(engine, model)
        load = engine.load()
        return {
            "total_slots": load.max_running,
            "free_slots": load.free_slots,
            "available_tokens_length": load.free_blocks * info.block_size,
        }


def _longest_answer(info: EngineInfo, plan: Plan) -> int:
    return plan.spec.limits.max_new_tokens or info.max_model_len


def _longest_prompt(info: EngineInfo, plan: Plan) -> int:
    return plan.spec.limits.max_input_tokens or info.max_model_len - 1


def _device_gb(plan: Plan) -> int:
    """npuMemSize: whole GB of device cache, -1 if the engine determines the size."""
    size = plan.spec.options.get("kv-cache-memory-bytes")
    return -1 if size is None else parse_size(str(size), "kv-cache-memory-bytes") // _GIB


def _host_gb(plan: Plan) -> int:
    """cpuMemSize: whole GB of the pool's host tier, 0 without a pool of the engine's own."""
    recall = plan.spec.recall
    if recall is None or recall.get("backend", "embedded") != "embedded":
        return 0
    return RecallSettings.from_mapping(recall).pool.host_bytes // _GIB
