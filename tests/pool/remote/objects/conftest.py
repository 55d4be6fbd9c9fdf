from __future__ import annotations

from collections.abc import Iterator

import pytest

from pool.remote.objects.s3 import Server, s3_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with s3_server() as server:
        yield server
