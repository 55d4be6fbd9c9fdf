"""SGLang: the pool as a storage backend of its hierarchical cache (HiCache).

``--enable-hierarchical-cache --hicache-storage-backend dynamic
--hicache-storage-backend-extra-config '{"backend_name": "kvrecall",
"module_path": "kvrecall.engines.sglang", "class_name": "RecallStorage", "interface_v1": 1,
"kvrecall": {"model_path": "/models/m", "host_size": "8GiB"}}'``
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvrecall.engines.sglang.storage import RecallStorage

__all__ = ["RecallStorage"]


def __getattr__(name: str) -> Any:
    """Loads the backend on first use: importing this room must not import SGLang."""
    if name == "RecallStorage":
        from kvrecall.engines.sglang.storage import RecallStorage

        return RecallStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
