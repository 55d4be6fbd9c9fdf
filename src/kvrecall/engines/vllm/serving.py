"""vLLM as a server: its own async engine, OpenAI app and HTTP loop, with our routes on top.

``serve`` is the only entry. Everything here follows vLLM 0.32's own ``vllm serve``
(``vllm/entrypoints/launchers/api_server/entry.py``): the same functions in the same order, with
three differences: the OpenAI handlers are replaced by those of ``answers.py`` (which report where
a prompt's tokens came from), routes are attached before the first request, and how the server
ended is told by an exit status.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn, cast

import psutil
import uvloop
from fastapi import FastAPI
from pydantic import ValidationError
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from kvrecall.engines.base import Generator, Limits, ServeSpec
from kvrecall.engines.vllm import orphan
from kvrecall.engines.vllm.answers import VllmGenerator, recall_chat, recall_completion
from kvrecall.errors import ConfigError, EngineError

log = logging.getLogger("kvrecall.server")

Attach = Callable[[FastAPI, Generator], None]

_GIB = 1 << 30
_MAX_DEFAULT_CPU_KV = 4 * _GIB
_LAST_BYTES_S = 5  # for connections to take what was sent before the engine ended


class RequestTimeoutError(GenerationError):
    """A request ran past the token or the end-to-end timeout and was aborted."""


def _not_the_last_output(record: logging.LogRecord) -> bool:
    """Drops a traceback vLLM may log when it is shut down as asked: its output loop finds the
    engine gone before it is told to end."""
    return record.msg != "AsyncLLM output_handler failed."


class TimedAsyncLLM(AsyncLLM):
    """vLLM's async engine, with the server's time limits on every request of every route."""

    limits: Limits = Limits()
    died: bool = False
    """Whether the engine had failed when it was first shut down."""
    _closed: bool = False

    def shutdown(self, timeout: float | None = None) -> None:
        if not self._closed and "engine_core" in vars(self):  # not so if its start failed
            self._closed, self.died = True, bool(self.errored)
            if not self.died:
                logging.getLogger("vllm.v1.engine.async_llm").addFilter(_not_the_last_output)
        super().shutdown(timeout=timeout)

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncLLM.generate; raises RequestTimeoutError when a step or the whole takes too
        long. The request is then aborted in the engine."""
        outputs = super().generate(*args, **kwargs)
        clock = asyncio.get_running_loop().time
        total, step = self.limits.total_timeout_s, self.limits.token_timeout_s
        end = clock() + total if total else None
        try:
            while True:
                deadlines = [t for t in (end, clock() + step if step else None) if t is not None]
                try:
                    async with asyncio.timeout_at(min(deadlines, default=None)):
                        output = await anext(outputs)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise self._timed_out(end is not None and clock() >= end) from None
                yield output
        finally:
            await outputs.aclose()

    def _timed_out(self, whole: bool) -> RequestTimeoutError:
        if whole:
            return RequestTimeoutError(
                f"request took longer than {self.limits.total_timeout_s:g} s (e2eTimeout)"
            )
        return RequestTimeoutError(f"no token for {self.limits.token_timeout_s:g} s (tokenTimeout)")


class _Parser(FlexibleArgumentParser):
    """vLLM's parser, without its 400 lines of usage before each error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"vLLM options: {message}")


def serve(spec: ServeSpec, attach: Attach) -> int:
    """Serves ``spec`` until told to stop; returns the exit status.

    ``attach`` gets the application and a generator before the first request is accepted. SIGINT
    and SIGTERM finish running requests (``shutdown-timeout`` seconds) and give 0; a dead engine
    gives 1. Raises EngineError when vLLM does not accept the settings or does not start.
    """
    cli_env_setup()
    orphan.install()
    args = parse_args(spec)
    _cpu_environment(args.tensor_parallel_size * args.pipeline_parallel_size)
    return uvloop.run(_serve(args, spec, attach))


def parse_args(spec: ServeSpec) -> Namespace:
    """vLLM's own parsed arguments for ``spec``. Raises ConfigError on those it does not take."""
    words = [*command_line({**platform_defaults(spec), **spec.options}), *spec.extra_args]
    words += ["--host", spec.host, "--port", str(spec.port)]
    if spec.recall is not None:
        words += ["--kv-transfer-config", json.dumps(connector_config(spec.recall))]
    parser = make_arg_parser(_Parser(prog="kvrecall serve MODEL --"))
    args = parser.parse_args([spec.model, *words])
    args.model = args.model_tag
    try:
        validate_parsed_serve_args(args)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"vLLM does not accept these settings: {_reason(error)}") from error
    return cast(Namespace, args)


def connector_config(recall: Mapping[str, object]) -> dict[str, object]:
    """vLLM's ``kv_transfer_config`` that loads kvrecall's connector with these settings."""
    return {
        "kv_connector": "RecallConnector",
        "kv_connector_module_path": "kvrecall.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(recall),
    }


def command_line(options: Mapping[str, object]) -> list[str]:
    """Command-line words for engine options (see ServeSpec.options). None leaves one out."""
    words: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, Mapping):
            words += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}", str(value)]
    return words


def platform_defaults(spec: ServeSpec) -> dict[str, object]:
    """Options this platform wants unless the spec says otherwise.

    On a CPU: no compilation (a fast start), and a bounded KV cache, because vLLM's own default
    there is a share of all memory and refuses to start on a machine that is in use.
    """
    if not current_platform.is_cpu():
        return {}
    defaults: dict[str, object] = {"enforce-eager": True}
    if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        available = psutil.virtual_memory().available
        defaults["kv-cache-memory-bytes"] = min(_MAX_DEFAULT_CPU_KV, available // 4)
    return defaults


def _cpu_environment(ranks: int) -> None:
    """What vLLM's CPU platform reads from the environment, unless it is set already.

    vLLM compiles a few sampling functions even in eager mode, which kills the first request on a
    machine without a compiler. And it gives up one more core where a connector is configured (for
    NIXL's threads), or on two cores none at all; ours needs none of its own.
    """
    if not current_platform.is_cpu():
        return
    if shutil.which("g++") is None:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", str(ranks))


async def _serve(args: Namespace, spec: ServeSpec, attach: Attach) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):  # until serve_http handles them
        signal.signal(number, _end_at_once)
    try:
        _, sock = setup_server(args, reuse_port=False)
    except OSError as error:
        raise EngineError(f"cannot listen on {spec.host}:{spec.port}: {error.strerror}") from error
    try:
        async with _engine(args, spec.limits) as engine:
            app = await _application(engine, args, spec, attach)
            scheme = "https" if spec.tls else "http"
            log.info("serving %s on %s://%s:%s", _names(args), scheme, spec.host, spec.port)
            shutdown = await serve_http(
                app, sock=sock, enable_ssl_refresh=False, **_uvicorn(args, spec)
            )
        await shutdown
    finally:
        sock.close()
    if engine.died:
        log.error("the engine died; see its own message above")
        return 1
    return 0


def _end_at_once(*_: object) -> None:
    """Ends a start, which may take minutes. Nothing is being served and nothing stored, so the
    processes are killed; an exception in the midst of vLLM's start leaves it hanging."""
    log.info("stopped before the engine was ready")
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(0)


@asynccontextmanager
async def _engine(args: Namespace, limits: Limits) -> AsyncIterator[TimedAsyncLLM]:
    """The running engine; shut down, with its processes, on leaving."""
    context = UsageContext.OPENAI_API_SERVER
    engine_args = AsyncEngineArgs.from_cli_args(args)
    try:
        config = engine_args.create_engine_config(usage_context=context)
    except (ValueError, OSError, NotImplementedError) as error:
        raise ConfigError(f"vLLM does not accept these settings: {_reason(error)}") from error
    try:
        engine = TimedAsyncLLM(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_requests=engine_args.enable_log_requests,
            log_stats=not engine_args.disable_log_stats,
            usage_context=context,
        )
    except RuntimeError as error:
        raise EngineError(f"vLLM's engine did not start: {_reason(error)}") from error
    engine.limits = limits
    try:
        await engine.reset_mm_cache()
        yield engine
    finally:
        engine.shutdown(timeout=config.shutdown_timeout)


async def _application(
    engine: TimedAsyncLLM, args: Namespace, spec: ServeSpec, attach: Attach
) -> FastAPI:
    """vLLM's application with the recall-reporting handlers and our routes."""
    tasks = await engine.get_supported_tasks()
    if "generate" not in tasks:
        raise EngineError(f"{spec.model} generates no text (it supports: {', '.join(tasks)})")
    app = cast(FastAPI, build_app(args, tasks, engine.model_config))
    await init_app_state(engine, app.state, args, tasks)
    pooled = engine.vllm_config.kv_transfer_config is not None
    state = app.state
    state.openai_serving_chat = recall_chat(state.openai_serving_chat, spec.limits, pooled)
    completion = recall_completion(state.openai_serving_completion, spec.limits, pooled)
    state.openai_serving_completion = completion
    app.middleware_stack = None  # vLLM has built it already; it is built anew when serving starts
    attach(app, VllmGenerator(completion, spec.limits))
    return app


def _uvicorn(args: Namespace, spec: ServeSpec) -> dict[str, Any]:
    """Keyword arguments of serve_http, as vLLM's build_and_serve gives them, and our TLS."""
    kwargs = {
        name: getattr(args, name)
        for name in (
            "host port ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers "
            "h11_max_incomplete_event_size h11_max_header_count"
        ).split()
    }
    kwargs["timeout_graceful_shutdown"] = _LAST_BYTES_S
    kwargs["log_level"] = args.uvicorn_log_level
    kwargs["access_log"] = not args.disable_uvicorn_access_log
    tls = spec.tls
    if tls is not None:
        kwargs["ssl_context_factory"] = lambda *_: tls.context()
    log_config = get_uvicorn_log_config(args)
    if log_config is not None:
        kwargs["log_config"] = log_config
    return kwargs


def _names(args: Namespace) -> str:
    return ", ".join(args.served_model_name or [args.model])


def _reason(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, ValidationError):
        return error.errors()[0]["msg"].replace("\n", " ")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
