"""What vLLM is here, asked in a process of its own, so that a broken library ends only that.

``python -m kvrecall.engines.vllm.probe [MODEL]`` takes the stages of a start in their order, and
prints each as a line of JSON behind ``MARK`` when it is done. The last line that came says how far
it got.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

MARK = "kvrecall-probe "

Facts = dict[str, Any]


def _torch() -> Facts:
    import torch

    from kvrecall.engines.vllm.device.driver import accelerators, built_for

    devices = [asdict(facts) for facts in accelerators()]
    return {"version": str(torch.__version__), "built_for": built_for(), "devices": devices}


def _vllm() -> Facts:
    import vllm
    from vllm.platforms import current_platform

    return {
        "version": str(vllm.__version__),
        "platform": str(current_platform.device_type),
        "device": str(current_platform.device_name),
    }


def _connector() -> Facts:
    from kvrecall.engines.vllm import RecallConnector

    return {"class": RecallConnector.__name__}


def _mooncake() -> Facts:
    if importlib.util.find_spec("mooncake") is None:
        return {"installed": False}
    importlib.import_module("mooncake.store")
    return {"installed": True}


def _model(name: str) -> Facts:
    """vLLM's own configuration for the model, with the pool's connector; nothing is loaded."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from kvrecall.engines.base import ServeSpec
    from kvrecall.engines.vllm.serving.app import parse_args

    spec = ServeSpec(name, "127.0.0.1", 0, {"block-size": 128}, recall={"host_size": "1GiB"})
    config = AsyncEngineArgs.from_cli_args(parse_args(spec)).create_engine_config()
    model = config.model_config
    return {
        "architecture": model.architecture,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "recurrent": bool(model.is_hybrid or model.has_inner_state or model.is_attention_free),
        "encoder_decoder": bool(model.is_encoder_decoder),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "generates": model.runner_type == "generate",
    }


def _tell(stage: str, facts: Facts) -> None:
    print(MARK + json.dumps({"stage": stage, **facts}), flush=True)


def main(words: list[str]) -> None:
    stages: list[tuple[str, Callable[[], Facts]]] = [("torch", _torch), ("vllm", _vllm)]
    stages += [("connector", _connector), ("mooncake", _mooncake)]
    stages += [("model", lambda name=name: _model(name)) for name in words]  # type: ignore[misc]
    for name, stage in stages:
        began = time.monotonic()
        try:
            facts = stage()
        except Exception as error:  # noqa: BLE001 - whatever a library raises is the finding
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            facts = {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
        _tell(name, {**facts, "seconds": round(time.monotonic() - began, 2)})


if __name__ == "__main__":
    main(sys.argv[1:])
