"""Which data-parallel replicas share a pool service."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from kvrecall.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "replicas"),
    [
        ({"size": 2}, 2),
        ({"size": 4, "size_local": 2}, 2),
        ({"size": 2, "size_local": 1}, 1),
        ({"size": 2, "rank": 1}, 1),
        ({"size": 2, "rank": 0}, 1),
        ({"size": 2, "external_lb": True}, 1),
    ],
)
def test_only_replicas_of_this_server_need_a_service(given: dict[str, Any], replicas: int) -> None:
    """With a rank of its own, a server has one replica; the others are servers of their own."""
    from kvrecall.engines.vllm.serving.app import _local_replicas

    unset = {"size": 1, "size_local": None, "rank": None, "external_lb": False}
    args = {f"data_parallel_{name}": value for name, value in (unset | given).items()}
    assert _local_replicas(Namespace(**args)) == replicas


def test_replicas_with_embedded_pools_are_refused() -> None:
    from kvrecall.engines.vllm.connector.connector import _settings_of

    def config(rank: int | None, **settings: object) -> Any:
        return SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector_extra_config=settings, kv_role="kv_both"
            ),
            parallel_config=SimpleNamespace(data_parallel_rank_local=rank),
        )

    assert _settings_of(config(None)).service is None
    assert _settings_of(config(0)).service is None
    assert _settings_of(config(1, backend="service")).service is not None
    with pytest.raises(ConfigError, match=r"backend is 'embedded'.*run `kvrecall pool serve`"):
        _settings_of(config(1))
