"""Spans of a real agent at a real collector, and collectors that are not there."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from elastirun.agent.observe import tracing
from elastirun.agent.observe.events import CheckpointsHeld, End, Hang, Round
from elastirun.threads import NONE_LEFT
from tests.support.cluster import PATIENCE, Cluster

HTTP = "http://127.0.0.1:{}/v1/traces"
NAMED = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
SOMEWHERE = {NAMED: HTTP.format(4318)}


class Collector(ThreadingHTTPServer):
    """Keeps each span that it gets, with the attributes of its resource."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Take)
        self.spans: queue.SimpleQueue[tuple[Any, dict[str, Any]]] = queue.SimpleQueue()

    def up_to(self, name: str) -> list[Any]:
        """Wait for the span of that name; return all up to it."""
        found = [self.spans.get(timeout=PATIENCE)[0]]
        while found[-1].name != name:
            found.append(self.spans.get(timeout=PATIENCE)[0])
        return found


class Take(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for of_one in request.resource_spans:
            for span in (span for scope in of_one.scope_spans for span in scope.spans):
                self.server.spans.put((span, values(of_one.resource.attributes)))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_life_with_a_failure_and_a_signal_is_one_trace(nodes: Cluster, collector: Collector) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    nodes.env |= {NAMED: HTTP.format(collector.server_address[1]), "TRACEPARENT": f"00-{trace}-{parent}-01"}
    agent = nodes.launch(1, "--standalone", "--max-restarts=1", "--set=restart-pause=0", str(nodes.script))
    nodes.worker().tell("exit 3")
    nodes.worker()
    agent.send_signal(signal.SIGTERM)
    assert nodes.ends(agent) == 143
    *did, life = collector.up_to("elastirun")
    assert [span.name for span in did] == ["form a round", "round", "stop", "form a round", "round", "stop", "form a round"]
    assert {span.trace_id.hex() for span in (*did, life)} == {trace} and life.parent_span_id.hex() == parent
    assert {span.parent_span_id for span in did} == {life.span_id}
    assert [values(span.attributes).get("elastirun.round") for span in did] == [None, 1, 1, None, 2, 2, None]
    found = {event.name for span in did[1:4] for event in span.events}
    assert found == {"state", "worker_exit", "failure", "round_spent", "broken", "formed"}
    assert {event.name for event in did[4].events} == {"state", "signal"} and not did[4].status.code
    assert "exit code 3" in did[1].status.message and not life.status.code
    assert values(life.attributes)["elastirun.reason"] == "SIGTERM", "an agent that was told to leave is no error"
    moments = [life.start_time_unix_nano, *(moment for span in did for moment in (span.start_time_unix_nano, span.end_time_unix_nano))]
    assert moments == sorted(moments) and moments[-1] == life.end_time_unix_nano, "one follows the other, without a gap"


def test_the_agents_of_a_job_are_in_one_trace_and_those_of_another_job_in_another(nodes: Cluster, collector: Collector) -> None:
    nodes.env |= {NAMED: HTTP.format(collector.server_address[1])}
    nodes.env.pop("TRACEPARENT", None)
    found = []
    for _ in range(2):
        agents = [nodes.agent(i, nnodes="2") for i in (1, 2)]
        for worker in nodes.round(2):
            worker.tell("exit 0")
        assert [nodes.ends(agent) for agent in agents] == [0, 0]
        found.append([collector.up_to("elastirun")[-1] for _ in agents])
    (first, second), (third, fourth) = found
    assert first.trace_id == second.trace_id != third.trace_id == fourth.trace_id
    assert not first.parent_span_id and not second.parent_span_id and first.span_id != second.span_id


@pytest.mark.parametrize(("code", "ok"), [(143, True), (202, False)])
def test_a_node_that_leaves_because_it_is_sick_is_an_error(code: int, ok: bool) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.NodeSpans(provider.get_tracer("t"), {}, 0).take(End("left", "why", code), 1)
    assert exporter.get_finished_spans()[-1].status.is_ok is ok


def test_the_spans_say_whose_they_are(nodes: Cluster, collector: Collector) -> None:
    nodes.env |= {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}"}
    agent = nodes.launch(1, "--standalone", "--rdzv-id=job7", str(nodes.script))
    nodes.worker().tell("exit 0")
    assert nodes.ends(agent) == 0
    resource = collector.spans.get(timeout=PATIENCE)[1]
    assert (resource["service.name"], resource["elastirun.job"], resource["host.name"]) == ("elastirun", "job7", os.uname().nodename)


def test_a_collector_that_does_not_answer_delays_no_job(nodes: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nodes.env |= {NAMED: HTTP.format(silent.getsockname()[1])}
        agent = nodes.launch(1, "--standalone", "--max-restarts=1", "--set=restart-pause=0", str(nodes.script))
        nodes.worker().tell("exit 3")
        nodes.worker().tell("exit 0")  # the span of the first round waits for its answer meanwhile
        assert nodes.ends(agent, timeout=PATIENCE) == 0


def test_without_a_thread_for_spans_the_agent_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    said: list[str] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    made = tracing.begin(SOMEWHERE, "job7", "node0", said.append)
    assert made is not None
    made.take(End("succeeded", "", 0), 0.0)
    made.close()
    assert said == [f"warning: no spans are sent to OpenTelemetry: {NONE_LEFT}"]


class Hanging:
    """An exporter that does not answer before it is ``released``."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def export(self, spans: object) -> None:
        self.released.wait()

    def shutdown(self) -> None:
        pass


def test_the_last_spans_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Hanging()
    monkeypatch.setattr(tracing, "load_exporter", lambda name: exporter)
    monkeypatch.setattr(tracing, "LAST_SPANS", 0.1)
    made = tracing.begin(SOMEWHERE, "job7", "node0", print)
    assert made is not None
    made.take(End("failed", "a worker failed", 1), 0.0)
    late = threading.Timer(10.0, exporter.released.set)
    late.start()
    made.close()
    assert not exporter.released.is_set()
    late.cancel()
    exporter.released.set()
    made._thread.join()


def test_an_exporter_that_is_not_there_is_named_once(nodes: Cluster) -> None:
    nodes.env |= {"OTEL_TRACES_EXPORTER": "zipkin"}
    agent = nodes.launch(1, "--standalone", str(nodes.script))
    worker = nodes.worker()
    nodes.says(1, "warning: no spans are sent to OpenTelemetry: there is no exporter 'zipkin'")
    worker.tell("exit 0")
    assert nodes.ends(agent) == 0 and nodes.out(1).count("OpenTelemetry") == 1


def test_without_the_packages_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    said: list[str] = []
    made = tracing.begin(SOMEWHERE, "job7", "node0", said.append)
    assert made is not None
    made.close()
    assert said == []


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, ""),
        ({"PATH": "/bin"}, ""),
        (SOMEWHERE, "otlp_proto_http"),
        ({**SOMEWHERE, "OTEL_SDK_DISABLED": "True"}, ""),
        ({**SOMEWHERE, "OTEL_TRACES_EXPORTER": "none"}, ""),
        ({**SOMEWHERE, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "otlp_proto_grpc"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, "otlp_proto_http"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
    ],
)
def test_the_variables_of_opentelemetry_choose_the_exporter(environ: dict[str, str], name: str) -> None:
    assert tracing.exporter_name(environ) == name


def test_an_attribute_holds_what_opentelemetry_can_send() -> None:
    assert tracing.attributes(CheckpointsHeld(2, 10, 20)) == {"elastirun.images": 2, "elastirun.bytes": 10, "elastirun.limit": 20}
    assert "elastirun.formed_after" not in tracing.attributes(Round(1, "s:1", "first", 2, 4, 0, (0, 1), None))
    assert tracing.attributes(Hang(60.0, 30.0, [1], [{"rank": 1}])) == {
        "elastirun.seconds": 60.0,
        "elastirun.limit": 30.0,
        "elastirun.ranks": [1],
    }


def test_the_first_warning_of_opentelemetry_is_passed_on() -> None:
    said: list[str] = []
    handler = tracing._FirstLine(said.append)
    for text in ("refused\nTraceback", "refused again"):
        handler.emit(logging.LogRecord("opentelemetry", logging.WARNING, "", 0, text, (), None))
    assert said == ["warning: OpenTelemetry: refused (said once)"]


def test_the_page_names_each_span() -> None:
    page = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
    for name in ("elastirun", "form a round", "round", "stop"):
        assert f"| `{name}` |" in page
