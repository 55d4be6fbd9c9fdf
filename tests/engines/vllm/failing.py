"""The real connector, whose loads fail on the worker while a flag file exists."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvrecall.engines.vllm.connector.connector import RecallConnector
from kvrecall.engines.vllm.wire import StepOrders
from kvrecall.pool.base import NO_ARENA


class FailingConnector(RecallConnector):
    """As if the arena could not be mapped, for as long as ``$KVRECALL_TEST_FAIL`` is there."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        arena = orders.arena
        if orders.loads and Path(os.environ["KVRECALL_TEST_FAIL"]).exists():
            orders.arena = NO_ARENA
        super().start_load_kv(forward_context, **kwargs)
        orders.arena = arena
