"""Attacks that read: marked secrets, sought in all that kvrecall prints, serves, logs or sends."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import psutil

import kvrecall
from kvrecall.config import RecallSettings
from kvrecall.environment import API_KEY, TRACES_PROTOCOL
from kvrecall.processes.child import server_environment
from kvrecall.processes.command import kvrecall as command
from kvrecall.processes.ports import free_port
from kvrecall.processes.server import ServerProcess, generate
from kvrecall_lab.hostile.attack import NotHere, SecretSeen, attack
from kvrecall_lab.hostile.listeners import http_server, said_by
from kvrecall_lab.hostile.router import routing

_MODEL = Path(kvrecall.__file__).parents[2] / "models" / "recall-tiny"
_BLOCK_BYTES = 60_000


class Marks:
    """Secrets that occur nowhere else, each by its name."""

    def __init__(self, *names: str) -> None:
        self.of = {name: f"zq{secrets.token_hex(10)}" for name in names}

    def sought(self, text: str, where: str) -> None:
        """Raises SecretSeen if one is in ``text``."""
        for name, mark in self.of.items():
            if mark in text:
                at = text.index(mark)
                raise SecretSeen(f"{name} in {where}: ...{text[max(0, at - 80) : at + 8]}...")

    def files(self, folder: Path) -> dict[str, dict[str, str]]:
        """What settings say of each: the file that holds it."""
        for name, mark in self.of.items():
            path = folder / f"{name}.secret"
            path.touch(0o600)
            path.write_text(mark)
        return {name: {"file": str(folder / f"{name}.secret")} for name in self.of}


def _echo() -> AbstractContextManager[str]:
    """A server that answers each request with what it was sent."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        sent = " ".join(f"{name}: {value}" for name, value in handler.headers.items())
        text = f"<Error><Code>AccessDenied</Code><Message>{handler.path} {sent}</Message></Error>"
        handler.send_response(403, "no")
        handler.send_header("content-length", str(len(text)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(text.encode())

    return http_server(answer)


def _store(endpoint: str, files: Mapping[str, object]) -> dict[str, object]:
    names = "access_key_id secret_access_key session_token".split()
    return {
        "kind": "objects",
        "url": "s3://bucket/prefix",
        "region": "here",
        "endpoint": endpoint,
        "retries": 0,
        "options": {name: files[name] for name in names},
    }


def _open_settings(marks: Marks) -> Iterator[dict[str, object]]:
    """Pools whose settings hold a secret, each in another place."""
    key, user = marks.of["key"], f"user:{marks.of['password']}@"
    objects = {"kind": "objects", "url": "s3://bucket"}
    yield {**objects, "options": {"secret_access_key": key}}
    yield {**objects, "options": {"aws_session_token": key}}
    yield {**objects, "secret_access_key": key}
    yield {**objects, "endpoint": f"https://{user}127.0.0.1"}
    yield {**objects, "endpoint": f"https://127.0.0.1/?sig={key}"}
    yield {**objects, "url": f"s3://{user}bucket"}
    mooncake = {"kind": "mooncake", "local_hostname": "localhost", "protocol": "tcp"}
    mooncake |= {"master_server_address": "127.0.0.1:1"}
    yield {**mooncake, "metadata_server": f"redis://{user}127.0.0.1:6379"}
    yield {**mooncake, "metadata_server": "P2PHANDSHAKE", "etcd_password": key}
    own = {"kind": "no_such_module:Store"}
    yield {**own, "password": key}
    yield {**own, "nested": [{"apiKey": key}]}
    yield {**own, "url": f"redis://{user}127.0.0.1"}
    yield {**own, "headers": {"Authorization": f"Bearer {key}"}}


@attack(limit_s=240)
def settings_that_hold_a_secret(folder: Path) -> str:
    """Settings with keys, passwords and URLs with users: is one accepted, or printed?"""
    marks = Marks("key", "password")
    served: dict[str, object] = {"modelName": "m", "modelWeightPath": str(_MODEL), "worldSize": 1}
    served["plugin_params"] = '{"plugin_type":"prefix_cache"}'
    backend: dict[str, object] = {"ModelDeployConfig": {"ModelConfig": [served]}}
    backend["kvPoolConfig"] = {"backend": "embedded", "configPath": "pool.json"}
    mindie = folder / "config.json"
    mindie.write_text(json.dumps({"ServerConfig": {"port": free_port()}, "BackendConfig": backend}))
    pool = folder / "pool.json"
    asked = (
        f"serve {_MODEL} --pool-config {pool}",
        f"doctor --quick --json --pool-config {pool}",
        f"pool serve --config {pool}",
        f"config check {mindie}",
    )
    tried = 0
    for number, remote in enumerate(_open_settings(marks)):
        pool.write_text(json.dumps({"host_size": "8MiB", "remote": remote}))
        try:
            RecallSettings.from_mapping(json.loads(pool.read_text()))
        except Exception as error:  # noqa: BLE001 - whatever it says
            marks.sought(f"{error!r} {error}", f"the error about {sorted(remote)}")
        else:
            raise SecretSeen(f"settings with a secret in the open are accepted: {sorted(remote)}")
        for words in asked if number in (0, 3, 6) else ():
            done = said_by(*command(*words.split()), timeout=60)
            marks.sought(done.stdout + done.stderr, words)
            if done.returncode == 0 or "Traceback" in done.stderr:
                raise SecretSeen(f"kvrecall {words} takes it: {done.stderr[-300:]}")
            tried += 1
    return f"each is refused by its name, and not shown, by {tried} commands too"


@attack()
def a_store_that_repeats_what_it_is_sent(folder: Path) -> str:
    """A store whose errors hold the credentials, one that is away, one that takes no key."""
    from kvrecall.pool import Pool
    from kvrecall.testing import chain, namespace
    from kvrecall.testing.pool_contract import Engine

    marks = Marks("access_key_id", "secret_access_key", "session_token")
    log = StringIO()
    logging.basicConfig(stream=log, level=logging.DEBUG, force=True)
    with _echo() as url:
        for place in (url, "http://127.0.0.1:1"):
            remote = _store(place, marks.files(folder))
            settings = RecallSettings.from_mapping({"host_size": "8MiB", "remote": remote})
            with Pool.open(settings.pool) as pool:
                pool.register(namespace(), _BLOCK_BYTES)
                engine = Engine(pool, _BLOCK_BYTES)
                engine.save(chain(namespace(), 4))
                pool.flush(chain(namespace(), 4), 5.0)
                log.write(f"{settings!r} {pool!r} {vars(pool)!r}")
                engine.close()
    text = log.getvalue()
    marks.sought(text, "the log")
    if text.count("put failed") < 2 or "AccessDenied" not in text:
        raise AssertionError(f"the stores' errors were not logged: {text[-2000:]}")
    return "errors say status and code, and nothing else of the answer"


@attack()
def a_collector_that_repeats_what_it_is_sent(_: Path) -> str:
    """A collector of spans whose refusal holds the headers that it got."""
    try:
        import grpc  # type: ignore[import-untyped]

        from kvrecall.traces import end_provider, provider_at
    except ImportError as error:
        raise NotHere(f"{error.name} is not installed") from error

    class Refuses(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            sent = " ".join(f"{key}={value}" for key, value in details.invocation_metadata)
            return grpc.unary_unary_rpc_method_handler(
                lambda request, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, sent)
            )

    marks = Marks("header", "other")
    os.environ["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization=Bearer%20{marks.of['header']}"
    os.environ["OTEL_EXPORTER_OTLP_TRACES_HEADERS"] = f"x-key={marks.of['other']}"
    log = StringIO()
    logging.basicConfig(stream=log, level=logging.WARNING, force=True)
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Refuses()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with _echo() as url:
        for protocol, endpoint in (("grpc", f"http://127.0.0.1:{port}"), ("http/protobuf", url)):
            os.environ[TRACES_PROTOCOL] = protocol
            provider = provider_at(endpoint, "attack")
            provider.get_tracer("attack").start_span("one").end()
            end_provider(provider)
    server.stop(0)
    marks.sought(log.getvalue(), "the log")
    if "UNAUTHENTICATED" not in log.getvalue():
        raise AssertionError(f"the collector's refusal was not logged: {log.getvalue()}")
    return "the refusal is logged without the headers"


@attack(limit_s=120)
def a_routers_key(folder: Path) -> str:
    """The key of a router: its routes, its log, its processes."""
    marks = Marks("api_key")
    environment = {**os.environ, API_KEY: marks.of["api_key"]}
    nowhere = ["http://127.0.0.1:1"]
    with routing(folder, nowhere, environment=environment, is_up=False) as router:
        with httpx.Client(base_url=router.url) as client:
            seen = _walk(client, marks, ("/health", "/metrics", "/v1/models", "/"), "api_key")
        marks.sought(_command_lines(router.pid), "a command line")
        router.stop(20.0)
        marks.sought(router.text, "the log")
    return f"not on {seen} routes, in no log or command line"


_ROUTES = (
    "/v1/config /v1/models /v1/status /v2/status /metrics /info /openapi.json /version /server_info"
    " /server_info?config_format=json /dashboard /dashboard/data /v2 /health"
).split()


@attack(engine=True, limit_s=420)
def all_that_a_server_shows(folder: Path) -> str:
    """A server with a store, a collector and a key of its own: every GET route, with the key and
    without, a traceback in its workers, its log to its end, the command lines of its processes."""
    marks = Marks("access_key_id", "secret_access_key", "session_token", "api_key", "header")
    pool = folder / "pool.json"
    environment = server_environment() | {
        "VLLM_API_KEY": marks.of["api_key"],
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={marks.of['header']}",
        TRACES_PROTOCOL: "http/protobuf",
    }
    with _echo() as url:
        settings = {"host_size": "64MiB", "remote": _store(url, marks.files(folder))}
        pool.write_text(json.dumps(settings))
        words = [str(_MODEL), "--pool-config", str(pool), "--otlp-traces-endpoint", url]
        with ServerProcess(words, folder / "log", print, environment) as server:
            key = {"authorization": f"Bearer {marks.of['api_key']}"}
            with httpx.Client(base_url=server.url, timeout=60, headers=key) as client:
                for text in ("once " * 300, "twice " * 300):
                    generate(client, server.url, text, 4)
                body = {"method": "no_such_method"}
                said = httpx.post(
                    f"{server.url}/collective_rpc", json=body, headers=key, timeout=60
                )
                marks.sought(said.text, "the error of an RPC")
                paths = client.get("/openapi.json").json().get("paths", {})
                gets = [p for p, ways in paths.items() if "get" in ways and "stop" not in p]
                seen = _walk(client, marks, sorted({*_ROUTES, *gets}), "api_key")
            marks.sought(_command_lines(server.pid), "a command line")
            whole = server.family()
            for process in whole:
                if "EngineCore" in " ".join([process.name(), *process.cmdline()]):
                    process.kill()
            psutil.wait_procs(whole, timeout=60)
        marks.sought((folder / "log").read_text(errors="replace"), "the log")
    return f"not on {seen} routes, in no log or command line, also when its engine died"


def _walk(client: httpx.Client, marks: Marks, paths: Any, key: str) -> int:
    """Reads all paths with the key and without it; returns their number."""
    for headers in ({}, {"authorization": f"Bearer {marks.of[key]}"}):
        for path in paths:
            path = path.replace("{model:path}", "x").replace("{", "").replace("}", "")
            with client.stream("GET", path, headers=headers) as reply:
                text = "".join(reply.iter_text()) if _ends(reply) else ""
                marks.sought(f"{reply.headers} {text}", f"GET {path}")
    return len(list(paths))


def _ends(reply: httpx.Response) -> bool:
    return "event-stream" not in reply.headers.get("content-type", "")


def _command_lines(pid: int) -> str:
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return "\n".join(" ".join(one.cmdline()) + " " + one.name() for one in family)
