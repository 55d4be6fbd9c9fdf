"""A vector index in a database with vector columns: openGauss DataVec, or PostgreSQL with pgvector.

With this file's folder on PYTHONPATH:
    VLLM_RETRIEVAL_INDEX=pgvector_index:Table
    PGVECTOR_URL=postgresql://user@host/database     where `CREATE EXTENSION vector` was done
    PGVECTOR_INDEX=hnsw                              approximate; without it every vector is read

Each index is an unlogged table, so a crash of the database loses it, as it would lose memory. A
table that an engine left behind when it was killed is dropped by the next one that starts.
"""

import itertools
import os

import numpy as np
import psycopg

from kvrecall.attention.index import Numbers, VectorIndex, Vectors
from kvrecall.errors import ConfigError

_numbers = itertools.count()


class Table(VectorIndex):
    """One table, and one connection."""

    def __init__(self, width: int) -> None:
        try:
            self._database = psycopg.connect(os.environ["PGVECTOR_URL"], autocommit=True)
        except (KeyError, psycopg.Error) as error:
            raise ConfigError(f"PGVECTOR_URL must name a database: {error}") from error
        self._drop_orphans()
        self._table = f"kvrecall_{os.getpid()}_{next(_numbers)}"
        self._run(f"CREATE UNLOGGED TABLE {self._table} (n integer, k vector({width}))")
        # A session's lock: it is gone when the engine is.
        self._run("SELECT pg_advisory_lock(hashtext(%s))", self._table)
        self._graph = os.environ.get("PGVECTOR_INDEX") == "hnsw"
        if self._graph:
            self._run(f"CREATE INDEX ON {self._table} USING hnsw (k vector_ip_ops)")
        self._count = 0

    def add(self, vectors: Vectors) -> None:
        with (
            self._database.cursor() as cursor,
            cursor.copy(f"COPY {self._table} FROM STDIN") as rows,
        ):
            for vector in vectors:
                rows.write_row((self._count, _text(vector)))
                self._count += 1

    def search(self, queries: Vectors, count: int) -> tuple[Vectors, Numbers]:
        products = np.full((len(queries), count), -np.inf, dtype=np.float32)
        numbers = np.full((len(queries), count), -1, dtype=np.int64)
        if self._graph:  # a search finds no more than this, and pgvector allows no more than 1,000
            self._run(f"SET hnsw.ef_search = {min(1000, max(200, 2 * count))}")
        nearest = f"SELECT n, -(k <#> %s::vector) AS p FROM {self._table} ORDER BY k <#> %s::vector"
        for at, query in enumerate(map(_text, queries)):
            found = self._run(f"{nearest} LIMIT %s", query, query, count).fetchall()
            for place, (number, product) in enumerate(found):
                numbers[at, place], products[at, place] = number, product
        return products, numbers

    def close(self) -> None:
        self._run(f"DROP TABLE {self._table}")
        self._database.close()

    def _run(self, text: str, *values: object) -> psycopg.Cursor:
        return self._database.execute(text, values or None)

    def _drop_orphans(self) -> None:
        ours = "SELECT relname FROM pg_class WHERE relname ~ '^kvrecall_[0-9]+_[0-9]+$'"
        for (table,) in self._run(ours).fetchall():
            free = self._run("SELECT pg_try_advisory_lock(hashtext(%s))", table).fetchone()
            if free and free[0]:
                self._run(f"DROP TABLE IF EXISTS {table}")
                self._run("SELECT pg_advisory_unlock(hashtext(%s))", table)


def _text(vector: Vectors) -> str:
    return "[" + ",".join(f"{x:.9g}" for x in vector.tolist()) + "]"
