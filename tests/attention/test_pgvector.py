"""examples/pgvector_index.py on a real PostgreSQL with pgvector."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrecall.attention.index.base import VectorIndex, index_factory
from kvrecall.errors import ConfigError
from kvrecall.testing.index_contract import IndexContract, clustered

EXAMPLES = Path(__file__).parents[2] / "examples"
FACTORY = "pgvector_index:Table"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pgserver = pytest.importorskip("pgserver")
    # Not pytest's folder: where the tests are root's, the server is another user's.
    folder = tempfile.mkdtemp(prefix="kvrecall-pg-")
    server = pgserver.get_server(folder, cleanup_mode="delete")
    server.psql("CREATE EXTENSION vector")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture(autouse=True)
def database(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGVECTOR_URL", url)
    monkeypatch.syspath_prepend(EXAMPLES)


def tables(url: str) -> list[str]:
    import psycopg

    with psycopg.connect(url) as database:
        found = database.execute("SELECT relname FROM pg_class WHERE relname ~ '^kvrecall_'")
        return [name for (name,) in found.fetchall() if "idx" not in name]


class TestTable(IndexContract):
    COUNT, FOUND = 2048, 1.0

    def make(self, width: int) -> VectorIndex:
        factory = index_factory(FACTORY)
        assert factory is not None
        return factory(width)


class TestGraph(TestTable):
    FOUND = 0.6

    @pytest.fixture(autouse=True)
    def graph(self, database: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PGVECTOR_INDEX", "hnsw")


def test_tables_of_engines_that_are_gone_are_dropped(url: str) -> None:
    left = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import numpy as np, pgvector_index as p; "
        "t = p.Table(4); t.add(np.ones((1, 4), np.float32)); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", left, EXAMPLES], check=False).returncode == 9
    assert len(tables(url)) == 1
    factory = index_factory(FACTORY)
    assert factory is not None
    one, other = factory(4), factory(4)
    one.add(clustered(3, 4))
    other.close()
    assert len(tables(url)) == 1
    assert one.search(clustered(1, 4), 1)[1].tolist() == [[0]]
    one.close()
    assert tables(url) == []


def test_without_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = index_factory(FACTORY)
    assert factory is not None
    monkeypatch.setenv("PGVECTOR_URL", "postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(ConfigError, match="PGVECTOR_URL"):
        factory(4)
