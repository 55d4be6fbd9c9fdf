"""A hit's blocks between the match and the step that loads them."""

from __future__ import annotations

from pathlib import Path

from attention.test_offloader_service import Node

from .test_saver import ONE
from .test_scheduler import BLOCK, Bench


def test_a_hit_in_a_service_that_was_replaced_is_not_loaded(tmp_path: Path) -> None:
    """vLLM asks again for a request that got no device blocks: by then other blocks may lie where
    its own were."""
    node = Node(tmp_path)
    try:
        bench = Bench(node.client, ONE)  # type: ignore[arg-type]
        bench.report(bench.step(bench.request("first", 40), 40), ranks=1)
        request = bench.request("again", 40)
        assert bench.matched(request) == 2 * BLOCK
        assert bench.matched(request) == 2 * BLOCK
        node.begin_anew()
        bench.matched(bench.request("passing", 40, 5000))  # the client joins the new service
        assert bench.matched(request) == 0
        assert node.leases == 0
    finally:
        node.close()
