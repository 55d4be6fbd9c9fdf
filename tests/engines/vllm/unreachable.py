"""The connector of ``failing.py`` under the name that retrieval attention asks for."""

from __future__ import annotations

import os
from pathlib import Path

from failing import FailingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvrecall.engines.vllm.wire import StepOrders
from kvrecall.pool.base import NO_ARENA


class RecallConnector(FailingConnector):
    """Besides, its worker cannot map the arena for offload while there is a file
    ``$KVRECALL_TEST_FAIL.offload``."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        orders = kv_connector_metadata
        assert isinstance(orders, StepOrders)
        arena = orders.arena
        if Path(os.environ["KVRECALL_TEST_FAIL"] + ".offload").exists():
            orders.arena = NO_ARENA
        super().handle_preemptions(orders)
        orders.arena = arena
