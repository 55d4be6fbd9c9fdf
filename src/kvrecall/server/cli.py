"""``kvrecall serve``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.commands import take_options
from kvrecall.config import default_socket, help_of
from kvrecall.engines.base import MAX_N_LIMIT, Role
from kvrecall.errors import errors_shown


def _option(kind: Any, text: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """The type of a parameter that is an option."""
    return Annotated[kind, typer.Option(*names, help=text, rich_help_panel=panel, **more)]


_access, _pool, _engine = (partial(_option, panel=name) for name in ("Access", "Pool", "Engine"))

_PARAMETERS = {
    "model": Annotated[
        str | None, typer.Argument(help="Model folder or hub id.", show_default=False)
    ],
    "vllm_options": Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM_OPTIONS]", help="Any option of vllm serve, after --."),
    ],
    "config": _option(Path | None, "MindIE's config.json; options override it."),
    "host": _option(str | None, "Address to listen on. Default: 127.0.0.1."),
    "port": _option(int | None, "Port to listen on. Default: 8000.", min=1, max=65535),
    "api_key_file": _access(
        Path | None,
        "File of API keys, one per line, mode 0600: every route but health requires one of them. "
        "VLLM_API_KEY holds one, too.",
    ),
    "allow_unauthenticated": _access(
        bool,
        "Let other hosts generate without an API key or client certificates. Routes that show "
        "prompts or settings, or steer the server, stay closed to them.",
        "--allow-unauthenticated",
    ),
    "allowed_host": _access(
        list[str] | None,
        "Another host name of this server, for requests without an API key; repeatable.",
    ),
    "management": _access(
        str | None, "HOST:PORT of the management routes and the dashboard. Default: the server's."
    ),
    "metrics": _access(
        str | None, "HOST:PORT of /metrics, which needs no API key there. Default: the server's."
    ),
    "stop_by_get": _access(
        bool,
        "Let MindIE's GET /stopService stop the server, which needs no header: without an API key "
        "any program or old browser that follows a link to it can.",
        "--stop-by-get",
    ),
    "pool_config": _pool(
        Path | None, "pool.json with any setting of the pool; the options below override it."
    ),
    "host_size": _pool(str | None, help_of("host_size")),
    "disk_path": _pool(str | None, help_of("disk_path")),
    "disk_size": _pool(str | None, help_of("disk_size")),
    "disk_compression": _pool(str | None, help_of("disk_compression")),
    "encryption_key_file": _pool(str | None, help_of("encryption_key_file")),
    "async_write": _pool(bool | None, help_of("async_write"), "--async-write/--no-async-write"),
    "pool": _pool(bool, "Serve with a pool.", "--pool/--no-pool"),
    "pool_service": _pool(
        bool, "Use the pool of this node: kvrecall pool serve.", "--pool-service"
    ),
    "allow_plaintext": _pool(
        bool,
        "Allow a remote store that others can read, without an encryption key.",
        "--allow-plaintext",
    ),
    "pool_socket": _pool(str | None, f"Socket of the pool service. Default: {default_socket()}."),
    "role": _option(Role, "Role in prefill-decode disaggregation; see kvrecall router."),
    "retrieval": _engine(
        bool, "Decode long sequences by retrieval attention; see VLLM_RETRIEVAL_*.", "--retrieval"
    ),
    "block_size": _engine(int | None, "Tokens in a block. Default: 128.", min=1),
    "max_model_len": _engine(str | None, "Maximum tokens of a sequence."),
    "served_model_name": _engine(str | None, "Name in requests."),
    "dtype": _engine(str | None, "auto, bfloat16, float16, ..."),
    "kv_cache_dtype": _engine(str | None, "auto, fp8, ..."),
    "kv_cache_memory_bytes": _engine(
        str | None, "Device KV cache, e.g. 2GiB. On a CPU: a quarter of free memory, at most 4GiB."
    ),
    "enforce_eager": _engine(
        bool | None,
        "Do not compile the model. Default on a CPU.",
        "--enforce-eager/--no-enforce-eager",
    ),
    "otlp_traces_endpoint": _engine(
        str | None, "OTLP collector for spans of requests; see the page on traces."
    ),
    "max_n": _engine(
        int | None,
        "Maximum sequences of a request: n, best_of, beams. Default: 128.",
        min=1,
        max=MAX_N_LIMIT,
    ),
}
_DEFAULTS = {"pool": True, "role": Role.BOTH} | dict.fromkeys(
    "allow_unauthenticated stop_by_get pool_service allow_plaintext retrieval".split(), False
)  # None of the others: without them, a file's value or kvrecall's own


def serve(**given: Any) -> None:
    """Serve a model: OpenAI and MindIE/TGI routes, with recall from the pool."""
    with errors_shown():
        from kvrecall.server import launch  # imports the pool

        raise typer.Exit(launch.run(launch.plan_of(given)))


take_options(serve, {name: (kind, _DEFAULTS.get(name)) for name, kind in _PARAMETERS.items()})

app = typer.Typer(add_completion=False)
app.command(context_settings={"allow_interspersed_args": True})(serve)
