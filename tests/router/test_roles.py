"""``kvrecall serve --role``: the resulting options, and its requirements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrecall.engines.base import Role, ServeSpec
from kvrecall.errors import ConfigError
from kvrecall.server import launch


def plan(tmp_path: Path, role: Role, recall: dict[str, Any] | None) -> Any:
    (tmp_path / "config.json").write_text("{}")
    return launch.plan_model(ServeSpec(str(tmp_path), "127.0.0.1", 1, {}, recall=recall, role=role))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("recall", [None, {}, {"host_size": "1MiB"}])
def test_a_role_needs_a_pool_that_is_shared(
    tmp_path: Path, role: Role, recall: dict[str, Any] | None
) -> None:
    with pytest.raises(ConfigError, match=f"--role {role}: .* --pool-service"):
        launch.check(plan(tmp_path, role, recall))


def test_roles_in_vllms_words(tmp_path: Path) -> None:
    from kvrecall.engines.vllm.serving.app import connector_config, parse_args

    words = {Role.BOTH: "kv_both", Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}
    for role, word in words.items():
        assert connector_config({}, role)["kv_role"] == word
    shared = {"backend": "service", "socket": "/tmp/x/pool.sock"}
    made = parse_args(plan(tmp_path, Role.DECODE, shared).spec)
    assert made.kv_transfer_config.kv_role == "kv_consumer"
    assert made.kv_transfer_config.is_kv_consumer
    assert not made.kv_transfer_config.is_kv_producer
