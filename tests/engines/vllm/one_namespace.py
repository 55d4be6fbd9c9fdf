"""To be imported before an engine is made: all engines have one namespace, as if no ingredient
told them apart, and adapters of all contents one identity. Only the audit is left."""

from __future__ import annotations

from typing import Any

import kvrecall.engines.vllm.connector.connector as connector
from kvrecall.block import Namespace


def one(*ingredients: Any) -> Namespace:
    return Namespace.of({"test": "one namespace for all"})


connector.namespace_of = one
connector.Adapters.identity = lambda self, lora_request: "any"  # type: ignore[method-assign]
