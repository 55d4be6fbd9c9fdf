"""What vLLM loads: the model's files, the model in a worker, and our connector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvrecall.engines.vllm.compat.patches import install

_DRAFTLESS = ("ngram", "ngram_gpu", "suffix")


def draft_model(vllm_config: Any) -> Any:
    """Configuration of the draft model whose layers lie in the KV cache; None without one."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _DRAFTLESS:
        return None
    return getattr(speculative, "draft_model_config", None)


def hub_snapshot(model_config: Any, load_config: Any) -> Path | None:
    """Folder of the model's files in the local cache of the Hugging Face hub, None if they are not
    there. The commit is that of the configuration which the engine has read."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name = str(model_config.model).split(":")[0]  # GGUF: repository:quantisation
    commit = getattr(model_config.hf_config, "_commit_hash", None)
    try:
        folder = snapshot_download(
            name,
            revision=commit or model_config.revision,
            cache_dir=load_config.download_dir,
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
    return Path(folder)


def before_loading(begin: Callable[[Any], None]) -> None:
    """Has ``begin(vllm_config)`` called in an engine's process before the executor loads the model,
    if the engine has our connector."""

    def make(plain: Any) -> Any:
        def init(self: Any, vllm_config: Any) -> None:
            if has_our_connector(vllm_config):
                begin(vllm_config)
            plain(self, vllm_config)

        return init

    install("fingerprint-early", make)


def has_our_connector(vllm_config: Any) -> bool:
    """Whether the engine's KV connector is this project's, or one made of it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvrecall.engines.vllm.connector.connector import RecallConnector

    transfer = vllm_config.kv_transfer_config
    if not getattr(transfer, "kv_connector_module_path", None):
        return False
    return issubclass(KVConnectorFactory.get_connector_class(transfer), RecallConnector)


def show_model(vllm_config: Any, see: Callable[[Any], None]) -> None:
    """Has ``see(model)`` called in this worker's process, with the model it has loaded, when the
    engine asks the workers' connectors what they hold. The last ``see`` counts."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    name = str(vllm_config.parallel_config.worker_cls)
    worker: Any = resolve_obj_by_qualname(name) if "." in name else None
    if not hasattr(worker, "get_kv_connector_handshake_metadata"):
        return

    def make(plain: Any) -> Any:
        def get_kv_connector_handshake_metadata(self: Any) -> Any:
            model = self.get_model() if hasattr(self, "get_model") else None
            if model is not None:
                see(model)
            return plain(self)

        return get_kv_connector_handshake_metadata

    install("show-model", make, worker, renew=True)
