"""``kvrecall router``."""

from __future__ import annotations

import gc
import logging
import os
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrecall.environment import API_KEY
from kvrecall.errors import ConfigError, errors_shown, hide
from kvrecall.traces import check_endpoint

if TYPE_CHECKING:
    from kvrecall.router.router import RouterSettings

_FILES = 1 << 16
_PUBLIC = re.compile("/v1/.*")  # what clients on other hosts may use while there is no key

app = typer.Typer(add_completion=False)


def _instances(what: str) -> Any:
    return typer.Option(metavar="URL", help=f"{what}; repeatable.", show_default=False)


@app.command()
def route(
    engine: Annotated[list[str] | None, _instances("An engine without a role")] = None,
    prefill: Annotated[list[str] | None, _instances("A prefill instance")] = None,
    decode: Annotated[list[str] | None, _instances("A decode instance")] = None,
    instances: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Instances, a line each ('engine URL', 'prefill URL', 'decode URL'); read again "
            "when it changes.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8100,
    prefill_min_tokens: Annotated[
        int, typer.Option(help="Shorter new prompts go directly to a decode instance.", min=0)
    ] = 256,
    imbalance: Annotated[
        int, typer.Option(help="Extra requests an instance may have and still be preferred.", min=0)
    ] = 4,
    retries: Annotated[
        int, typer.Option(help="Number of other instances to try if one fails.", min=0, max=16)
    ] = 1,
    max_requests: Annotated[
        int, typer.Option(help="Maximum requests in flight; further ones get 503.", min=1)
    ] = 1000,
    timeout: Annotated[
        float, typer.Option(help="Maximum seconds between bytes of a reply.", min=1)
    ] = 600,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File of API keys, one per line, mode 0600: every route but health requires one "
            f"of them, which the router passes on. {API_KEY} holds one, too.",
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option("--allow-unauthenticated", help="Let other hosts use /v1 without an API key."),
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Another name of this router in URLs, for requests without an API key; repeatable."
        ),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="OTLP collector for spans of completions.")
    ] = None,
) -> None:
    """Send each prompt to the engine that can answer first: by what it holds and what waits there.

    The engines are servers of one model. What they hold, the router reads from their KV events,
    where a URL says at which port (?events=5557, replay one port higher or events=5557/5600), and
    those of their node's pool service (pool=5601):

      kvrecall router --engine 'http://10.0.0.1:8000?events=5557' \\
        --engine 'http://10.0.0.2:8000?events=5557'

    With roles, prompts go to prefill instances and their continuations to decode instances:

      kvrecall pool serve --host-size 8GiB
      kvrecall serve MODEL --port 8001 --pool-service --role prefill
      kvrecall serve MODEL --port 8002 --pool-service --role decode
      kvrecall router --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002
    """
    given = {"--engine": engine, "--prefill": prefill, "--decode": decode}
    if instances is None and not any(given.values()):
        raise typer.BadParameter(
            "no instance is given; give --engine, --prefill and --decode, or --instances"
        )
    with errors_shown():
        try:
            import kvrecall.server.connections  # noqa: F401 - what is missing is named
            from kvrecall.router.addresses import Roster
            from kvrecall.router.router import RouterSettings
            from kvrecall.server.access import Access, check_reach, known_hosts, read_keys
            from kvrecall.server.checks import check_port
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the router needs {error.name}; install it with: pip install 'kvrecall[router]'"
            ) from error
        keys: tuple[str, ...] = ()
        if api_key_file is not None:
            keys = read_keys(api_key_file, "--api-key-file")
        elif key := os.environ.get(API_KEY, ""):
            hide(key)
            keys = (key,)
        settings = RouterSettings(
            roster=Roster(given, instances),
            prefill_min_tokens=prefill_min_tokens,
            imbalance=imbalance,
            retries=retries,
            max_requests=max_requests,
            timeout_s=timeout,
            access=Access(keys, known_hosts(allowed_host or (), host), public=_PUBLIC),
            traces_endpoint=otlp_traces_endpoint,
        )
        own = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if f"http://{own}" in [x.url for those in settings.roster.read() for x in those]:
            raise ConfigError(
                f"--port: {own} is the router's own address and an instance's; give the "
                "router another port"
            )
        check_reach("--host", host, bool(keys), allow_unauthenticated)
        check_port(host, port)
        if otlp_traces_endpoint is not None:
            check_endpoint(otlp_traces_endpoint)
    _run(settings, host, port)


def _run(settings: RouterSettings, host: str, port: int) -> None:
    import uvicorn

    from kvrecall.router.application import application
    from kvrecall.server.connections import PromptProtocol

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _allow_files()
    served = application(settings)
    gc.collect()
    gc.freeze()  # what is there for good is not looked through again, which took 20 ms each time
    gc.set_threshold(10_000, 20, 100)  # whole replies leave no circles, so little is found
    uvicorn.run(
        served,
        host=host,
        port=port,
        http=PromptProtocol,
        ws="none",
        proxy_headers=False,  # the guard reads them itself
        access_log=False,
        log_level="info",
        log_config=None,
        timeout_graceful_shutdown=30,
    )


def _allow_files() -> None:
    """As many open connections as the system allows: those without a request must not leave
    health without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
