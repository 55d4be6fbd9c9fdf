"""examples/pgvector_index.py on a real PostgreSQL with pgvector."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.vllm.attention.test_engine import activity, retrieval, spent
from engines.vllm.engine import Engine, prompt_of
from kvrecall.attention.index import VectorIndex, index_factory
from kvrecall.errors import ConfigError
from kvrecall.testing.index_contract import IndexContract, clustered

EXAMPLES = Path(__file__).parents[4] / "examples"
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
    FOUND = 0.0  # pgvector draws its graph's levels at random

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


@pytest.mark.engine
@pytest.mark.long
def test_an_engine_decodes_by_the_database_what_it_decodes_by_faiss_flat(
    url: str, start: Callable[..., Engine], setup: dict[str, Any]
) -> None:
    """A sequence on the device, and one off it, that begins once more from the pool. Both read all
    vectors, as they are; the exact search rounds queries, which decides between near blocks."""
    pool = {"host_size": "96MiB", "load_or_compute": "load"}
    there = os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    told = {"PYTHONPATH": there, "PGVECTOR_URL": url, "VLLM_RETRIEVAL_INDEX": FACTORY}
    flat = {"VLLM_RETRIEVAL_INDEX": "faiss-flat"}
    prompts = [prompt_of(1500, 5), prompt_of(2600, 6)]
    by_faiss = start(**setup, pool=pool, env={**retrieval(0.3), **flat})
    want = [by_faiss.ask(prompt, max_tokens=40, temperature=0) for prompt in prompts]
    engine = start(**setup, pool=pool, env={**retrieval(0.3), **told})
    before = activity(engine)
    got = []
    for prompt in prompts:
        got.append(engine.ask(prompt, max_tokens=40, temperature=0))
        assert tables(url), "searched without the database"
    did = spent(engine, before)
    assert did["blocks_indexed"] > 0
    assert did["sequences_offloaded"] > 0
    assert did["blocks_selected"] > 0
    assert [reply["tokens"] for reply in got] == [reply["tokens"] for reply in want]
    engine.forget_device()
    again = engine.ask(prompts[1], max_tokens=40, temperature=0)
    assert again["cached"] > 1000
    assert again["tokens"] == want[1]["tokens"]
    engine.close()
    factory = index_factory(FACTORY)
    assert factory is not None
    factory(4).close()  # the next one drops what the engine left
    assert tables(url) == []
