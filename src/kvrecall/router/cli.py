"""``kvrecall router``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlsplit

import typer

from kvrecall.environment import API_KEY
from kvrecall.errors import ConfigError, errors_shown
from kvrecall.traces import check_endpoint

app = typer.Typer(add_completion=False)

_Urls = Annotated[
    list[str] | None,
    typer.Option(metavar="URL", help="A prefill instance; repeatable.", show_default=False),
]
_DecodeUrls = Annotated[
    list[str],
    typer.Option(metavar="URL", help="A decode instance; repeatable.", show_default=False),
]


@app.command()
def route(
    decode: _DecodeUrls,
    prefill: _Urls = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8100,
    prefill_min_tokens: Annotated[
        int, typer.Option(help="Shorter new prompts go directly to a decode instance.", min=0)
    ] = 256,
    imbalance: Annotated[
        int, typer.Option(help="Extra requests an instance may have and still be preferred.", min=0)
    ] = 4,
    retries: Annotated[
        int, typer.Option(help="Further instances tried for a request.", min=0, max=16)
    ] = 1,
    max_requests: Annotated[
        int, typer.Option(help="Maximum requests in flight; further ones get 503.", min=1)
    ] = 1000,
    timeout: Annotated[
        float, typer.Option(help="Maximum seconds between bytes of a reply.", min=1)
    ] = 600,
    api_key: Annotated[
        str | None, typer.Option(envvar=API_KEY, help="API key required of clients, passed on.")
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="OTLP collector for spans of completions.")
    ] = None,
) -> None:
    """Send prompts to prefill instances and the continuations to decode instances.

    The instances are servers of one model on one pool:

      kvrecall pool serve --host-size 8GiB
      kvrecall serve MODEL --port 8001 --pool-service --role prefill
      kvrecall serve MODEL --port 8002 --pool-service --role decode
      kvrecall router --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002
    """
    with errors_shown():
        prefill_urls, decode_urls = (
            instances(prefill or (), "--prefill"),
            instances(decode, "--decode"),
        )
        if both := set(prefill_urls) & set(decode_urls):
            raise ConfigError(f"{min(both)} is given for --prefill and for --decode")
        if f"http://{host}:{port}" in (*prefill_urls, *decode_urls):
            raise ConfigError(
                f"--port: {host}:{port} is the router's own address and an instance's; give the "
                "router another port"
            )
        try:
            import uvicorn

            from kvrecall.router.application import application
            from kvrecall.router.router import RouterSettings
            from kvrecall.server.preflight import check_port
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the router needs {error.name}; install it with: pip install 'kvrecall[router]'"
            ) from error
        check_port(host, port)
        if otlp_traces_endpoint is not None:
            check_endpoint(otlp_traces_endpoint)
    settings = RouterSettings(
        prefill=prefill_urls,
        decode=decode_urls,
        prefill_min_tokens=prefill_min_tokens,
        imbalance=imbalance,
        retries=retries,
        max_requests=max_requests,
        timeout_s=timeout,
        api_key=api_key,
        traces_endpoint=otlp_traces_endpoint,
    )
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
        limit_concurrency=max_requests + 200,
    )


def base_url(text: str, option: str) -> str:
    """``text``, a URL or ``host:port``, as a base URL without a path. Raises ConfigError."""
    is_url = "://" in text
    url = text if is_url else f"http://{text}"
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and parts.port != 0 and (is_url or parts.port is not None)
    except ValueError:
        named = False
    if not named or parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query:
        raise ConfigError(
            f"{option}: {text!r} is not an address of an instance; write for example "
            "http://10.0.0.5:8000"
        )
    return f"{parts.scheme}://{parts.netloc}"


def instances(texts: Sequence[str], option: str) -> tuple[str, ...]:
    """Base URLs of the instances given with ``option``. Raises ConfigError."""
    urls = tuple(base_url(text, option) for text in texts)
    twice = {url for url in urls if urls.count(url) > 1}
    if twice:
        raise ConfigError(f"{option}: {sorted(twice)[0]} is given twice")
    return urls
