"""``kvrecall router``."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from kvrecall.errors import ConfigError
from kvrecall.router.settings import RouterSettings, instances

app = typer.Typer(add_completion=False)

_Urls = Annotated[
    list[str] | None,
    typer.Option(metavar="URL", help="A prefill instance; several: repeat.", show_default=False),
]
_DecodeUrls = Annotated[
    list[str],
    typer.Option(metavar="URL", help="A decode instance; several: repeat.", show_default=False),
]


@app.command()
def route(
    decode: _DecodeUrls,
    prefill: _Urls = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8100,
    prefill_min_tokens: Annotated[
        int, typer.Option(help="Shorter new prompts go straight to a decode instance.", min=0)
    ] = 256,
    imbalance: Annotated[
        int, typer.Option(help="Requests an instance may be ahead and still be preferred.", min=0)
    ] = 4,
    retries: Annotated[
        int, typer.Option(help="Further instances tried for a request.", min=0, max=16)
    ] = 1,
    max_requests: Annotated[
        int, typer.Option(help="Under way at once; others: 503.", min=1)
    ] = 1000,
    timeout: Annotated[float, typer.Option(help="Seconds without a byte of a reply.", min=1)] = 600,
    api_key: Annotated[
        str | None, typer.Option(envvar="KVRECALL_API_KEY", help="Asked of clients, passed on.")
    ] = None,
) -> None:
    """Send prompts to prefill instances and the continuations to decode instances.

    The instances are servers of one model on one pool:

      kvrecall pool serve --host-size 8GiB
      kvrecall serve MODEL --port 8001 --pool-service --role prefill
      kvrecall serve MODEL --port 8002 --pool-service --role decode
      kvrecall router --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002
    """
    try:
        settings = RouterSettings(
            prefill=instances(prefill or (), "--prefill"),
            decode=instances(decode, "--decode"),
            prefill_min_tokens=prefill_min_tokens,
            imbalance=imbalance,
            retries=retries,
            max_requests=max_requests,
            timeout_s=timeout,
            api_key=api_key,
        )
        both = set(settings.prefill) & set(settings.decode)
        if both:
            raise ConfigError(f"{sorted(both)[0]} is given for --prefill and for --decode")
        _run(settings, host, port)
    except ConfigError as error:
        typer.echo(f"kvrecall: {error}", err=True)
        raise typer.Exit(2) from error


def _run(settings: RouterSettings, host: str, port: int) -> None:
    try:
        import uvicorn

        from kvrecall.router.application import application
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the router needs {error.name}; install it with: pip install 'kvrecall[router]'"
        ) from error
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    uvicorn.run(
        application(settings),
        host=host,
        port=port,
        access_log=False,
        log_level="info",
        log_config=None,
        timeout_graceful_shutdown=30,
        limit_concurrency=settings.max_requests + 200,
    )
