"""Attacks on the router: by its clients, by instances, and by publishers of events."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import resource
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from kvrecall.processes.child import ChildProcess
from kvrecall.processes.command import kvrecall
from kvrecall.processes.ports import free_port
from kvrecall_lab.hostile.attack import Crashed, GotIn, SecretSeen, Stalled, attack
from kvrecall_lab.hostile.listeners import Play, frame, listening, shake_hands, until, while_running

_START_S = 30.0
_PATIENCE_S = 3.0  # of somebody else: a router that is not held up answers in milliseconds
_MOST_MIB = 1000
_KEY = "router-key-5f1d0c"
_OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
_JSON = {"content-type": "application/json"}
_POST = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"


# -- the router, instances and publishers ---------------------------------------------------


class _Client(httpx.Client):
    """Somebody else, who is not kept waiting."""

    def send(self, *arguments: Any, **options: Any) -> httpx.Response:
        try:
            return super().send(*arguments, **options)
        except httpx.TimeoutException as error:
            raise Stalled(f"the router does not answer: {error!r}") from error


class Router(ChildProcess):
    """``kvrecall router`` before the instances at ``urls``. ``is_up``: waits until it has one of
    them, otherwise until it answers."""

    def __init__(
        self,
        folder: Path,
        urls: Sequence[str],
        *words: str,
        environment: Mapping[str, str] | None = None,
        is_up: bool = True,
    ) -> None:
        super().__init__(folder / "router.log")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        options = itertools.chain.from_iterable(("--engine", url) for url in urls)
        self.launch(kvrecall("router", "--port", str(self.port), *options, *words), environment)
        self.client = _Client(base_url=self.url, headers=_JSON, timeout=10)
        until(lambda: self._answers(is_up), _START_S, "the router does not start")

    def _answers(self, is_up: bool) -> bool:
        if not self.is_alive:
            raise Crashed(f"the router ended at its start: {self.text[-300:]}")
        with contextlib.suppress(httpx.TransportError):
            return self.client.get("/health").status_code == 200 or not is_up
        return False

    @property
    def text(self) -> str:
        """Of its log."""
        return self.log.read_text(errors="replace")

    @property
    def mib(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss) >> 20

    def complete(self, prompt: str = "x", **more: object) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **more})

    def connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def check(self, is_told: str) -> None:
        """Somebody else is served. ``is_told``: what went on meanwhile."""
        if not self.is_alive:
            raise Crashed(f"the router ended: {is_told}")
        if "Traceback" in self.text:
            raise Crashed(f"{is_told}: {self.text.strip().splitlines()[-1]}")
        for path in ("/health", "/v1/completions"):
            began = time.monotonic()
            try:
                reply = self.complete() if path != "/health" else self.client.get(path)
            except httpx.TransportError as error:
                raise Stalled(f"nobody is answered: {is_told}: {error!r}") from error
            took = time.monotonic() - began
            if reply.status_code != 200 or took > _PATIENCE_S:
                raise Stalled(f"{is_told}: another client got {reply.status_code} in {took:.1f} s")
        if self.mib > _MOST_MIB:
            raise Stalled(f"{is_told}: the router has {self.mib} MiB")

    def close(self) -> None:
        self.client.close()
        self.kill()


@contextlib.contextmanager
def routing(folder: Path, urls: Sequence[str], *words: str, **options: Any) -> Iterator[Router]:
    router = Router(folder, urls, *words, **options)
    try:
        yield router
    finally:
        router.close()


def _request(client: socket.socket) -> bytes:
    """The head of a request; its body is taken in."""
    got = b""
    while b"\r\n\r\n" not in got and (more := client.recv(65536)):
        got += more
    head, _, body = got.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    left = int(length or 0) - len(body)
    while left > 0 and (more := client.recv(1 << 20)):
        left -= len(more)
    return head


def _reply(body: bytes, more: bytes = b"") -> bytes:
    length = b"content-length: %d\r\nconnection: close\r\n" % len(body)
    return _OK + more + length + b"\r\n" + body


@contextlib.contextmanager
def _instance(
    answer: Play | None = None, heard: list[bytes] | None = None, path: bytes = b"/v1/"
) -> Iterator[str]:
    """A well-behaved instance, but for ``answer`` to requests of ``path``; its URL. ``heard``: the
    heads of requests but of probes."""

    def play(client: socket.socket) -> None:
        head = _request(client)
        is_probe = head.startswith((b"GET /health", b"GET /v1/models"))
        if heard is not None and not is_probe:
            heard.append(head)
        if answer is not None and head.partition(b" ")[2].startswith(path):
            answer(client)
        elif head.startswith(b"GET /v1/models"):
            client.sendall(_reply(b'{"data": [{"id": "m"}]}'))
        else:
            client.sendall(_reply(b'{"choices": [], "usage": {"prompt_tokens": 1}}'))

    with listening(play) as port:
        yield f"http://127.0.0.1:{port}"


def _batch(number: int, payload: bytes) -> bytes:
    return frame(b"", True) + frame(number.to_bytes(8, "big"), True) + frame(payload)


def _stored(blocks: Sequence[object], **more: object) -> dict[str, object]:
    event = {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": None}
    return {**event, "token_ids": [], "block_size": 0, "lora_id": None, "medium": "CPU", **more}


def _packed(*events: object, ts: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([ts, events, 0])


@contextlib.contextmanager
def _publisher(publish: Play, replay: Play | None = None) -> Iterator[str]:
    """A publisher that plays after the handshakes; the part of an instance's URL that names it."""

    def live(client: socket.socket) -> None:
        shake_hands(client, b"PUB")
        publish(client)

    def replayed(client: socket.socket) -> None:
        shake_hands(client, b"ROUTER")
        (replay or _nothing_more)(client)

    with listening(live) as port, listening(replayed) as replay_port:
        yield f"?events={port}/{replay_port}"


def _nothing_more(client: socket.socket) -> None:
    """There is nothing to replay."""
    client.recv(4096)
    client.sendall(frame(b"", True) + frame(b"", True) + frame(b"\xff" * 8, True))
    client.sendall(frame(b""))


def _sends(first: bytes, then: bytes = b"") -> Play:
    """``first``, and ``then`` again and again until the connection ends."""

    def play(client: socket.socket) -> None:
        client.sendall(first)
        while then:
            client.sendall(then)
        while client.recv(4096):
            pass

    return play


# -- attacks by clients ---------------------------------------------------------------------


@attack()
def forty_megabytes_of_messages(folder: Path) -> str:
    """Sends the largest body, made of the smallest messages, while others ask for /health."""
    message = b'{"role":"user","content":"x"}'
    body = b'{"messages":[' + b",".join([message] * ((40 << 20) // 31)) + b"]}"
    with _instance() as url, routing(folder, [url]) as router:
        slowest = 0.0
        statuses: list[int] = []

        def send() -> None:
            for _ in range(2):
                reply = httpx.post(
                    f"{router.url}/v1/chat/completions", content=body, headers=_JSON, timeout=60
                )
                statuses.append(reply.status_code)

        for _ in while_running(send):
            began = time.monotonic()
            router.check(f"{len(body)} bytes of messages are read")
            slowest = max(slowest, time.monotonic() - began)
        return f"read as bytes ({statuses}); others waited {slowest * 1000:.0f} ms at most"


@attack()
def half_sent_bodies(folder: Path) -> str:
    """Begins more requests than may be in flight, and never ends their bodies."""
    with _instance() as url, routing(folder, [url], "--max-requests", "4") as router:
        links = [router.connection() for _ in range(16)]
        for link in links:
            link.sendall(_POST + b'content-length: 99\r\n\r\n{"prompt": ')
        time.sleep(0.5)
        router.check("16 bodies do not end, and 4 requests may be in flight")
        began = time.monotonic()
        answers = {_first_line(link) for link in links}
        took = time.monotonic() - began
        if any(b"408" not in answer for answer in answers):
            raise Stalled(f"unfinished bodies are waited for: {answers}")
        return f"a place is taken with a whole body; each was ended after {took:.0f} s"


def _first_line(link: socket.socket) -> bytes:
    try:
        return link.recv(4096).partition(b"\r\n")[0]
    except TimeoutError:
        return b"nothing"


@attack()
def silent_connections(folder: Path) -> str:
    """Opens connections and says nothing."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with _instance() as url, routing(folder, [url], "--max-requests", "4") as router:
        links = [router.connection() for _ in range(1500)]
        time.sleep(0.5)
        router.check(f"{len(links)} connections are silent")
        deadline = time.monotonic() + 15
        for link in links:
            link.settimeout(max(0.1, deadline - time.monotonic()))
            if _first_line(link) == b"nothing":
                raise Stalled("silent connections stay open")
        return f"{len(links)} were closed, the longest silent ones first"


@attack()
def without_a_key(folder: Path) -> str:
    """Asks every route without the key, with a wrong one, and with a body that never comes."""
    file = folder / "keys"
    file.touch(0o600)
    file.write_text(_KEY)
    heard: list[bytes] = []
    with _instance(heard=heard) as url, routing(folder, [url], "--api-key-file", str(file)) as r:
        paths = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/docs", "/")
        wrong = ("", "Bearer x", f"Bearer {_KEY[:-1]}", f"Basic {_KEY}", _KEY, "Bearer \xff")
        for path, key, method in itertools.product(paths, wrong, ("GET", "POST", "HEAD")):
            given = [(b"authorization", key.encode("latin-1"))] if key else []
            reply = r.client.request(method, path, headers=given, json={})
            if reply.status_code < 400 or reply.status_code in (404, 405):
                raise GotIn(f"{method} {path} with {key!r}: {reply.status_code}")
        with r.connection() as link:
            link.sendall(_POST + b"content-length: 9999999\r\n\r\n")
            link.settimeout(8)
            if b"401" not in _first_line(link):
                raise Stalled("a body is waited for before the key is looked at")
        if heard:
            raise GotIn(f"the instance got {heard[0][:60]!r}")
        r.client.headers["authorization"] = f"Bearer {_KEY}"
        r.check("strangers tried keys")
        if f"authorization: bearer {_KEY}".encode() not in heard[-1].lower():
            raise Stalled("the key of a client does not reach the instance")
        arguments = Path(f"/proc/{r.pid}/cmdline").read_bytes()
        if _KEY in r.text or _KEY.encode() in arguments:
            raise SecretSeen("the key is in the log or the command line")
    return "401, before the body; the key is neither in the log nor in the command line"


@attack()
def foreign_pages(folder: Path) -> str:
    """A page in an operator's browser posts to a router on loopback, also under a name of its
    own."""
    heard: list[bytes] = []
    with _instance(heard=heard) as url, routing(folder, [url]) as router:
        for headers in (
            {"content-type": "text/plain"},
            {"content-type": "application/x-www-form-urlencoded"},
            {"origin": "http://evil.example"},
            {"origin": "null"},
            {"host": "evil.example"},
            {"host": f"evil.example:{router.port}", "origin": f"http://evil.example:{router.port}"},
            {"sec-fetch-site": "cross-site"},
        ):
            reply = router.client.post("/v1/completions", content=b"{}", headers=headers)
            if reply.status_code not in (403, 415) or heard:
                raise GotIn(f"{headers}: {reply.status_code}")
        router.check("pages tried to post")
    return "403 and 415; the instance heard nothing"


@attack()
def headers_within_headers(folder: Path) -> str:
    """Hides line ends in what is passed on, to add headers upstream or lines to the log."""
    heard: list[bytes] = []
    with _instance(heard=heard) as url, routing(folder, [url]) as router:
        names = (b"x-request-id", b"x-session-id", b"traceparent", b"tracestate", b"user-agent")
        values = (
            b"a\r\n b: c",
            b"a\nx-evil: 1",
            b"a\rx-evil: 1",
            b"a\x0bx-evil: 1",
            b"a\x00x-evil: 1",
            b"a\x85x-evil: 1",
            b"\x1b[2Jx-evil: 1",
            b"a" * 20_000,
        )
        for name, value in itertools.product(names, values):
            body = b'{"prompt": "x"}'
            with router.connection() as link:
                link.sendall(
                    _POST + name + b": " + value + b"\r\ncontent-length: %d\r\n\r\n" % len(body)
                )
                link.sendall(body)
                _first_line(link)
            if "x-evil" in router.text:
                raise GotIn(f"{name!r} {value!r} is in the log")
        for head in heard:
            lines = head.split(b"\r\n")
            if any(line.startswith((b"x-evil", b" b", b"b:")) or b"\n" in line for line in lines):
                raise GotIn(f"the instance got {head!r}")
        router.check("headers with line ends")
        return f"refused by the parser or passed on as one value ({len(heard)} requests)"


# -- attacks by instances -------------------------------------------------------------------


@attack()
def endless_replies(folder: Path) -> str:
    """An instance answers with headers, interim replies, chunks, events or a list without end."""
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    stream = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n" + chunked
    ways = {
        "headers": _sends(_OK, b"a: b\r\n" * 1000),
        "interim replies": _sends(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
        "chunks": _sends(_OK + chunked, chunk),
        "an event": _sends(stream, chunk),
        "nested JSON": _sends(_reply(b'{"usage":' + b"[" * (4 << 20))),
        "trailers": _sends(_OK + chunked + b"0\r\n", b"a: b\r\n" * 1000),
        "a trailer": _sends(_OK + chunked + b"0\r\na: ", b"a" * 60_000),
        "a chunk's extension": _sends(_OK + chunked + b"1;", b"a" * 60_000),
        "a bad chunk": _sends(_OK + chunked + b"zz\r\n"),
    }
    way = [ways["chunks"]]
    with (
        _instance(lambda link: way[0](link)) as bad,
        _instance() as good,
        routing(folder, [bad, good], "--timeout", "2") as router,
    ):
        for name, play in ways.items():
            way[0] = play
            options = {"stream": name == "an event"}
            clients = [
                threading.Thread(target=router.complete, kwargs=options, daemon=True)
                for _ in range(2)
            ]
            for one in clients:
                one.start()
            time.sleep(0.2)
            began = time.monotonic()
            if router.client.get("/health").status_code != 200:
                raise Stalled(f"health is not answered during {name}")
            if (took := time.monotonic() - began) > _PATIENCE_S:
                raise Stalled(f"health took {took:.1f} s during {name}")
            for one in clients:
                one.join(15)
                if one.is_alive():
                    raise Stalled(f"a request does not end: {name} without end")
            if router.mib > _MOST_MIB:
                raise Stalled(f"the router has {router.mib} MiB after {name} without end")
        return f"each wait and each reply has an end; the router has {router.mib} MiB"


@attack()
def lists_without_end(folder: Path) -> str:
    """One instance answers probes, or its list of models, a byte at a time or nested deeply, so
    that no other is looked after."""
    slow = b"content-length: 9999\r\n\r\n"

    def drip(link: socket.socket) -> None:
        link.sendall(_OK + slow)
        while True:
            link.sendall(b" ")
            time.sleep(0.5)

    def nested(link: socket.socket) -> None:
        link.sendall(_reply(b'{"data":' + b"[" * 100_000))

    file = folder / "instances"
    with (
        _instance(drip, path=b"/health") as slow_url,
        _instance(nested, path=b"/v1/models") as nested_url,
        _instance() as good,
        _instance() as late,
    ):
        file.write_text(f"engine {slow_url}\nengine {nested_url}\nengine {good}\n")
        with routing(folder, [], "--instances", str(file)) as router:
            file.write_text(f"engine {slow_url}\nengine {late}\n")

            def is_seen() -> bool:
                listed = router.client.get("/health").json()["instances"]
                return any(one["url"] == late and one["up"] for one in listed)

            until(is_seen, 20, "a new instance is not seen, as another one's probe has no end")
    return "a probe has an end, and the others go on"


@attack()
def bytes_that_are_no_text(folder: Path) -> str:
    """Instances list models and cut prompts, a publisher names a medium, and clients write messages
    and prompts, in bytes that are no UTF-8."""
    good = _sends(_batch(1, _packed(_stored([10, 11, 12], medium="GPU"))))
    bad = _batch(0, _packed(_stored([1], medium="CPU")).replace(b"CPU", b"\xff\xff\xff"))

    def publish(link: socket.socket) -> None:
        link.sendall(bad)
        good(link)

    with (
        _publisher(publish) as events,
        _instance(_sends(_reply(b'{"data": [{"id": "\xff"}]}')), path=b"/v1/models") as lists,
        _instance(_sends(_reply(b'{"tokens": [1], "count": "\xff"}')), path=b"/tokenize") as cuts,
        routing(folder, [cuts + events, lists]) as router,
    ):
        for body in (
            b'{"messages":[{"role":"user","content":"\xff"}]}',
            b'{"messages":[{"role":"user","content":[{"type":"\xff"}]}]}',
            b'{"prompt":"\xff"}',
            b'{"prompt":["\xff"],"model":"\xff"}',
            b'{"\xff":1}',
        ):
            for path in ("/v1/chat/completions", "/v1/completions"):
                if (status := router.client.post(path, content=body).status_code) >= 500:
                    raise Crashed(f"{body!r}: {status}")
        until(
            lambda: 'tier="device"} 3.0' in router.client.get("/metrics").text,
            15,
            "a publisher is not followed any more",
        )
        router.check("bytes that are no text came from all sides")
    return "requests were refused or served, models are unknown, and a batch was left out"


@attack()
def redirects_and_bombs(folder: Path) -> str:
    """An instance sends clients, the key or the router elsewhere, or a gigabyte in a megabyte."""
    elsewhere: list[bytes] = []
    bomb = gzip.compress(bytes(256 << 20))
    with _instance(heard=elsewhere) as other:
        told = f"HTTP/1.1 307 Go\r\nlocation: {other}/v1/x\r\ncontent-length: 0\r\n".encode()
        told += b"connection: close\r\n\r\n"  # it answers once on each
        replies = [told, _reply(bomb, b"content-encoding: gzip\r\n")]
        with (
            _instance(lambda link: _sends(replies[0])(link)) as url,
            routing(folder, [url]) as router,
        ):
            key = {"authorization": "Bearer secret"}
            reply = router.client.post("/v1/completions", json={"prompt": "x"}, headers=key)
            if elsewhere or reply.status_code != 502 or "location" in reply.headers:
                raise GotIn(f"a redirect was followed or passed on ({reply.status_code})")
            replies.pop(0)
            got = router.client.post("/v1/completions", json={"prompt": "x"})
            if got.status_code < 500:
                raise GotIn(f"a bomb was undone, or passed on ({got.status_code})")
            if router.mib > _MOST_MIB // 2:
                raise Stalled(f"the router has {router.mib} MiB after {len(bomb)} bytes of gzip")
    return "a redirect is a failure, and so is a bomb"


# -- attacks by publishers ------------------------------------------------------------------


@attack()
def event_flood(folder: Path) -> str:
    """A publisher, and its replay, report new blocks without end, as fast as they can."""
    blocks_of = itertools.count()

    def flood(link: socket.socket) -> None:
        for number in itertools.count():
            blocks = [next(blocks_of) << 32 for _ in range(20_000)]
            link.sendall(_batch(number, _packed(_stored(blocks))))

    def empty(link: socket.socket) -> None:
        cleared = _packed(*[{"type": "AllBlocksCleared"}] * 50_000)
        for number in itertools.count():
            link.sendall(_batch(number, cleared))

    with (
        _publisher(flood) as many,
        _publisher(empty, flood) as replays,
        _instance() as url,
        _instance() as other,
        routing(folder, [url + many, other + replays]) as router,
    ):
        end = time.monotonic() + 5
        while time.monotonic() < end:
            router.check("events come without end")
        applied = _metric(router, "event_batches")
        if not applied:
            raise Stalled("no batch was applied")
        return f"others were served while {applied:.0f} batches were applied ({router.mib} MiB)"


def _metric(router: Router, name: str) -> float:
    lines = router.client.get("/metrics").text.splitlines()
    named = (line for line in lines if line.startswith(f"kvrecall_router_{name}{{"))
    return sum(float(line.rpartition(" ")[2]) for line in named)


@attack(limit_s=120)
def broken_events(folder: Path) -> str:
    """A publisher sends frames without end, absurd values and numbers, and then a good batch."""
    nested = b"\x93\xcb" + bytes(8) + b"\x91" * 100_000
    tokens = [1] * 2_000_000
    endless = frame(bytes(1 << 20), True)
    values = [
        _batch(0, nested),
        _batch(0, _packed(_stored([1]), ts=float("nan"))),
        _batch(0, _packed(_stored([1]), ts=-1e308)),
        *(
            _batch(n, _packed(_stored([1], block_size=size, token_ids=tokens[:9])))
            for n, size in enumerate((0, -1, 10**18, 9, 1), start=1)
        ),
        _batch(6, _packed(_stored([2], block_size=1_000_000, token_ids=tokens))),
        _batch(7, _packed(_stored([2], block_size=2, token_ids=[[[]], {"a": 1}]))),
        _batch(8, _packed(_stored(["x"]))),
        _batch(9, _packed(_stored([b"", b"\xff" * 1000, -1, 2**64 - 1]))),
        _batch(2**64 - 1, _packed(_stored([3]))),
        _batch(0, _packed(_stored([3]))),
        _batch(10, b""),
        frame(b"", True) * 100,
        frame(b"", True) + frame(b"\xff" * 5000, True) + frame(_packed(_stored([3]))),
    ]

    def stalled(link: socket.socket) -> None:
        link.recv(4096)
        link.sendall(_batch(5, _packed(_stored([1])))[:-3])
        link.recv(1)

    def asked(then: Play) -> Play:
        def play(link: socket.socket) -> None:
            link.recv(4096)
            then(link)

        return play

    again = _sends(b"", _batch(5, _packed(_stored([1]))))
    good = _sends(_batch(0, _packed(_stored([10, 11, 12], medium="GPU"))))
    plays: list[tuple[str, Play, Play]] = [
        ("a message without end", _sends(b"", endless), _nothing_more),
        ("a frame of an exabyte", _sends(b"\2" + b"\x7f" * 8, bytes(1 << 20)), _nothing_more),
        ("odd values", _sends(b"".join(values)), _nothing_more),
        ("a replay that goes back", good, asked(again)),
        ("a replay of a message without end", good, asked(_sends(b"", endless))),
        ("commands without end", _sends(b"", b"\4\5\4PING" * 1000), _nothing_more),
        ("a replay that stalls", good, stalled),
    ]
    now: list[tuple[str, Play, Play]] = [plays[0]]
    with (
        _publisher(lambda link: now[0][1](link), lambda link: now[0][2](link)) as publisher,
        _instance() as url,
        routing(folder, [url + publisher]) as router,
    ):
        for one in plays:
            now[0] = one
            end = time.monotonic() + 2.5
            while time.monotonic() < end:
                router.check(one[0])
                time.sleep(0.05)
        now[0] = ("", good, _nothing_more)
        until(
            lambda: 'tier="device"} 3.0' in router.client.get("/metrics").text,
            15,
            "a publisher that sends good batches again is not followed",
        )
        if "nan" in router.client.get("/metrics").text.lower():
            raise GotIn("a batch without a time spoilt a metric")
        return f"each was dropped with its connection, and a good one followed ({router.mib} MiB)"
