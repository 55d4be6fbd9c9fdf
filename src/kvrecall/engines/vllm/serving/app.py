"""vLLM as a server: its own async engine, OpenAI app and HTTP loop, with kvrecall's routes on top.

``serve`` is the only entry point. Everything here follows vLLM 0.32's own ``vllm serve``
(``vllm/entrypoints/launchers/api_server/entry.py``): the same functions in the same order, with
four differences: handlers of ``openai_handlers.py`` replace vLLM's, routes are attached before the
first request, further addresses are served beside vLLM's own (each by a uvicorn server in the same
event loop), and an exit status says how the server ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import traceback
from argparse import Namespace
from asyncio.sslproto import SSLProtocol
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import psutil
import uvicorn
import uvloop
from fastapi import FastAPI
from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import (
    NoSignalServer,
    create_server_socket,
    serve_http,
    setup_server,
)
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.executor import Executor

from kvrecall.config import RecallSettings, default_socket, split_for_service
from kvrecall.engines.base import Limits, Listener, Role, ServeSpec, ServingEngine
from kvrecall.engines.vllm.attention import plugin
from kvrecall.engines.vllm.compat import events, waits
from kvrecall.engines.vllm.compat.processes import name_own_plugins
from kvrecall.engines.vllm.compat.runner import ask_for_seeds
from kvrecall.engines.vllm.compat.serving import (
    end_engine_cores_with_parent,
    handler_as,
    stop_at_first_error,
)
from kvrecall.engines.vllm.compat.versions import command_line as vllm_command_line
from kvrecall.engines.vllm.serving.engine import VllmEngine
from kvrecall.engines.vllm.serving.openai_handlers import (
    RecallChat,
    RecallCompletion,
    RecallMessages,
)
from kvrecall.engines.vllm.serving.served_llm import ServedLLM
from kvrecall.environment import CPU_KV_SPACE, CPU_RESERVED, NO_COMPILING, VLLM_KEY
from kvrecall.errors import ConfigError, EngineError, hide
from kvrecall.pool.service.child import ChildService

log = logging.getLogger("kvrecall.server")

Attach = Callable[[FastAPI, ServingEngine, Sequence[str], Sequence[str]], Mapping[str, FastAPI]]
"""Completes vLLM's application with the API keys and the origins of pages that may use it, and
gives those of the further listeners, by their names."""
Protocol = type[asyncio.Protocol]
"""Of HTTP connections."""

make_arg_parser, validate_parsed_serve_args, cli_env_setup = vllm_command_line()

_HANDLERS = {
    "openai_serving_chat": RecallChat,
    "openai_serving_completion": RecallCompletion,
    "anthropic_serving_messages": RecallMessages,
}
_MAX_DEFAULT_CPU_KV = 4 << 30  # bytes
_LAST_BYTES_S = 5  # for connections to take what was sent before the engine ended
_LAST_BYTES_OF_OTHERS_S = 2  # the same of further listeners
_RANKS = (
    "; --data-parallel-start-rank is for one of several hosts, with --data-parallel-size-local "
    "below --data-parallel-size, and for a mixture of experts. Replicas of other models are "
    "servers of their own, which share a pool service"
)


class Loop(uvloop.Loop):
    """Has TLS by asyncio: uvloop's own tells of no connection before its handshake has ended."""

    async def create_server(self, *args: Any, **kwargs: Any) -> Any:
        make, context = args[0], kwargs.pop("ssl", None)
        makes = make if context is None else lambda: _Tls(self, make(), context)
        return await super().create_server(makes, *args[1:], **kwargs)


class _Tls(SSLProtocol):
    """TLS of a connection that counts among those without a request from its start on, and ends in
    time."""

    def __init__(self, loop: uvloop.Loop, protocol: Any, context: Any) -> None:
        waiter: Any = None
        super().__init__(loop, protocol, context, waiter, server_side=True)
        self._served = protocol

    def connection_made(self, transport: Any) -> None:
        self._served.wait(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._served.wait_no_more()


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, without its 400 lines of usage before each error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vLLM options: {message}")


def serve(spec: ServeSpec, attach: Attach, protocol: Protocol) -> int:
    """Serves ``spec`` until told to stop; returns the exit status.

    ``attach`` gets the application and the engine before the first request is accepted;
    ``protocol`` is that of all connections. SIGINT and SIGTERM finish running requests
    (``shutdown-timeout`` seconds) and give 0; a dead engine gives 1. Raises EngineError when vLLM
    does not accept the settings or does not start.
    """
    cli_env_setup()
    end_engine_cores_with_parent(os.environ)
    is_embedded = (spec.recall or {}).get("backend", "embedded") == "embedded"
    if spec.recall is not None and is_embedded:  # with a socket at which its pool answers queries
        address = str(default_socket().with_name(f"serve-{spec.port}.sock"))
        spec = replace(spec, recall={"admin_socket": address, **spec.recall})
    name_own_plugins(os.environ)
    if spec.retrieval:
        plugin.ask(os.environ)
    args = parse_args(spec)
    _cpu_environment(args.tensor_parallel_size * args.pipeline_parallel_size)
    with contextlib.ExitStack() as shared:
        replicas = _local_replicas(args)
        if spec.recall is not None and is_embedded and replicas > 1:
            pool, engines = split_for_service(spec.recall)
            shared.enter_context(contextlib.closing(ChildService(pool)))
            log.info("%d replicas share the pool at %s", replicas, pool["socket"])
            spec = replace(spec, recall=engines)
            args = parse_args(spec)
        return uvloop.run(_serve(args, spec, attach, protocol), loop_factory=Loop)


def _local_replicas(args: Namespace) -> int:
    """Data-parallel replicas that this server starts on this host."""
    if args.data_parallel_rank is not None or args.data_parallel_external_lb:
        return 1  # the others are servers of their own
    local: int | None = args.data_parallel_size_local
    return args.data_parallel_size if local is None else max(local, 1)


def parse_args(spec: ServeSpec) -> Namespace:
    """vLLM's own parsed arguments for ``spec``. Raises ConfigError on those it does not take."""
    words = [*command_line({**platform_defaults(spec), **spec.options}), *spec.extra_args]
    words += ["--host", spec.host, "--port", str(spec.port)]
    if spec.recall is not None:
        words += ["--kv-transfer-config", json.dumps(connector_config(spec.recall, spec.role))]
    parser = make_arg_parser(_Parser(prog="kvrecall serve MODEL --"))
    args = parser.parse_args([spec.model, *words])
    args.model = args.model_tag
    try:
        validate_parsed_serve_args(args)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM does not accept these settings: {_reason(error)}") from error
    args.api_key = _keys(args, spec)
    if args.kv_events_config is not None:
        events.listen_at(args.kv_events_config, spec.host)
    return cast(Namespace, args)


def _keys(args: Namespace, spec: ServeSpec) -> list[str]:
    """API keys; those of options take precedence over vLLM's variable, as in vLLM."""
    keys = [*spec.keys, *(args.api_key or ())] or [os.environ.get(VLLM_KEY, "")]
    for key in keys:
        hide(key)
    return [key for key in keys if key]


_KV_ROLES = {Role.BOTH: "kv_both", Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


def connector_config(recall: Mapping[str, object], role: Role = Role.BOTH) -> dict[str, object]:
    """vLLM's ``kv_transfer_config`` that loads kvrecall's connector with these settings."""
    return {
        "kv_connector": "RecallConnector",
        "kv_connector_module_path": "kvrecall.engines.vllm",
        "kv_role": _KV_ROLES[role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(recall),
    }


def command_line(options: Mapping[str, object]) -> list[str]:
    """Command-line words for engine options (see ServeSpec.options). None leaves one out."""
    words: list[str] = []
    for name, value in options.items():
        match value:
            case None:
                continue
            case bool():
                words.append(f"--{name}" if value else f"--no-{name}")
            case Mapping():
                words += [f"--{name}", json.dumps(value)]
            case list() | tuple():
                words += [f"--{name}", *map(str, value)]
            case _:
                words += [f"--{name}", str(value)]
    return words


def platform_defaults(spec: ServeSpec) -> dict[str, object]:
    """Default options of this platform, unless the spec sets them.

    On a CPU: no compilation (a fast start), and a bounded KV cache, because vLLM's own default
    there is a share of all memory and refuses to start on a machine that is in use. A configured
    share counts.
    """
    if not current_platform.is_cpu():
        return {}
    defaults: dict[str, object] = {"enforce-eager": True}
    words = (word.replace("_", "-") for word in spec.extra_args)
    by_share = any(word.startswith("--gpu-memory-utilization") for word in words)
    if not (by_share or os.environ.get(CPU_KV_SPACE)):
        available = psutil.virtual_memory().available
        defaults["kv-cache-memory-bytes"] = min(_MAX_DEFAULT_CPU_KV, available // 4)
    return defaults


def _cpu_environment(ranks: int) -> None:
    """Variables of vLLM's CPU platform, unless they are set already. vLLM compiles a few sampling
    functions even in eager mode, which kills the first request on a machine without a compiler.
    With a connector, vLLM also reserves one extra core (for NIXL's threads), which on two cores
    disables the reservation; kvrecall's connector needs no extra core."""
    if not current_platform.is_cpu():
        return
    if shutil.which("g++") is None:
        os.environ.setdefault(NO_COMPILING, "1")
    os.environ.setdefault(CPU_RESERVED, str(ranks))
    ask_for_seeds(os.environ)
    waits.ask(os.environ)


async def _serve(args: Namespace, spec: ServeSpec, attach: Attach, protocol: Protocol) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):  # until serve_http handles them
        signal.signal(number, _end_at_once)
    try:
        _, sock = setup_server(args, reuse_port=False)
    except OSError as error:
        raise EngineError(f"cannot listen on {spec.host}:{spec.port}: {error.strerror}") from error
    with contextlib.ExitStack() as bound:
        bound.callback(sock.close)
        sockets = [bound.enter_context(_bound(each)) for each in spec.listeners]
        async with _engine(args, spec.limits) as engine:
            app, others = await _application(engine, args, spec, attach)
            names = ", ".join(args.served_model_name or [args.model])
            for each in (Listener(names, spec.host, spec.port, spec.tls), *spec.listeners):
                scheme = "https" if each.tls else "http"
                log.info("serving %s on %s://%s:%s", each.name, scheme, each.host, each.port)
            async with _serving(spec.listeners, sockets, others, args, protocol):
                options = {"enable_ssl_refresh": False, "http": protocol, **_uvicorn(args, spec)}
                shutdown = await serve_http(app, sock=sock, **options)
        await shutdown
    if engine.died:
        log.error("the engine died; see its own message above")
        return 1
    return 0


def _end_at_once(number: int, _: object) -> None:
    """Ends a start, which may take minutes, with the status that a shell gives a process which the
    signal ends. Nothing is being served and nothing stored, so the processes are killed; an
    exception in the midst of vLLM's start leaves it hanging."""
    log.info("stopped before the engine was ready")
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(128 + number)


@asynccontextmanager
async def _engine(args: Namespace, limits: Limits) -> AsyncIterator[ServedLLM]:
    """The running engine; shut down, with its processes, on leaving."""
    context = UsageContext.OPENAI_API_SERVER
    engine_args = AsyncEngineArgs.from_cli_args(args)
    try:
        config = engine_args.create_engine_config(usage_context=context)
    except (ValueError, OSError, NotImplementedError, AssertionError) as error:
        raise ConfigError(f"vLLM does not accept these settings: {_reason(error)}") from error
    try:
        engine = ServedLLM(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_requests=engine_args.enable_log_requests,
            log_stats=not engine_args.disable_log_stats,
            usage_context=context,
        )
    except RuntimeError as error:
        raise EngineError(f"vLLM's engine did not start: {_reason(error)}") from error
    except AssertionError as error:  # of vLLM's on settings that contradict each other
        cure = "" if args.data_parallel_start_rank is None else _RANKS
        reason = _reason(error).rstrip(".")
        raise ConfigError(f"vLLM does not accept these settings: {reason}{cure}") from error
    engine.limits = limits
    try:
        await engine.reset_mm_cache()
        yield engine
    finally:
        engine.shutdown(timeout=config.shutdown_timeout)


async def _application(
    engine: ServedLLM, args: Namespace, spec: ServeSpec, attach: Attach
) -> tuple[FastAPI, Mapping[str, FastAPI]]:
    """vLLM's application with the recall-reporting handlers and kvrecall's routes; and those of the
    additional listeners."""
    tasks = await engine.get_supported_tasks()
    if "generate" not in tasks:
        raise EngineError(f"{spec.model} generates no text (it supports: {', '.join(tasks)})")
    app = cast(FastAPI, build_app(args, tasks, engine.model_config))
    stop_at_first_error(app)
    await init_app_state(engine, app.state, args, tasks)
    pooled = engine.vllm_config.kv_transfer_config is not None
    for name, kind in _HANDLERS.items():
        plain = getattr(app.state, name)
        setattr(app.state, name, handler_as(plain, kind, limits=spec.limits, pooled=pooled))
    app.middleware_stack = None  # vLLM has built it already; it is built anew when serving starts
    completion = app.state.openai_serving_completion
    ours = VllmEngine(engine, completion, spec.limits, _pool_socket(spec))
    origins = [origin for origin in args.allowed_origins if origin != "*"]
    return app, attach(app, ours, args.api_key, origins)


def _pool_socket(spec: ServeSpec) -> Path | None:
    """The socket at which the pool answers queries: the service's, or the engine's own."""
    if spec.recall is None:
        return None
    settings = RecallSettings.from_mapping(spec.recall)
    return settings.admin_socket if settings.service is None else settings.service.socket


def _uvicorn(args: Namespace, spec: ServeSpec) -> dict[str, Any]:
    """Keyword arguments of serve_http, as vLLM's build_and_serve gives them, and our TLS."""
    names = "ssl_ciphers h11_max_incomplete_event_size h11_max_header_count".split()
    log_config = get_uvicorn_log_config(args)
    return {
        **_of_both(args, Listener("", args.host, args.port, spec.tls), _LAST_BYTES_S),
        **{name: getattr(args, name) for name in names},
        **({} if log_config is None else {"log_config": log_config}),
        "access_log": not args.disable_uvicorn_access_log,
    }


def _of_both(args: Namespace, listener: Listener, last_bytes_s: int) -> dict[str, Any]:
    """Of any listener. Without certificates of its own, it has those of vLLM's options."""
    tls, names = listener.tls, ("keyfile", "certfile", "ca_certs", "cert_reqs")
    return {
        "host": listener.host,
        "port": listener.port,
        **{f"ssl_{name}": getattr(args, f"ssl_{name}") for name in names},
        "ssl_context_factory": None if tls is None else lambda *_: tls.context(),
        "log_level": args.uvicorn_log_level,
        "timeout_graceful_shutdown": last_bytes_s,
    }


def _bound(listener: Listener) -> socket.socket:
    """A bound socket, so that the address is taken. Raises EngineError."""
    try:
        return create_server_socket((listener.host, listener.port), reuse_port=False)
    except OSError as error:
        where = f"{listener.host}:{listener.port} ({listener.name})"
        raise EngineError(f"cannot listen on {where}: {error.strerror}") from error


@asynccontextmanager
async def _serving(
    listeners: Sequence[Listener],
    sockets: Sequence[socket.socket],
    apps: Mapping[str, FastAPI],
    args: Namespace,
    protocol: Protocol,
) -> AsyncIterator[None]:
    """Serves ``apps`` on their listeners; stops them on exit."""
    configs = [_uvicorn_config(each, apps[each.name], args, protocol) for each in listeners]
    servers = [NoSignalServer(config) for config in configs]
    pairs = zip(servers, sockets, strict=True)
    tasks = [asyncio.create_task(server.serve(sockets=[sock])) for server, sock in pairs]
    try:
        yield
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)


def _uvicorn_config(
    listener: Listener, app: FastAPI, args: Namespace, protocol: Protocol
) -> uvicorn.Config:
    """Loaded, so that it fails here and not in a task."""
    # vLLM's own listener configures logging for all.
    own: Any = {"http": protocol, "lifespan": "off", "log_config": None, "access_log": False}
    config = uvicorn.Config(app, **own, **_of_both(args, listener, _LAST_BYTES_OF_OTHERS_S))
    config.load()
    return config


def _reason(error: BaseException) -> str:
    """The message of an error, in one line."""
    if isinstance(error, ValidationError):
        return error.errors()[0]["msg"].replace("\n", " ")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, AssertionError) and not lines:
        lines = [traceback.extract_tb(error.__traceback__)[-1].line or ""]
    return lines[0] if lines else type(error).__name__
