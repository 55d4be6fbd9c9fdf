"""Engines of each access beside one that writes, over one pool service; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pool.service.service import MIB, Service

from engines.vllm.engine import Engine, prompt_of
from engines.vllm.exactness import BLOCK
from kvrecall.engines.vllm.connector.connector import _settings_of
from kvrecall.errors import ConfigError
from kvrecall.pool.service.admin import List, ServiceAdmin
from kvrecall.testing import wait_until

HIT = 3 * BLOCK
POOL = {
    "backend": "service", "call_timeout": 10, "load_deadline": 60, "load_or_compute": "load",
    "audit": "off",
}  # fmt: skip


def recalled(engine: Engine, seed: int) -> int:
    found = engine.ask_anew(prompt_of(HIT + 30, seed))["from"]
    assert engine.flush()
    return int(found["host"] + found["disk"])


@pytest.mark.engine
@pytest.mark.long
def test_engines_beside_a_writer(
    start: Callable[..., Engine], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    with Service(tmp_path / "service", 256 * MIB) as service:
        pool = {**POOL, "socket": str(service.socket)}

        def engine(access: str) -> Engine:
            return start(model=str(model_folder("qwen3")), pool={**pool, "access": access})

        writer = engine("both")
        assert recalled(writer, 1) == 0
        for access, reads, is_read, repeats in (
            ("read", HIT, 0, 0), ("write", 0, HIT, 0), ("private", 0, 0, HIT),
        ):  # fmt: skip
            other, own = engine(access), {"read": 2, "write": 3, "private": 4}[access]
            assert recalled(other, 1) == reads, access
            assert [recalled(other, own) for _ in range(2)] == [0, repeats], access
            assert recalled(writer, own) == is_read, access
            if access != "write":  # who writes may clear
                other.forget_all()
            assert recalled(writer, 1) == HIT, access
            other.close()


@pytest.mark.engine
@pytest.mark.long
def test_engines_over_a_namespace_that_its_operator_marked(
    start: Callable[..., Engine], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """One that wrote it before, and forgets it then for itself alone; and one that starts."""
    with Service(tmp_path / "service", 256 * MIB) as service:
        pool = {**POOL, "socket": str(service.socket)}

        writer = start(model=str(model_folder("qwen3")), pool=pool)
        assert [recalled(writer, 1) for _ in range(2)] == [0, HIT]
        with ServiceAdmin(service.socket) as admin:
            (row,) = admin.do(List()).rows
        service.kill()
        service.read_only = [row.name]
        service.start()
        wait_until(lambda: recalled(writer, 1) == HIT)  # it joins within a second, with a step
        assert [recalled(writer, seed) for seed in (2, 2, 1)] == [0, 0, HIT]
        assert service.look().stats.refused > 0
        writer.forget_all()
        writer.close()
        other = start(model=str(model_folder("qwen3")), pool=pool)
        assert [recalled(other, seed) for seed in (1, 3, 3)] == [HIT, 0, 0]
        other.close()


def configured(rank: int | None, role: str = "kv_both", **settings: object) -> Any:
    transfer = SimpleNamespace(kv_connector_extra_config=settings, kv_role=role)
    parallel = SimpleNamespace(data_parallel_rank_local=rank)
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel)


@pytest.mark.parametrize(
    ("role", "access", "fits"),
    [
        ("kv_both", "read", True),
        ("kv_consumer", "read", True),
        ("kv_producer", "read", False),
        ("kv_producer", "write", True),
        ("kv_consumer", "write", False),
        ("kv_consumer", "private", False),
    ],
)
def test_what_an_instance_that_hands_over_cannot_be(role: str, access: str, fits: bool) -> None:
    config = configured(0, role, access=access)
    if fits:
        assert _settings_of(config).access == access
        return
    with pytest.raises(ConfigError, match=f"access is '{access}'.*{role} cannot hand prompts over"):
        _settings_of(config)


def test_replicas_with_embedded_pools_are_refused() -> None:
    assert _settings_of(configured(None)).service is None
    assert _settings_of(configured(0)).service is None
    assert _settings_of(configured(1, backend="service")).service is not None
    with pytest.raises(ConfigError, match=r"backend is 'embedded'.*run `kvrecall pool serve`"):
        _settings_of(configured(1))
