"""What all tests share: no network, no telemetry, nothing that needs a compiler, no judging of how
long an example of Hypothesis takes: beside other work any of them may take a second."""

from __future__ import annotations

import os
import shutil

import hypothesis

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("KVRECALL_WAITS", "sleep")  # engines without our connector, too
if shutil.which("g++") is None:
    # vLLM compiles a few sampling functions even in eager mode.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

hypothesis.settings.register_profile(
    "kvrecall",
    hypothesis.settings(),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("kvrecall")
