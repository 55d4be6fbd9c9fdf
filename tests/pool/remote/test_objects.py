"""The object store: its contract in a directory and in S3, settings, layout, servers that fail."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.remote import backends, objects
from kvrecall.pool.remote.objects import make_store, path_of
from kvrecall.pool.remote.store import Object, Store
from kvrecall.testing.store_contract import Counter, StoreContract, names
from pool.remote.s3 import Server, s3_server


class TestDirectory(StoreContract):
    def make(self, path: Path) -> Store:
        return make_store({"url": f"file://{path}/store"})


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as server:
        yield server


class TestS3(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    def make(self, path: Path) -> Store:
        return make_store(self.server.options(path.name))


S3 = {"url": "s3://bucket/prefix", "region": "us-east-1"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "url is missing"),
        ({"url": 7}, "url is 7; must be a string"),
        ({"url": "ftp://x"}, "must begin with one of s3://, gs://, az://, file://, memory://"),
        ({"url": "s3://b", "regoin": "x"}, "unknown option 'regoin'; did you mean 'region'"),
        ({"url": "s3://b", "concurrency": 0}, "concurrency is 0"),
        ({"url": "s3://b", "concurrency": 1.5}, "whole number"),
        ({"url": "s3://b", "timeout": "soon"}, "timeout is 'soon'; must be a number"),
        ({"url": "s3://b", "retries": True}, "retries is True"),
        ({"url": "s3://b", "options": "key=x"}, "options: must be an object"),
        ({"url": "s3://b", "options": {"access_key_id": 7}}, "options.access_key_id: must be"),
        ({"url": "s3://b", "options": {"nonsense": "x"}}, "nonsense"),
        ({"url": "s3://b", "options": {"aws_allow_http": "true"}}, "what allows http:// is allow_"),
        ({"url": "file://host/path"}, "write a directory as file:///path"),
        ({"url": "file:///"}, "write a directory as file:///path"),
        ({"url": "file:///proc/kvrecall"}, "file:///proc/kvrecall"),
        ({"url": "memory:///", "endpoint": "https://x"}, "endpoint: no effect with a memory url"),
        ({"url": "az://container/p"}, "Account must be specified"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        make_store(options)
    assert str(caught.value).startswith("remote: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["endpoint", "options"])
def test_plaintext_to_another_machine_must_be_allowed(where: str) -> None:
    endpoint = "http://10.0.0.1:9000"
    place = {"endpoint": endpoint} if where == "endpoint" else {"options": {"endpoint": endpoint}}
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1, another machine.*allow_plaintext"):
        backends.make_store("objects", {**S3, **place})
    backends.make_store("objects", {**S3, **place, "allow_plaintext": True}).close()
    backends.make_store("objects", {**S3, **place}, sealed=True).close()
    backends.make_store("objects", {**S3, "endpoint": "http://[::1]:9000"}).close()
    backends.make_store("objects", {**S3, "endpoint": "https://10.0.0.1:9000"}).close()


@pytest.mark.parametrize(
    "url", ["s3://bucket/a/prefix", "gs://bucket/prefix", "az://container/prefix"]
)
def test_urls_of_the_clouds_open(url: str) -> None:
    """Only opened: there are no such servers here."""
    more = {"options": {"account_name": "mine"}} if url.startswith("az") else {}
    make_store({"url": url, **more}).close()


# -- layout -------------------------------------------------------------------------------------


def test_a_namespace_is_a_prefix(tmp_path: Path) -> None:
    counter = Counter(make_store({"url": f"file://{tmp_path}/kv"}))
    mine, other = names(8, "mine"), names(8, "other")
    counter.put(mine + other)
    version, digest, block = mine[0].split(".")
    path = tmp_path / "kv" / version / digest / block[:2] / block
    assert path.stat().st_size == 20_000
    shutil.rmtree(tmp_path / "kv" / version / digest)
    assert counter.store.exists(mine + other) == [False] * 8 + [True] * 8
    counter.store.close()


def test_no_two_names_share_an_object() -> None:
    some = ["v1.a.bcd", "v1.a.bc", "v1.a.bc.d", "v1.abcd", "_", "v1.a.bcd."]
    assert len({path_of(name) for name in some}) == len(some)
    assert path_of("v1.abc.0123").startswith("v1/abc/")


def test_a_directory_is_the_owners_alone_and_holds_whole_values_only(tmp_path: Path) -> None:
    counter = Counter(make_store({"url": f"file://{tmp_path}/a%20b/kv"}))
    counter.put(names(20))
    folder = tmp_path / "a b" / "kv"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == sorted(n.split(".")[2] for n in names(20))
    counter.store.close()


# -- round trips and failures, against a real server --------------------------------------------


def test_a_thousand_checks_are_a_page_where_that_is_cheaper(server: Server) -> None:
    counter = Counter(make_store(server.options("page")))
    some = names(1000, "page")
    counter.put(some[:150])
    heads, gets = server.requests("HEAD"), server.requests("GET")
    assert counter.store.exists(some) == [True] * 150 + [False] * 850
    assert server.requests("HEAD") == heads
    assert server.requests("GET") == gets + 1
    assert counter.store.exists(some[:20]) == [True] * 20, "few are asked for one by one"
    assert server.requests("HEAD") == heads + 20
    counter.store.close()


def test_a_large_prefix_is_not_listed_to_its_end(server: Server) -> None:
    """More objects than the listing is allowed: what it has not seen is asked for."""
    counter = Counter(make_store(server.options("large", concurrency=32)))
    some = names(1150, "large")
    for at in range(0, 1060, 106):
        counter.put(some[at : at + 106], nbytes=100)
    asked = some[900:1150]
    gets = server.requests("GET")
    assert counter.store.exists(asked) == [True] * 160 + [False] * 90
    assert server.requests("GET") - gets == 2, "one page is its share, and one more tells"
    gets, heads = server.requests("GET"), server.requests("HEAD")
    assert counter.store.exists(asked) == [True] * 160 + [False] * 90
    assert (server.requests("GET"), server.requests("HEAD")) == (gets, heads + 250), "remembered"
    counter.store.close()


def test_a_bucket_that_is_not_there_is_an_error_in_one_line_without_secrets(server: Server) -> None:
    options = {**server.options("x", retries=0), "url": "s3://no-such-bucket/x"}
    store = make_store(options)
    with pytest.raises(TierError, match=r"NoSuchBucket|404") as caught:
        Counter(store).put(names(3))
    assert "\n" not in str(caught.value)
    assert "top-secret" not in f"{caught.value!r} {store!r}"
    store.close()


@pytest.fixture
def deaf() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


ONE = Object(names(1)[0], (memoryview(bytearray(64)),))
QUESTIONS: list[tuple[int, Callable[[Store], object]]] = [
    (500, lambda store: store.get([ONE])),
    (404, lambda store: store.get([ONE])),
    (403, lambda store: store.put([ONE])),
    (200, lambda store: store.remove(names(1))),
    (200, lambda store: store.exists(names(8))),  # by a listing
]


@pytest.mark.parametrize(("status", "ask"), QUESTIONS)
def test_an_answer_without_end_is_given_up(
    status: int, ask: Callable[[Store], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library keeps errors, pages and replies to deletions whole: 4 GiB in 4 s, on loopback."""
    monkeypatch.setattr(objects, "_MOST_GROWTH", 32 << 20)
    head = f"HTTP/1.1 {status} It\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunk, sent = b"100000\r\n" + bytes(1 << 20) + b"\r\n", itertools.count()
    with (
        answering(itertools.chain([head], (chunk for _ in sent))) as store,
        pytest.raises(TierError, match="endpoint: an answer took 32 MiB: no store's"),
    ):
        ask(store)
    assert next(sent) < 256


@contextlib.contextmanager
def answering(pieces: Iterable[bytes]) -> Iterator[Store]:
    """A store whose server answers the first request with these."""

    def serve() -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.recv(1 << 16)
            for piece in pieces:
                client.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        where = {"endpoint": f"http://127.0.0.1:{listener.getsockname()[1]}", "region": "eu"}
        keys = {"access_key_id": "a", "secret_access_key": "b"}
        few = {"url": "s3://bucket/x", "timeout": 2, "retries": 0, "concurrency": 1}
        store = make_store({**few, **where, "options": keys})
        yield store
        store.close()


def test_what_a_listing_says_is_not_written_to_a_log_as_it_is() -> None:
    """Its keys reach errors of the library as they are: lines, and commands to a terminal."""
    key = "../\x1b[31m\nERROR forged " + "x" * 100_000
    date, size = "<LastModified>2020-01-01T00:00:00Z</LastModified>", "<Size>1</Size>"
    page = f"<ListBucketResult><Contents><Key>{key}</Key>{date}{size}</Contents></ListBucketResult>"
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(page)}\r\n\r\n"
    with answering([head.encode(), page.encode()]) as store:
        with pytest.raises(TierError, match="invalid path") as error:
            store.exists(names(8))
        assert str(error.value).isprintable()
        assert len(str(error.value)) <= 500


def test_a_server_that_does_not_answer_is_an_error_in_time(deaf: str) -> None:
    keys = {"access_key_id": "a", "secret_access_key": "b"}
    options = {**S3, "endpoint": deaf, "timeout": 0.3, "retries": 1, "options": keys}
    counter = Counter(make_store(options))
    some = names(3)
    for call in (counter.put, counter.get, counter.store.exists, counter.store.remove):
        with pytest.raises(TierError):
            call(some)
    counter.store.close()


def test_a_server_that_dies_and_comes_back_empty() -> None:
    with s3_server() as server:
        counter = Counter(make_store(server.options("x", retries=0)))
        counter.put(names(5))
    with pytest.raises(TierError):
        counter.get(names(5))
    counter.store.close()
