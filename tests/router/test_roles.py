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
