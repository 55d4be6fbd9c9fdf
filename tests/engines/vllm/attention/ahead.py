"""Imported before vLLM makes an engine, lets it schedule a step ahead of its worker
(``--async-scheduling``) on a CPU, too, where vLLM turns that off."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu import shm  # noqa: F401 - events and streams that do nothing

plain = CpuPlatform.check_and_update_config.__func__


def check_and_update_config(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
    plain(cls, vllm_config)
    vllm_config.scheduler_config.async_scheduling = True


CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
assert torch.cuda.current_stream().query()
