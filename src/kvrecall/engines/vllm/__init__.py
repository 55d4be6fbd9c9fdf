"""vLLM: the connector that a vLLM engine loads. The only package that imports vLLM.

``--kv-transfer-config '{"kv_connector":"RecallConnector",
"kv_connector_module_path":"kvrecall.engines.vllm","kv_role":"kv_both"}'``
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrecall.engines.vllm.connector.connector import RecallConnector

__all__ = ["RecallConnector"]


def __getattr__(name: str) -> Any:
    """Loads the connector on first use: importing this room must not import vLLM."""
    if name == "RecallConnector":
        from kvrecall.engines.vllm.compat.versions import require_version

        require_version()
        from kvrecall.engines.vllm.connector.connector import RecallConnector

        return RecallConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
