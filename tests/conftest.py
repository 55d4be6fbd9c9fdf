"""What all tests share: no network, no telemetry, nothing that needs a compiler."""

from __future__ import annotations

import os
import shutil

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
if shutil.which("g++") is None:
    # vLLM compiles a few sampling functions even in eager mode.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
