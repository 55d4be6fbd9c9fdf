"""From the options of a command to a running server: check, build the spec, run the engine."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from kvrecall.config import RecallSettings, option_of, parse_size
from kvrecall.engines.base import Role, ServeSpec
from kvrecall.environment import VLLM_KEY
from kvrecall.errors import ConfigError, EngineError
from kvrecall.jsonfile import read_under
from kvrecall.server.checks import check_model, check_pool, check_port
from kvrecall.server.plan import ENGINE_DEFAULTS, Plan, Plane, shared_listeners, vllm_options
from kvrecall.server.servable import check_served
from kvrecall.traces import OPTION, check_endpoint

log = logging.getLogger("kvrecall.server")

DEFAULT_MODEL = Path("models/recall-tiny")
_CONNECTOR = "--kv-transfer-config"
"""With --no-pool another project's connector may be given."""
_OWN_OPTIONS = ("--host", "--port", _CONNECTOR, "--uds", "--config", "--headless")


def plan_model(
    spec: ServeSpec,
    pool_config: Path | None = None,
    allow_plaintext: bool = False,
    planes: Mapping[Plane, str] | None = None,
) -> Plan:
    """The plan for ``kvrecall serve MODEL``: ``spec`` takes precedence over ``pool_config``, which
    takes precedence over the defaults. The default model is the repository's example. ``planes``:
    ``HOST:PORT`` of those with an address of their own. Raises ConfigError."""
    recall = _recall(spec.recall, pool_config)
    if allow_plaintext:
        recall = _allowing_plaintext(recall)
    options = {**ENGINE_DEFAULTS, **_engine_options(spec)}
    model = spec.model or default_model()
    listeners, homes = shared_listeners(
        {plane: _address(plane, text) for plane, text in (planes or {}).items()}, lambda _: spec.tls
    )
    spec = replace(spec, model=model, options=options, recall=recall, listeners=listeners)
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


def plan_file(
    file: Path,
    spec: ServeSpec,
    given: Collection[str],
    pool_config: Path | None = None,
    allow_plaintext: bool = False,
) -> Plan:
    """The plan for ``kvrecall serve --config FILE``. The options in ``given`` take precedence over
    the file; other values of ``spec`` are defaults. Raises ConfigError."""
    from kvrecall.server.mindie.planner import Beside, plan_config

    recall = spec.recall if pool_config is None else _recall(spec.recall, pool_config)
    beside = Beside(
        model=spec.model,
        host=spec.host if "host" in given else "",
        port=spec.port if "port" in given else 0,
        max_n=spec.limits.max_n if "max_n" in given else 0,
        options=_engine_options(spec),
        words=spec.extra_args,
        recall=recall,
        whole_pool=pool_config is not None,
        allow_plaintext=allow_plaintext,
    )
    plan = plan_config(file, beside)
    recall = plan.spec.recall
    if allow_plaintext:
        recall = _allowing_plaintext(recall)
    whole = replace(
        plan.spec, recall=recall, role=spec.role, retrieval=spec.retrieval, keys=spec.keys
    )
    return replace(plan, spec=whole)


def _engine_options(spec: ServeSpec) -> dict[str, object]:
    """vLLM's options in ``spec``, with typed values. Raises ConfigError for options after -- that
    kvrecall sets itself."""
    for word in spec.extra_args:
        name = word.partition("=")[0].replace("_", "-")
        if name in _OWN_OPTIONS and not (name == _CONNECTOR and spec.recall is None):
            cure = f"; give {name} before --" if name in ("--host", "--port") else ""
            raise ConfigError(f"{name} cannot be given after --; kvrecall sets it itself{cure}")
    options = dict(spec.options)
    memory = "kv-cache-memory-bytes"
    if memory in options:
        options[memory] = parse_size(str(options[memory]), f"--{memory}")
    return options


def _allowing_plaintext(recall: Mapping[str, object] | None) -> Mapping[str, object]:
    """The settings with plaintext traffic to the remote store allowed. Raises ConfigError if there
    is none."""
    remote = None if recall is None else recall.get("remote")
    if recall is None or not isinstance(remote, Mapping):
        raise ConfigError(
            "--allow-plaintext: this server's pool has no remote store; leave the option out. (The "
            "store of a pool service is allowed where it is set: allow_plaintext true in its "
            "remote settings.)"
        )
    return {**recall, "remote": {**remote, "allow_plaintext": True}}


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


def default_model() -> str:
    """The example model, if this runs from the repository. Raises ConfigError."""
    here = Path.cwd() / DEFAULT_MODEL
    repository = Path(__file__).resolve().parents[3] / DEFAULT_MODEL
    for folder in (here, repository):
        if (folder / "config.json").is_file():
            return str(folder)
    raise ConfigError("no MODEL given; name a model folder or a model id of the Hugging Face hub")


def check(plan: Plan) -> tuple[str, ...]:
    """Makes all checks that are possible before the engine is loaded. Changes nothing. Returns a
    warning for each part that will not work while the rest does.

    Raises ConfigError or TierError.
    """
    from kvrecall.engines.vllm.compat.options import check_options, installed_options
    from kvrecall.engines.vllm.compat.versions import require_installed_version

    require_installed_version()
    spec = plan.spec
    check_options(spec.options, spec.extra_args, installed_options())
    endpoint = _traces_endpoint(spec)
    if endpoint is not None:
        check_endpoint(endpoint)
    if spec.role is not Role.BOTH:
        _check_shared(spec)
    if spec.retrieval:
        from kvrecall.attention.settings import RetrievalSettings  # imports torch

        RetrievalSettings.from_environ(os.environ)
    found = check_settings(plan)
    for host, port in ((spec.host, spec.port), *((x.host, x.port) for x in spec.listeners)):
        check_port(host, port)
    plan.check_reach(_has_key(spec))
    return found


def check_settings(plan: Plan, here: bool = True) -> tuple[str, ...]:
    """Checks the model and the pool of a plan, as ``check`` does. ``here``: as in
    ``pool_findings``."""
    check_model(plan.spec.model)
    check_served(plan.spec)
    if plan.spec.recall is None:
        return ()
    settings = RecallSettings.from_mapping(plan.spec.recall)
    if settings.service is not None:  # it owns memory and disk, and may start later
        return ()
    return check_pool(settings.pool, here)


def _has_key(spec: ServeSpec) -> bool:
    """Whether an API key is given, to kvrecall or to vLLM."""
    of_vllm = (value for name, value in vllm_options(spec.extra_args) if name == "api-key")
    return bool(spec.keys or os.environ.get(VLLM_KEY) or any(of_vllm))


def _traces_endpoint(spec: ServeSpec) -> str | None:
    """The collector that spans go to, given before -- or after it."""
    found = {**spec.options, **dict(vllm_options(spec.extra_args))}.get(OPTION.removeprefix("--"))
    return None if found is None else str(found)


def _check_shared(spec: ServeSpec) -> None:
    """Raises ConfigError if prefill and decode instances would not share blocks."""
    recall = spec.recall
    if recall is None or (
        recall.get("backend", "embedded") == "embedded" and "remote" not in recall
    ):
        raise ConfigError(
            f"--role {spec.role}: prefill and decode instances meet in a pool that both use; give "
            "them one with --pool-service (kvrecall pool serve), or a remote tier"
        )


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
