"""What the server adds to vLLM's application: routes, bounds on bodies and links."""

from __future__ import annotations

from fastapi import FastAPI

from kvrecall.engines.base import Generator
from kvrecall.server import routes
from kvrecall.server.bounds import Bounds
from kvrecall.server.plan import Plan


def attach_all(app: FastAPI, generator: Generator, plan: Plan) -> None:
    """Adds everything of kvrecall's to ``app`` before its first request."""
    routes.attach(app, generator)
    app.add_middleware(
        Bounds, owner=app, max_body_bytes=plan.max_body_bytes, max_links=plan.max_links
    )
