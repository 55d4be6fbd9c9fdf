"""``kvrecall why``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from kvrecall.commands import Json
from kvrecall.environment import VLLM_KEY
from kvrecall.errors import KvrecallError, errors_shown

app = typer.Typer(add_completion=False)

_TIMEOUT_S = 10.0
_LONGEST = 16_384
"""Characters of an id in a URL: beyond what servers take in a header."""


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
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the server's API key; or VLLM_API_KEY.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say why a request's prompt, or the rest of it, was computed and not recalled.

    Asks the server, which remembers the last 4,096 requests.
    """
    import httpx

    from kvrecall.server.access import read_keys

    name = quote(request_id, safe="", errors="surrogateescape").replace(".", "%2E")  # ".." is one
    if len(name) > _LONGEST:
        raise KvrecallError(f"no request {request_id:.40}... anywhere: no id is that long")
    headers = {}
    with errors_shown():
        key = os.environ.get(VLLM_KEY)
        if api_key_file is not None:
            key = read_keys(api_key_file, "--api-key-file")[0]
        if key:
            headers = {"authorization": f"Bearer {key}"}
    try:
        reply = httpx.get(f"{url.rstrip('/')}/why/{name}", timeout=_TIMEOUT_S, headers=headers)
        answer = reply.json()
        content = answer["error"] if reply.status_code != 200 else answer["requests"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise KvrecallError(
            f"no kvrecall server answers at {url}: {error}; name its address with --url"
        ) from error
    if reply.status_code != 200:
        raise KvrecallError(content)
    if as_json:
        typer.echo(json.dumps(answer))
        return
    for request in content:
        split = ", ".join(f"{name} {tokens}" for name, tokens in request["split"].items() if tokens)
        typer.echo(f"{request['id']}: {request['prompt_tokens']} prompt tokens: {split or '-'}")
        typer.echo(f"  {request['why']}")
