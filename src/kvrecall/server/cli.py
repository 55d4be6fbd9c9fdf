"""``kvrecall serve``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrecall.config import default_socket, help_of, option_of
from kvrecall.engines.base import DEFAULT_MAX_N, MAX_N_LIMIT, Limits, Role, ServeSpec
from kvrecall.errors import ConfigError, errors_shown

if TYPE_CHECKING:
    from kvrecall.server.plan import Plan

_POOL = "Pool"
_ACCESS = "Access"
_ENGINE = "Engine"


def _option(text: str, panel: str | None = None, *names: str, **bounds: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **bounds)


_Model = Annotated[str | None, typer.Argument(help="Model folder or hub id.", show_default=False)]
_Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- VLLM_OPTIONS]", help="Any option of vllm serve, after --."),
]
_Config = Annotated[Path | None, _option("MindIE's config.json; options override it.")]
_PoolConfig = Annotated[
    Path | None,
    _option("pool.json with any setting of the pool; the options below override it.", _POOL),
]
_Port = Annotated[int, _option("Port to listen on.", min=1, max=65535)]
_MaxN = Annotated[
    int,
    _option("Maximum sequences of a request: n, best_of, beams.", _ENGINE, min=1, max=MAX_N_LIMIT),
]
_AsyncWrite = Annotated[
    bool | None, _option(help_of("async_write"), _POOL, "--async-write/--no-async-write")
]
_Eager = Annotated[
    bool | None,
    _option(
        "Do not compile the model. Default on a CPU.", _ENGINE, "--enforce-eager/--no-enforce-eager"
    ),
]


def serve(
    context: typer.Context,
    model: _Model = None,
    vllm_options: _Words = None,
    config: _Config = None,
    host: Annotated[str, _option("Address to listen on.")] = "127.0.0.1",
    port: _Port = 8000,
    api_key_file: Annotated[
        Path | None,
        _option(
            "File with the API keys, one a line, of which every route but health needs one; mode "
            "0600. VLLM_API_KEY holds one, too.",
            _ACCESS,
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        _option(
            "Let other hosts generate without an API key or client certificates. Routes that show "
            "prompts or settings, or steer the server, stay closed to them.",
            _ACCESS,
            "--allow-unauthenticated",
        ),
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        _option(
            "Another name of this server in URLs, for requests without an API key; repeatable.",
            _ACCESS,
        ),
    ] = None,
    management: Annotated[
        str | None,
        _option(
            "HOST:PORT of the management routes and the dashboard. Default: the server's.", _ACCESS
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        _option(
            "HOST:PORT of /metrics, which needs no API key there. Default: the server's.", _ACCESS
        ),
    ] = None,
    stop_by_get: Annotated[
        bool,
        _option(
            "Let MindIE's GET /stopService stop the server, which needs no header: without an API "
            "key any program or old browser that follows a link to it can.",
            _ACCESS,
            "--stop-by-get",
        ),
    ] = False,
    pool_config: _PoolConfig = None,
    host_size: Annotated[str | None, _option(help_of("host_size"), _POOL)] = None,
    disk_path: Annotated[str | None, _option(help_of("disk_path"), _POOL)] = None,
    disk_size: Annotated[str | None, _option(help_of("disk_size"), _POOL)] = None,
    disk_compression: Annotated[str | None, _option(help_of("disk_compression"), _POOL)] = None,
    encryption_key_file: Annotated[
        str | None, _option(help_of("encryption_key_file"), _POOL)
    ] = None,
    async_write: _AsyncWrite = None,
    pool: Annotated[bool, _option("Serve with a pool.", _POOL, "--pool/--no-pool")] = True,
    pool_service: Annotated[
        bool, _option("Use the pool of this node: kvrecall pool serve.", _POOL, "--pool-service")
    ] = False,
    allow_plaintext: Annotated[
        bool,
        _option(
            "Allow a remote store that others can read, without an encryption key.",
            _POOL,
            "--allow-plaintext",
        ),
    ] = False,
    pool_socket: Annotated[
        str | None, _option(f"Socket of the pool service. Default: {default_socket()}.", _POOL)
    ] = None,
    role: Annotated[
        Role, _option("Role in prefill-decode disaggregation; see kvrecall router.")
    ] = Role.BOTH,
    retrieval: Annotated[
        bool,
        _option(
            "Decode long sequences by retrieval attention; see VLLM_RETRIEVAL_*.",
            _ENGINE,
            "--retrieval",
        ),
    ] = False,
    block_size: Annotated[
        int | None, _option("Tokens in a block. Default: 128.", _ENGINE, min=1)
    ] = None,
    max_model_len: Annotated[str | None, _option("Maximum tokens of a sequence.", _ENGINE)] = None,
    served_model_name: Annotated[str | None, _option("Name in requests.", _ENGINE)] = None,
    dtype: Annotated[str | None, _option("auto, bfloat16, float16, ...", _ENGINE)] = None,
    kv_cache_dtype: Annotated[str | None, _option("auto, fp8, ...", _ENGINE)] = None,
    kv_cache_memory_bytes: Annotated[
        str | None,
        _option("Device KV cache, e.g. 2GiB. Default on a CPU: a quarter of free memory.", _ENGINE),
    ] = None,
    enforce_eager: _Eager = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        _option("OTLP collector for spans of requests; see the page on traces.", _ENGINE),
    ] = None,
    max_n: _MaxN = DEFAULT_MAX_N,
) -> None:
    """Serve a model: OpenAI and MindIE/TGI routes, with recall from the pool."""
    with errors_shown():
        from kvrecall.server import launch  # imports the pool

        spec = _spec_of(context.params)
        plan = _plan_of(context, spec)
        plan = replace(
            plan,
            allowed_hosts=tuple(allowed_host or ()),
            allow_unauthenticated=allow_unauthenticated,
            stop_by_get=stop_by_get,
        )
        raise typer.Exit(launch.run(plan))


def _spec_of(given: dict[str, Any]) -> ServeSpec:
    """The server that the options ask for. Raises ConfigError."""
    from kvrecall.server.access import read_keys

    model, words = given["model"], tuple(given["vllm_options"] or ())
    if model is not None and model.startswith("-"):  # kvrecall serve -- --vllm-option
        words, model = (model, *words), None
    recall = _given(given, "host_size disk_path disk_size disk_compression")
    recall |= _given(given, "encryption_key_file async_write")
    if given["pool_service"] or given["pool_socket"]:
        recall["backend"] = "service"
    if given["pool_socket"]:
        recall["socket"] = given["pool_socket"]
    _refuse_odd(model, words, recall, given["pool"])
    key_file = given["api_key_file"]
    engine = _given(given, "block_size max_model_len served_model_name dtype kv_cache_dtype")
    engine |= _given(given, "kv_cache_memory_bytes enforce_eager otlp_traces_endpoint")
    return ServeSpec(
        model=model or "",
        host=given["host"],
        port=given["port"],
        options={name.replace("_", "-"): value for name, value in engine.items()},
        extra_args=words,
        recall=recall if given["pool"] else None,
        limits=Limits(max_n=given["max_n"]),
        role=given["role"],
        retrieval=given["retrieval"],
        keys=() if key_file is None else read_keys(key_file, "--api-key-file"),
    )


def _plan_of(context: typer.Context, spec: ServeSpec) -> Plan:
    """The plan of a model, or of MindIE's config.json. Raises ConfigError."""
    from kvrecall.server import launch
    from kvrecall.server.plan import Plane

    given = context.params
    pool_config, allow_plaintext = given["pool_config"], given["allow_plaintext"]
    planes = {Plane(name): text for name, text in _given(given, "management metrics").items()}
    if given["config"] is not None:
        if planes:
            raise ConfigError(
                f"--{min(planes)} and --config: the file says where the planes are "
                "(managementIpAddress, managementPort, metricsPort)"
            )
        named = {name for name in given if _from_command_line(context, name)}
        return launch.plan_file(given["config"], spec, named, pool_config, allow_plaintext)
    plan = launch.plan_model(spec, pool_config, allow_plaintext, planes)
    if not spec.model:
        typer.echo(
            f"kvrecall: no MODEL given: serving the example {plan.spec.model}, whose answers mean "
            "nothing. For your own: kvrecall serve MODEL",
            err=True,
        )
    return plan


def _refuse_odd(
    model: str | None, words: tuple[str, ...], recall: Mapping[str, object], pool: bool
) -> None:
    """Raises ConfigError for combinations that can only be mistakes."""
    if words and not words[0].startswith("-"):
        raise ConfigError(f"{words[0]!r} is unexpected; give one MODEL, then -- and vLLM's options")
    if model is not None and not model.strip():
        raise ConfigError(f"MODEL is {model!r}; name a model folder or a hub id")
    if recall and not pool:
        name = option_of("pool_socket" if "socket" in recall else next(iter(recall)))
        raise ConfigError(f"{name} and --no-pool contradict each other")


def _given(params: dict[str, Any], names: str) -> dict[str, Any]:
    return {name: params[name] for name in names.split() if params[name] is not None}


def _from_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


app = typer.Typer(add_completion=False)
app.command(context_settings={"allow_interspersed_args": True})(serve)
