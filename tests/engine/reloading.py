"""A worker's extension by which tests change the weights of a running engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from kvrecall.engines.vllm.identity.changes import digest_of


class Reloading:
    """A vLLM ``worker_extension_cls``."""

    model_runner: Any

    def is_opaque(self) -> bool:
        """Whether kernels keep weights in forms that a digest does not cover."""
        return digest_of([self.model_runner.get_model()])[1]

    def hand_over(self, path: str) -> None:
        """Weights that a trainer hands over as tensors."""
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
