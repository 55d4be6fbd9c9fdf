"""One live server for all tests that only need some server: clients, schemas.

No test may end it; one that must starts its own (test_soak.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from server.live import LiveServer, serving


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with serving(tmp_path_factory.mktemp("tiny"), longest=768, sequences=32) as live:
        yield live
