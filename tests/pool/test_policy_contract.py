from __future__ import annotations

import pytest

from kvrecall.pool.eviction import POLICY_NAMES, EvictionPolicy, make_policy
from kvrecall.testing.policy_contract import PolicyContract


@pytest.fixture(params=POLICY_NAMES, autouse=True)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestPolicies(PolicyContract):
    @pytest.fixture(autouse=True)
    def _named(self, name: str) -> None:
        self.name = name

    def make(self, capacity_blocks: int) -> EvictionPolicy:
        return make_policy(self.name, capacity_blocks)
