"""Further addresses beside vLLM's own: each a uvicorn server in the same event loop."""

from __future__ import annotations

import asyncio
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI
from vllm.entrypoints.launchers.launcher import NoSignalServer, create_server_socket

from kvrecall.engines.base import Listener
from kvrecall.errors import EngineError

_LAST_BYTES_S = 2  # for connections to take what was sent before the server ends


def bound(listeners: Sequence[Listener]) -> dict[str, socket.socket]:
    """A bound socket for each, by its name, so that the addresses are taken.

    Raises EngineError, with nothing left open.
    """
    sockets: dict[str, socket.socket] = {}
    for listener in listeners:
        try:
            sockets[listener.name] = create_server_socket(
                (listener.host, listener.port), reuse_port=False
            )
        except OSError as error:
            close(sockets)
            where = f"{listener.host}:{listener.port} ({listener.name})"
            raise EngineError(f"cannot listen on {where}: {error.strerror}") from error
    return sockets


def close(sockets: Mapping[str, socket.socket]) -> None:
    for sock in sockets.values():
        sock.close()


@asynccontextmanager
async def serving(
    listeners: Sequence[Listener],
    sockets: Mapping[str, socket.socket],
    apps: Mapping[str, FastAPI],
    args: Namespace,
) -> AsyncIterator[None]:
    """Serves ``apps`` on their listeners; they are stopped on leaving."""
    servers = [NoSignalServer(_config(each, apps[each.name], args)) for each in listeners]
    tasks = []
    for listener, server in zip(listeners, servers, strict=True):
        apps[listener.name].state.server = server
        tasks.append(asyncio.create_task(server.serve(sockets=[sockets[listener.name]])))
    try:
        yield
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)


def _config(listener: Listener, app: FastAPI, args: Namespace) -> uvicorn.Config:
    """Loaded, so that it fails here and not in a task."""
    tls = listener.tls
    config = uvicorn.Config(
        app,
        host=listener.host,
        port=listener.port,
        lifespan="off",
        log_config=None,  # that of vLLM's own listener is for all
        log_level=args.uvicorn_log_level,
        access_log=False,
        timeout_graceful_shutdown=_LAST_BYTES_S,
        ssl_context_factory=None if tls is None else lambda *_: tls.context(),
    )
    config.load()
    return config
