"""Traces by OpenTelemetry: where spans go, and the request headers that join them to others.

OpenTelemetry is imported only where a traces endpoint is set: nothing here costs anything, and
nothing needs to be installed, without one.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from kvrecall.environment import TRACES_PROTOCOL
from kvrecall.errors import ConfigError, hidden, hide
from kvrecall.secret import refuse_open

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanContext

OPTION = "--otlp-traces-endpoint"
"""vLLM's option and ours."""

HEADERS = ("traceparent", "tracestate")
"""W3C's request headers that name the trace and the span of the caller."""

FLUSH_S = 2.0
"""Longest wait at the end for spans to reach the collector."""

REQUEST_ID = "gen_ai.request.id"
"""Attribute with the request's id, as vLLM names it in its own span."""

_PACKAGES = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError if spans cannot be sent to ``endpoint``: no collector is asked."""
    protocol = os.environ.get(TRACES_PROTOCOL, "grpc")
    package = _PACKAGES.get(protocol)
    if package is None:
        raise ConfigError(
            f"{TRACES_PROTOCOL} is {protocol!r}; allowed: {', '.join(_PACKAGES)} "
            f"({OPTION} is {endpoint!r})"
        )
    try:
        missing = None if find_spec(package) and find_spec("opentelemetry.sdk") else package
    except ModuleNotFoundError as error:
        missing = error.name
    if missing is not None:
        raise ConfigError(
            f"{OPTION} is {endpoint!r}, and {missing} is not installed here; "
            "pip install 'kvrecall[traces]'"
        )
    refuse_open(endpoint, OPTION, "set OTEL_EXPORTER_OTLP_HEADERS, and leave it out here")
    given = endpoint if "://" in endpoint or protocol != "grpc" else f"http://{endpoint}"
    try:
        parts = urlsplit(given)
        known = bool(parts.hostname) and (given == endpoint or bool(parts.port))
    except ValueError:
        known = False
    if not known or parts.scheme not in ("http", "https"):
        raise ConfigError(
            f"{OPTION} is {endpoint!r}; write the URL of an OTLP collector, for example "
            "http://127.0.0.1:4317, or with "
            f"{TRACES_PROTOCOL}=http/protobuf http://127.0.0.1:4318/v1/traces"
        )


def provider_at(endpoint: str, part: str) -> TracerProvider:
    """A provider of its own, whose spans go to ``endpoint`` in batches, from a thread. ``part``:
    the part of kvrecall that makes them. The exporter and its protocol are as vLLM's, and so is
    every ``OTEL_`` variable; what the thread cannot send in time is dropped, never waited for."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    exporter: SpanExporter
    _hide_headers()
    if os.environ.get(TRACES_PROTOCOL, "grpc") == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True)
    else:
        from opentelemetry.exporter.otlp.proto.http import trace_exporter

        exporter = trace_exporter.OTLPSpanExporter(endpoint=endpoint)
    resource = Resource.create({"kvrecall.part": part, "process.pid": os.getpid()})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _hide_headers() -> None:
    """Exporters log a collector's answer, which may repeat the headers that it was sent."""
    for variable in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"):
        for header in os.environ.get(variable, "").split(","):
            value = unquote(header.partition("=")[2].strip())
            for secret in (value, value.rpartition(" ")[2]):
                hide(secret)
    for module in ("proto.grpc.exporter", "proto.http.trace_exporter", "common.http"):
        logging.getLogger(f"opentelemetry.exporter.otlp.{module}").addFilter(_without_secrets)


def _without_secrets(record: logging.LogRecord) -> bool:
    record.msg, record.args, record.exc_info = hidden(record.getMessage()), (), None
    return True


def end_provider(provider: TracerProvider) -> None:
    """Sends what has ended. Does not wait longer than FLUSH_S for a collector that is away."""
    ending = threading.Thread(target=provider.shutdown, daemon=True)
    ending.start()
    ending.join(FLUSH_S)


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of a request's headers that join traces; names in lower case."""
    return {name: headers[name] for name in HEADERS if name in headers}


def parent_of(headers: Mapping[str, str] | None) -> Context:
    """The caller's span by a request's headers; empty without a valid one: then a trace begins,
    whatever span is current here. (vLLM forks its engine within the span of its own start.)"""
    from opentelemetry.context import Context
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract(headers or {}, Context())
    return context if get_current_span(context).get_span_context().is_valid else Context()


def headers_of(span: SpanContext) -> dict[str, str]:
    """The request headers by which another process makes ``span`` the parent of its own."""
    flags = f"{int(span.trace_flags):02x}"
    state = span.trace_state.to_header()
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{flags}"
    return {"traceparent": parent, **({"tracestate": state} if state else {})}
