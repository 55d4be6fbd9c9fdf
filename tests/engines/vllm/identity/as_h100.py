"""Builds configurations as vLLM does on H100s, in a process that has none, and prints what part of
them is in the namespace.

On the CPU platform vLLM empties what follows from limits: capture sizes, compile ranges. A platform
of vLLM's own CUDA code with the answers of a device stands in.

Usage: ``python as_h100.py MODEL '{"name": {"max_num_seqs": 4}, ...}'``; prints JSON, for each name
the ingredients and, under ``derived``, what vLLM made of the limits.
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any

for _absent in ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch"):
    sys.modules.setdefault(f"vllm.{_absent}", types.ModuleType(_absent))

from vllm import platforms  # noqa: E402
from vllm.platforms.cuda import CudaPlatformBase  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class H100(CudaPlatformBase):  # type: ignore[misc]
    """Eight of them."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "NVIDIA H100"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 80 << 30

    @classmethod
    def device_count(cls) -> int:
        return 8

    @classmethod
    def import_ir_kernels(cls) -> None:
        """There are none to import."""


platforms._current_platform = H100()

from vllm.engine.arg_utils import EngineArgs  # noqa: E402

from kvrecall.engines.vllm.identity import fields  # noqa: E402


def configured(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    config = EngineArgs(model=model, **settings).create_engine_config()
    compilation = config.compilation_config
    return {
        "ingredients": fields.ingredients(config),
        "derived": [
            compilation.cudagraph_capture_sizes,
            compilation.compile_ranges_endpoints,
            compilation.compile_sizes,
            config.attention_config.sparse_mla_prefill_workspace_factor,
        ],
    }


if __name__ == "__main__":
    found = {name: configured(sys.argv[1], one) for name, one in json.loads(sys.argv[2]).items()}
    sys.stdout.write(json.dumps(found))
