"""``kvrecall why``."""

from __future__ import annotations

import json
from typing import Annotated
from urllib.parse import quote

import typer

from kvrecall.errors import ExitStatus, KvrecallError

app = typer.Typer(add_completion=False)

_TIMEOUT_S = 10.0


@app.command()
def why(
    request_id: Annotated[
        str,
        typer.Argument(
            help="A reply's id (OpenAI routes), its header x-kvrecall-request, or an id of the "
            "dashboard.",
            show_default=False,
        ),
    ],
    url: Annotated[
        str, typer.Option(help="The server, or its management address if that is another.")
    ] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why a request's prompt, or the rest of it, was computed and not recalled.

    Asks the server, which remembers the last 4,096 requests.
    """
    import httpx

    try:
        reply = httpx.get(f"{url.rstrip('/')}/why/{quote(request_id)}", timeout=_TIMEOUT_S)
        answer = reply.json()
    except (httpx.HTTPError, httpx.InvalidURL, json.JSONDecodeError) as error:
        raise KvrecallError(
            f"no kvrecall server answers at {url}: {error}; name its address with --url"
        ) from error
    if reply.status_code != 200:
        typer.echo(answer.get("error", reply.text), err=True)
        raise typer.Exit(ExitStatus.FAILED)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    for request in answer["requests"]:
        split = ", ".join(f"{name} {tokens}" for name, tokens in request["split"].items() if tokens)
        typer.echo(f"{request['id']}: {request['prompt_tokens']} prompt tokens: {split or '-'}")
        typer.echo(f"  {request['why']}")
