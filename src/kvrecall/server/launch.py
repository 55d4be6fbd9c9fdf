"""From the options of a command to a running server: check, build the spec, run the engine."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvrecall.config import RecallSettings, option_of, parse_size
from kvrecall.engines.base import DEFAULT_MAX_N, Limits, Role, ServeSpec
from kvrecall.engines.vllm.attention.plugin import is_requested
from kvrecall.environment import VLLM_KEY
from kvrecall.errors import ConfigError, EngineError, KvrecallError
from kvrecall.jsonfile import read_under
from kvrecall.server.access import read_keys
from kvrecall.server.checks import check_devices, check_pool, check_port
from kvrecall.server.mindie.schema import CONFIG_PATH
from kvrecall.server.plan import (
    ENGINE_DEFAULTS,
    Plan,
    Plane,
    allowing_plaintext,
    shared_listeners,
    vllm_options,
)
from kvrecall.server.servable import check_served
from kvrecall.traces import OPTION, check_endpoint

log = logging.getLogger("kvrecall.server")

_CONNECTOR = "--kv-transfer-config"
"""With --no-pool another project's connector may be given."""
_OWN_OPTIONS = ("--host", "--port", _CONNECTOR, "--uds", "--config", "--headless")
_MEMORY = "kv-cache-memory-bytes"
_POOL = "host_size disk_path disk_size disk_compression encryption_key_file async_write".split()
_ENGINE = (
    "block_size max_model_len served_model_name dtype kv_cache_dtype kv_cache_memory_bytes "
    "enforce_eager otlp_traces_endpoint".split()
)
"""Options of the command line that are the pool's, and vLLM's."""


def plan_of(given: Mapping[str, Any]) -> Plan:
    """The plan for ``kvrecall serve`` with the options ``given``, by name; None: not given.
    Raises ConfigError."""
    spec = _spec_of(given)
    if not (spec.model or given["config"]) and (path := os.environ.get(CONFIG_PATH)):
        given = {**given, "config": Path(path)}
    pool_config, plaintext = given["pool_config"], given["allow_plaintext"]
    if pool_config is not None or given["config"] is None:
        spec = replace(spec, recall=_recall(spec.recall, pool_config))
    planes = {p: given[p] for p in (Plane.MANAGEMENT, Plane.METRICS) if given[p] is not None}
    if given["config"] is None:
        if plaintext:
            spec = replace(spec, recall=allowing_plaintext(spec.recall))
        plan = plan_model(spec, planes)
    elif planes:
        raise ConfigError(
            f"--{min(planes)} and --config: the file says where the planes are "
            "(managementIpAddress, managementPort, metricsPort)"
        )
    else:
        from kvrecall.server.mindie.planner import plan_config

        plan = plan_config(given["config"], spec, pool_config is not None, plaintext)
    return replace(
        plan,
        allowed_hosts=tuple(given["allowed_host"] or ()),
        allow_unauthenticated=given["allow_unauthenticated"],
        stop_by_get=given["stop_by_get"],
    )


def plan_model(spec: ServeSpec, planes: Mapping[Plane, str] | None = None) -> Plan:
    """The plan for ``kvrecall serve MODEL``: what ``spec`` has, and the defaults. ``planes``:
    ``HOST:PORT`` of those with an address of their own. Raises ConfigError."""
    if not spec.model:
        raise ConfigError(
            "no MODEL given; name a model folder or the id of a hub model (kvrecall serve MODEL), "
            "or a file with --config; kvrecall demo serve starts an example"
        )
    listeners, homes = shared_listeners(
        {plane: _address(plane, text) for plane, text in (planes or {}).items()}, lambda _: spec.tls
    )
    spec = replace(
        spec,
        host=spec.host or "127.0.0.1",
        port=spec.port or 8000,
        options={**ENGINE_DEFAULTS, **spec.options},
        limits=replace(spec.limits, max_n=spec.limits.max_n or DEFAULT_MAX_N),
        listeners=listeners,
    )
    return Plan(spec, homes=homes)


def _address(plane: Plane, text: str) -> tuple[str, int]:
    """``HOST:PORT`` of an option ``--PLANE``. Raises ConfigError."""
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.netloc != text or "@" in text:
        raise ConfigError(f"--{plane} is {text!r}; give HOST:PORT, as in 127.0.0.1:8001")
    return host, port


def _spec_of(given: Mapping[str, Any]) -> ServeSpec:
    """What the options ask for; "" and 0 where they say nothing. Raises ConfigError."""
    model, words = given["model"], tuple(given["vllm_options"] or ())
    if model is not None and model.startswith("-"):  # kvrecall serve -- --vllm-option
        words, model = (model, *words), None
    if words and not words[0].startswith("-"):
        raise ConfigError(f"{words[0]!r} is unexpected; give one MODEL, then -- and vLLM's options")
    if given["host"] == "":
        raise ConfigError("--host: '' is not an address of this machine; give one, or leave it out")
    if model is not None and not model.strip():
        raise ConfigError(f"MODEL is {model!r}; name a model folder or a hub id")
    recall = {name: given[name] for name in _POOL if given[name] is not None}
    if given["pool_service"] or given["pool_socket"]:
        recall["backend"] = "service"
    if given["pool_socket"]:
        recall["socket"] = given["pool_socket"]
    if recall and not given["pool"]:
        name = option_of("pool_socket" if "socket" in recall else next(iter(recall)))
        raise ConfigError(f"{name} and --no-pool contradict each other")
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in _OWN_OPTIONS and not (name == _CONNECTOR and not given["pool"]):
            cure = f"; give {name} before --" if name in ("--host", "--port") else ""
            raise ConfigError(f"{name} cannot be given after --; kvrecall sets it itself{cure}")
    options = {n.replace("_", "-"): given[n] for n in _ENGINE if given[n] is not None}
    if (size := options.get(_MEMORY)) is not None:
        options[_MEMORY] = parse_size(str(size), f"--{_MEMORY}")
    key_file = given["api_key_file"]
    return ServeSpec(
        model=model or "",
        host=given["host"] or "",
        port=given["port"] or 0,
        options=options,
        extra_args=words,
        recall=recall if given["pool"] else None,
        limits=Limits(max_n=given["max_n"] or 0),
        role=given["role"],
        retrieval=given["retrieval"] or is_requested(os.environ),
        keys=() if key_file is None else read_keys(key_file, "--api-key-file"),
    )


def _recall(options: Mapping[str, object] | None, file: Path | None) -> Mapping[str, object] | None:
    """The pool's settings: ``options``, then those of ``file`` if given."""
    if options is None:
        if file is not None:
            raise ConfigError("--pool-config and --no-pool contradict each other")
        return None
    given, place = read_under(
        file, options, lambda key: "--pool-socket" if key == "socket" else option_of(key)
    )
    RecallSettings.from_mapping(given, place)
    return given


def check(plan: Plan) -> tuple[str, ...]:
    """Makes all checks that are possible before the engine is loaded. Changes nothing. Returns a
    warning for each part that will not work while the rest does. Raises ConfigError, TierError."""
    warnings, errors = checked(plan)
    if errors:
        raise errors[0]
    return warnings


def checked(plan: Plan, here: bool = True) -> tuple[tuple[str, ...], list[KvrecallError]]:
    """The warnings and the errors of ``check``. ``here``: also of what only the machine that is to
    serve knows: its version of vLLM, its memory and disk, its ports."""
    warnings: tuple[str, ...] = ()
    errors: list[KvrecallError] = []
    for attempt in _checks(plan, here):
        try:
            found = attempt()
            warnings += found if isinstance(found, tuple) else ()
        except KvrecallError as error:
            errors.append(error)
    return warnings, errors


def _checks(plan: Plan, here: bool) -> Iterator[Callable[[], object]]:
    from kvrecall.engines.vllm.compat.options import check_options, installed_options
    from kvrecall.engines.vllm.compat.versions import require_installed_version

    spec = plan.spec
    if here:
        yield require_installed_version
    yield lambda: check_options(spec.options, spec.extra_args, installed_options())
    collector = OPTION.removeprefix("--")
    endpoint = {**spec.options, **dict(vllm_options(spec.extra_args))}.get(collector)
    if endpoint is not None:
        yield partial(check_endpoint, str(endpoint))
    yield partial(_check_role, spec)
    if spec.retrieval:
        from kvrecall.attention.settings import RetrievalSettings  # imports torch

        yield partial(RetrievalSettings.from_environ, os.environ)
    yield partial(check_served, spec)
    yield partial(check_devices, spec)
    yield partial(_check_recall, spec, here)
    if here:
        for host, port in ((spec.host, spec.port), *((x.host, x.port) for x in spec.listeners)):
            yield partial(check_port, host, port)
        yield lambda: plan.check_reach(_has_key(spec))


def _check_recall(spec: ServeSpec, here: bool) -> tuple[str, ...]:
    settings = None if spec.recall is None else RecallSettings.from_mapping(spec.recall)
    if settings is None or settings.service is not None:  # it may start later, with its own pool
        return ()
    return check_pool(settings.pool, here)


def _check_role(spec: ServeSpec) -> None:
    recall = spec.recall
    alone = recall is None or (
        recall.get("backend", "embedded") == "embedded" and "remote" not in recall
    )
    if spec.role is not Role.BOTH and alone:
        raise ConfigError(
            f"--role {spec.role}: prefill and decode instances meet in a pool that both use; give "
            "them one with --pool-service (kvrecall pool serve), or a remote tier"
        )


def _has_key(spec: ServeSpec) -> bool:
    """Whether an API key is given, to kvrecall or to vLLM."""
    of_vllm = (value for name, value in vllm_options(spec.extra_args) if name == "api-key")
    return bool(spec.keys or os.environ.get(VLLM_KEY) or any(of_vllm))


def run(plan: Plan) -> int:
    """Checks ``plan`` and serves it; returns the exit status. Raises KvrecallError."""
    doubts = check(plan)
    _log_to_stderr()
    log.info("%s", plan.summary())
    for warning in (*plan.warnings, *doubts):
        log.warning("%s", warning)
    for note in plan.notes:
        log.info("%s", note)
    log.info("loading the engine")
    try:
        from kvrecall.engines.vllm.serving.app import serve
        from kvrecall.server.application import attach_all
        from kvrecall.server.connections import PromptProtocol
    except ModuleNotFoundError as error:
        raise EngineError(
            f"serving needs vLLM, and {error.name} is not installed here: pip install "
            "'kvrecall[cuda]', on a machine without a GPU 'kvrecall[cpu]'"
        ) from error

    return serve(plan.spec, partial(attach_all, plan=plan), PromptProtocol)


def _log_to_stderr() -> None:
    root = logging.getLogger("kvrecall")
    if root.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(asctime)s [kvrecall] %(message)s", "%m-%d %H:%M:%S")
    )
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False
