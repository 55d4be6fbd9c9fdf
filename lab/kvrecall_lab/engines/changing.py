"""Changes of a running engine's weights, by each of vLLM's ways that run on a CPU: in the engine's
process, and what its workers need for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker


def change(
    llm: Any,
    call: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    adapter: tuple[str, int, str] | None = None,
    sleep: int = 0,
) -> None:
    """Calls a method of the workers, loads an adapter in place, or has the engine sleep at that
    level and wake up."""
    from vllm.lora.request import LoRARequest

    core = llm.llm_engine.engine_core.engine_core
    if call is not None:
        llm.collective_rpc(call, kwargs=dict(arguments or {}))
    if adapter is not None:
        llm.llm_engine.add_lora(LoRARequest(*adapter, load_inplace=True))
    if sleep:
        while core.scheduler.has_requests():
            llm.llm_engine.step()
        core.sleep(sleep)
        assert core.wake_up()


class Trained:
    """A vLLM ``worker_extension_cls`` by which a trainer hands over weights."""

    model_runner: Any

    def is_opaque(self) -> bool:
        """Whether kernels keep weights in forms that a digest does not cover."""
        from kvrecall.engines.vllm.identity.changes import digest_of

        return digest_of([self.model_runner.get_model()])[1]

    def hand_over(self, path: str) -> None:
        """Loads the tensors of a model's folder."""
        from safetensors.torch import load_file

        weights = load_file(Path(path) / "model.safetensors")
        self.model_runner.reload_weights(weights_iterator=iter(weights.items()))

    def scale_norm(self, factor: float) -> None:
        """Writes a parameter as no loader does."""
        for name, parameter in self.model_runner.get_model().named_parameters():
            if name.endswith("layers.0.input_layernorm.weight"):
                parameter.data.mul_(factor)

    def hand_over_later(self, path: str, steps: int) -> None:
        """As a trainer in the engine's process does it, which calls the model and not the engine:
        before the next step but ``steps``."""
        plain, left = self.model_runner.execute_model, steps

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                self.model_runner.execute_model = plain
                self.hand_over(path)
            return plain(*args, **kwargs)

        self.model_runner.execute_model = execute_model


class NappingWorker(CPUWorker):
    """A CPU's worker that sleeps and wakes up by the code that vLLM has for devices. Its memory is
    not freed, but overwritten.

    ``naps``: at each loss of the KV cache, whether the connector had let go of it; and at each
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
        if has_kv_transfer_group():
            self.seen.append(get_kv_transfer_group()._w._mapping._suspended)
