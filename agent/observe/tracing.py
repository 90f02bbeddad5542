"""Spans of OpenTelemetry: what this agent did and when, in one trace for all agents of a job (docs/events.md#opentelemetry).

OpenTelemetry's own variables turn this on and say where the spans go; without its packages nothing happens. A thread of its own
imports them and sends the spans, so a collector that is slow or away never delays the job.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastirun.agent.observe import events
from elastirun.threads import NONE_LEFT, start_thread

TURN_ON = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}  # names of exporters, by OpenTelemetry's name of the protocol
MOST_WAITING = 10_000  # events that wait for a collector; what comes beyond is lost
SIGNALLED = range(129, 193)  # exit codes of an agent that a signal told to leave
LAST_SPANS = 3.0  # seconds at the end of the agent in which the last spans are sent


def exporter_name(environ: Mapping[str, str]) -> str:
    """Return the name under which the exporter is installed; empty: no spans are wanted. Pure."""
    name = environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or name == "none" or not any(map(environ.get, TURN_ON)):
        return ""
    protocol = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    return OTLP.get(protocol.strip(), protocol) if name == "otlp" else name


class NodeSpans:
    """Turns the events of one agent into spans: one for its life, and below it, one after the other, what it did."""

    def __init__(self, tracer: Any, environ: Mapping[str, str], at: int) -> None:
        """``tracer``: OpenTelemetry's. ``at``: when the agent began, nanoseconds since the epoch, as in all methods."""
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        carrier = {name.lower(): environ[name] for name in ("TRACEPARENT", "TRACESTATE") if name in environ}
        self._life = tracer.start_span("elastirun", TraceContextTextMapPropagator().extract(carrier), start_time=at)
        self._context = set_span_in_context(self._life)
        self._now = tracer.start_span("form a round", self._context, start_time=at)  # the span of what the agent does

    def take(self, event: events.Event, at: int) -> None:
        """Add an event to the span of what the agent does now, which it may end."""
        values = attributes(event)
        if isinstance(event, events.Round):
            self._begin("round", at, values)
        elif isinstance(event, events.Stop):
            if not event.planned:  # a worker failed, or a node was lost
                self._fail(self._now, event.reason)
            self._begin("stop", at, values)
        elif isinstance(event, events.Stopped):
            self._begin("form a round", at, {})
        elif isinstance(event, events.End):
            self._now.end(at)
            self._life.set_attributes(values)
            if event.code and not (event.outcome == "left" and event.code in SIGNALLED):
                self._fail(self._life, event.reason)
            self._life.end(at)
        else:
            self._now.add_event(event.kind, values, at)

    def _begin(self, name: str, at: int, values: Mapping[str, Any]) -> None:
        self._now.end(at)
        self._now = self._tracer.start_span(name, self._context, attributes=values, start_time=at)

    @staticmethod
    def _fail(span: Any, why: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, why))


def attributes(event: events.Event) -> dict[str, Any]:
    """Return the fields of an event that an attribute of a span can hold: numbers, texts, and lists of one of both. Pure."""
    found = {f"elastirun.{name}": list(value) if isinstance(value, tuple) else value for name, value in vars(event).items()}
    plain = (str, int, float)
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, plain) or (isinstance(value, list) and all(isinstance(one, plain) for one in value))
    }


class Tracing:
    """Hands events to a thread that sends them as spans.

    ``resource``: attributes of all spans. ``notice`` gets a line for people, in any thread.
    """

    def __init__(self, environ: Mapping[str, str], resource: Mapping[str, str], notice: Callable[[str], None]) -> None:
        self._environ, self._resource, self._notice = environ, resource, notice
        self._began = time.time()
        self._waiting: queue.Queue[tuple[events.Event, float] | None] = queue.Queue(MOST_WAITING)
        self._thread = start_thread("spans", self._run)
        if self._thread is None:
            notice(f"warning: no spans are sent to OpenTelemetry: {NONE_LEFT}")

    def take(self, event: events.Event, at: float) -> None:
        """Queue an event that happened at ``at``, seconds since the epoch."""
        if self._thread is not None and self._thread.is_alive() and not self._waiting.full():
            self._waiting.put_nowait((event, at))

    def close(self) -> None:
        """Send what is queued, for ``LAST_SPANS`` seconds at most."""
        if self._thread is not None and self._thread.is_alive() and not self._waiting.full():
            self._waiting.put_nowait(None)
            self._thread.join(LAST_SPANS)

    def _run(self) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        except ImportError:
            return  # the variables may be meant for the script alone
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(_FirstLine(self._notice))
        logger.propagate = False
        ids = trace_ids()
        try:
            exporter = load_exporter(exporter_name(self._environ))
            provider = TracerProvider(resource=Resource.create(dict(self._resource)), id_generator=ids, shutdown_on_exit=False)
        except Exception as error:  # a variable that OpenTelemetry does not understand
            self._notice(f"warning: no spans are sent to OpenTelemetry: {error}")
            return
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        spans, held = None, []  # events from before the first round: it tells whose trace they belong to
        while (item := self._waiting.get()) is not None:
            held.append(item)
            if spans is None and isinstance(item[0], (events.Round, events.End)):
                ids.store_id = item[0].fence.rpartition(":")[0] if isinstance(item[0], events.Round) else ""
                spans = NodeSpans(provider.get_tracer("elastirun"), self._environ, round(self._began * 1e9))
            if spans is not None:
                for event, at in held:
                    spans.take(event, round(at * 1e9))
                held.clear()
        provider.shutdown()


def trace_ids() -> Any:
    """Return what gives traces their ids: by its ``store_id`` the same to all agents of a job, without one a random id."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class OfJob(RandomIdGenerator):
        store_id = ""

        def generate_trace_id(self) -> int:
            known = int.from_bytes(hashlib.sha256(self.store_id.encode()).digest()[:16], "big")
            return known if self.store_id else super().generate_trace_id()

    return OfJob()


class _FirstLine(logging.Handler):
    """Hands the first warning of OpenTelemetry to people: a collector that is away gives one for each span."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notice, self._said = notice, False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            lines = record.getMessage().splitlines()
            self._notice(f"warning: OpenTelemetry: {lines[0][:300] if lines else record.name} (said once)")


def load_exporter(name: str) -> Any:
    """Return OpenTelemetry's exporter of that name. Raises LookupError, with the fix, where no installed package has it."""
    from importlib.metadata import entry_points  # slow, and needed where spans are sent alone

    found = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not found:
        package = f"opentelemetry-exporter-{name.replace('_', '-')}" if name.startswith("otlp") else "its package"
        raise LookupError(f"there is no exporter {name!r} (pip install {package})")
    return found[0].load()()


def begin(environ: Mapping[str, str], job: str, node: str, notice: Callable[[str], None]) -> Tracing | None:
    """Return what sends this agent's spans; None: the environment asks for none. ``notice``: see ``Tracing``."""
    if not exporter_name(environ):
        return None
    resource = {"elastirun.job": job, "host.name": node}
    if "OTEL_SERVICE_NAME" not in environ and "service.name=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        resource["service.name"] = "elastirun"
    return Tracing(environ, resource, notice)
