"""The router's spans: one for each completion, one within it for each call of an instance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvrecall.traces import end_provider, headers_of, parent_of, provider_at

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer
    from starlette.requests import Request


class CompletionSpan:
    """The span of a completion that has begun."""

    def __init__(self, tracer: Tracer, headers: Mapping[str, str], path: str) -> None:
        """``headers``: the client's; they may name its own span."""
        from opentelemetry.trace import SpanKind

        self._tracer = tracer
        self._span: Span = tracer.start_span(
            "kvrecall.route", parent_of(headers), SpanKind.SERVER, {"url.path": path}
        )

    @contextmanager
    def call(
        self, role: str, instance: str, headers: Mapping[str, str]
    ) -> Iterator[Mapping[str, str]]:
        """A call of an instance; the headers for it, by which the instance's spans become children
        of this one. It ends with the whole reply, or with the first event of a stream."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        with self._tracer.start_as_current_span(
            f"kvrecall.route.{role}",
            set_span_in_context(self._span),
            SpanKind.CLIENT,
            {"kvrecall.route.instance": instance},
        ) as span:
            yield {**headers, **headers_of(span.get_span_context())}

    def answered(self, status: int) -> None:
        """The status of the reply is known."""
        self._span.set_attribute("http.response.status_code", status)

    def end(self) -> None:
        """The reply has ended."""
        self._span.end()


class RouterTraces:
    """Where the router's spans go; nothing without an ``endpoint``."""

    def __init__(self, endpoint: str | None) -> None:
        self._provider = None if endpoint is None else provider_at(endpoint, "router")

    def begin(self, request: Request) -> CompletionSpan | None:
        """A completion arrived; None where nothing is traced."""
        if self._provider is None:
            return None
        tracer = self._provider.get_tracer("kvrecall")
        return CompletionSpan(tracer, request.headers, request.scope["path"])

    def close(self) -> None:
        """Sends the spans that have ended."""
        if self._provider is not None:
            end_provider(self._provider)
