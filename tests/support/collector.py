"""A real collector of OTLP spans on loopback, as far as tests need one: by gRPC and by HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


@dataclass(frozen=True)
class Span:
    """A span as it arrived. Ids in hexadecimal; times in nanoseconds since the epoch."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    began: int
    ended: int
    attributes: dict[str, Any]
    events: dict[str, int]
    resource: dict[str, Any]


def _plain(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in pairs}


@dataclass
class Spans:
    """What has arrived, in any order."""

    all: list[Span] = field(default_factory=list)

    def take(self, request: Any) -> None:
        for of_process in request.resource_spans:
            resource = _plain(of_process.resource.attributes)
            for scope in of_process.scope_spans:
                for span in scope.spans:
                    self.all.append(
                        Span(
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                            span.kind,
                            span.start_time_unix_nano,
                            span.end_time_unix_nano,
                            _plain(span.attributes),
                            {event.name: event.time_unix_nano for event in span.events},
                            resource,
                        )
                    )

    def named(self, name: str) -> list[Span]:
        return [span for span in self.all if span.name == name]

    def of_trace(self, trace: str) -> list[Span]:
        """In the order in which they began, the longest first."""
        return sorted((s for s in self.all if s.trace == trace), key=lambda s: (s.began, -s.ended))

    def wait(self, seen: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < end, sorted(span.name for span in self.all)
            time.sleep(0.05)


class _Servicer(service.TraceServiceServicer):
    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def Export(self, request: Any, context: Any) -> Any:
        self._spans.take(request)
        return messages.ExportTraceServiceResponse()


@contextmanager
def by_grpc() -> Iterator[tuple[str, Spans]]:
    """Endpoint and spans of a collector."""
    spans = Spans()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    service.add_TraceServiceServicer_to_server(_Servicer(spans), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", spans
    finally:
        server.stop(None)


@contextmanager
def by_http() -> Iterator[tuple[str, Spans]]:
    """Endpoint and spans of a collector whose clients use ``http/protobuf``."""
    spans = Spans()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                import gzip

                body = gzip.decompress(body)
            spans.take(messages.ExportTraceServiceRequest.FromString(body))
            answer = messages.ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans
    finally:
        server.shutdown()
        server.server_close()
