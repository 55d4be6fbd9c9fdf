"""A CPU's worker that sleeps and wakes up by the code that vLLM has for devices. Its memory is not
freed, but overwritten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker


class NappingWorker(CPUWorker):
    """``naps``: at each loss of the KV cache, whether the connector had let go of it; and at each
    return of it, whether it still had."""

    discard = Worker.discard
    wake_up = Worker.wake_up

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[bool] = []
        self._sleep_mode_backend: Any = SimpleNamespace(discard=self._lose, resume=self._note)

    def sleep(self, level: int = 1) -> None:
        self._lose(("kv_cache", "weights"))
        if level > 1:
            for parameter in self.model_runner.get_model().parameters():
                parameter.data.zero_()

    def naps(self) -> list[bool]:
        return self.seen

    def _lose(self, tags: tuple[str, ...]) -> None:
        self._note(tags)
        for tensor in self.model_runner.kv_caches:
            tensor.fill_(3.0)

    def _note(self, tags: Any) -> None:
        self.seen.append(get_kv_transfer_group()._w._mapping._suspended)
