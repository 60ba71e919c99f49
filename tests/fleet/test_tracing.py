"""Traces: off unless asked for, whole from the call to the reply, and never waited for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.campaigns.campaigns import Desk, stop_worker
from support.cluster import free_ports
from support.fleets import Recorder, until
from support.gateway.receivers import PHOENIX, Receiver, Seen, StandIn, phoenix, stand_in
from support.terminals import Terminal, ended, wait_for_line

from leanq.fleet.tracing import is_asked_for, is_sampled, why_not
from leanq.queue.settings import Settings

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TEXT = "theorem t (p q : Prop) (hp : p) (hq : q) : p ∧ q := ⟨hp, hq⟩"
# It runs for some seconds.
LONG = """set_option maxRecDepth 1000000
def count : Nat → Nat → Nat
  | 0, a => a + 1
  | n + 1, a => count n (count n a)
theorem t : count 14 0 = 16384 := by decide
"""
PHASES = {"waited", "claimed", "elaborated", "judged", "reply"}
# It has set up OpenTelemetry itself, as a trainer may, and its reward has a span.
CHECK = """
import sys
import time
from leanq import LeanQClient
from leanq.queue.settings import Settings
if sys.argv[3:]:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    with LeanQClient() as lean, trace.get_tracer("trainer").start_as_current_span("reward"):
        print(lean.check(sys.argv[1]).result(60).verdict)
else:
    with LeanQClient() as lean:
        futures = [lean.check(sys.argv[1])]
        if sys.argv[2] == "twice":
            while not futures[0].running():
                assert not futures[0].done()
                time.sleep(0.01)
            futures.append(lean.check(sys.argv[1]))
        print(*(future.result(60).verdict for future in futures))
print("opentelemetry.exporter" in sys.modules)
"""
# A trainer's own sampler, which keeps the spans of clients alone.
PICKY = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
class Picky(Sampler):
    def should_sample(self, context, trace_id, name, kind, *args, **kwargs):
        keeps = kind is trace.SpanKind.CLIENT
        return SamplingResult(Decision.RECORD_AND_SAMPLE if keeps else Decision.DROP)
    def get_description(self):
        return "picky"
trace.set_tracer_provider(TracerProvider(Picky()))
from leanq import LeanQClient
with LeanQClient() as lean:
    print(lean.echo(b"a").result(60))
"""
IN_A_POOL = """
import sys
from leanq import Pool
with Pool(slots=1) as lean:
    print(lean.check(sys.argv[1]).result(60).verdict)
"""
ECHOES = """
import sys, time
from leanq import LeanQClient
from leanq.queue.metrics import COUNTS
with LeanQClient() as lean:
    lean.echo(b"").result(60)
    began = time.monotonic()
    for future in [lean.echo(b"%d" % n) for n in range(200)]:
        future.result(60)
    took = time.monotonic() - began
dropped = sum(n for name, n in COUNTS.items() if name[0] == "leanq_spans_dropped_total")
print(dropped, took)
"""


# Variables


@pytest.mark.parametrize(
    ("environ", "asked", "why"),
    [
        ({}, False, ""),
        ({"OTEL_SERVICE_NAME": "x"}, False, ""),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, True, ""),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x"}, True, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True, ""),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False, ""),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False, ""),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, True, "by 'otlp' alone"),
        (
            {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            True,
            "'http/protobuf' alone",
        ),
        (
            {
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            },
            True,
            "",
        ),
    ],
)
def test_the_standard_variables_ask_for_traces(
    environ: Mapping[str, str], asked: bool, why: str
) -> None:
    assert is_asked_for(environ) == asked
    found = why_not(environ) if asked else ""
    assert why in found
    assert bool(why) == bool(found)


@pytest.mark.parametrize(("flags", "sampled"), [("00", False), ("01", True), ("03", True)])
def test_the_trace_context_says_whether_it_is_sampled(flags: str, sampled: bool) -> None:
    assert is_sampled(f"00-{TRACE}-{SPAN}-{flags}") == sampled
    assert not is_sampled("")


def client_of(settings: Settings, program: str, *words: str, **environ: str) -> list[str]:
    """The lines that a Python with a client of this queue prints."""
    queue = {"LEANQ_URL": settings.url, "LEANQ_PREFIX": settings.prefix}
    asked = {**os.environ, **queue, **environ}
    command = [sys.executable, "-W", "error", "-c", program, *words]
    done = subprocess.run(command, env=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_without_them_nothing_is_imported_and_nothing_sent(
    fleet: Settings, receiver: StandIn
) -> None:
    assert client_of(fleet, CHECK, TEXT, "once") == ["accepted", "False"]
    assert receiver.spans() == []


# Whole traces


@pytest.fixture
def receiver() -> Iterator[StandIn]:
    with stand_in() as made:
        yield made


@pytest.fixture(params=["stand-in", "phoenix"])
def any_receiver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Receiver]:
    if request.param == "stand-in":
        with stand_in() as made:
            yield made
        return
    if not os.environ.get(PHOENIX):
        pytest.skip(f"{PHOENIX} names no program phoenix; make otel-test does")
    with phoenix(tmp_path) as real:
        yield real


def asks_for(receiver: Receiver, **more: str) -> dict[str, str]:
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        **more,
    }


def a_worker(terminal: Terminal, settings: Settings) -> Any:
    terminal.use(settings)
    worker = terminal.start("worker", "--slots", "1")
    wait_for_line(worker.stderr, "serves")
    return worker


def ends_well(*processes: Any) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert ended(process).code == 0


def below(spans: list[Seen], top: Seen) -> set[str]:
    """The names of all spans below one."""
    found: set[str] = set()
    for each in spans:
        if each.parent == top.span:
            found |= {each.name, *below(spans, each)}
    return found


def whole_trace(receiver: Receiver, trace_id: str, top: str) -> list[Seen]:
    """The spans of a trace, once the span ``top`` and all that has to be below it are there."""
    spans: list[Seen] = []

    def is_whole() -> bool:
        nonlocal spans
        spans = [each for each in receiver.spans() if trace_id in ("", each.trace)]
        tops = [each for each in spans if each.name == top]
        wanted = PHASES | {"check default", "send default", "process default"} - {top}
        return any(wanted <= below(spans, each) for each in tops)

    until(is_whole, 60.0)
    return spans


@pytest.mark.slow
def test_one_trace_from_the_callers_span_to_the_reply(
    terminal: Terminal, settings: Settings, any_receiver: Receiver
) -> None:
    environ = asks_for(any_receiver)
    worker = a_worker(terminal, settings)
    said = client_of(settings, CHECK, TEXT, "once", "in a trainer's span", **environ)
    assert said == ["accepted", "True"]
    spans = whole_trace(any_receiver, "", "reward")
    assert len({each.trace for each in spans}) == 1
    (process,) = (each for each in spans if each.name == "process default")
    about = process.attributes
    assert about["messaging.system"] == "leanq"
    assert about["messaging.operation.type"] == "process"
    assert about["messaging.destination.name"] == "default"
    assert about["messaging.message.id"].startswith("0-")
    assert about["leanq.verdict"] == "accepted"
    assert not any(each.failed for each in spans)
    ends_well(worker)


@pytest.mark.slow
def test_one_trace_through_the_gateway(
    terminal: Terminal, settings: Settings, any_receiver: Receiver
) -> None:
    environ = asks_for(any_receiver)
    worker = a_worker(terminal, settings)
    (port,) = free_ports(1)
    gateway = terminal.start("serve", "--port", str(port), environ=environ)
    wait_for_line(gateway.stderr, "the gateway is at")
    url = f"http://127.0.0.1:{port}/v1/check"
    given = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    answer = httpx2.post(url, json={"code": TEXT}, headers=given, timeout=60.0)
    assert answer.json()["verdict"] == "accepted"
    spans = whole_trace(any_receiver, TRACE, "POST /v1/check")
    (served,) = (each for each in spans if each.name == "POST /v1/check")
    assert served.parent == SPAN
    assert served.attributes["http.response.status_code"] == 200
    # A caller that does not sample decides for all others.
    quiet = {"traceparent": f"00-{SPAN * 2}-{SPAN}-00"}
    httpx2.post(url, json={"code": TEXT}, headers=quiet, timeout=60.0)
    ends_well(worker, gateway)
    assert SPAN * 2 not in {each.trace for each in any_receiver.spans()}


@pytest.mark.slow
def test_requests_that_share_a_run_are_linked(
    terminal: Terminal, settings: Settings, receiver: StandIn
) -> None:
    worker = a_worker(terminal, settings)
    said = client_of(settings, CHECK, LONG, "twice", **asks_for(receiver))
    assert said[0] == "accepted accepted"
    ends_well(worker)
    spans = receiver.spans()
    assert {each.service for each in spans} == {"leanq-client"}
    (joined,) = (each for each in spans if each.links)
    checks = {each.trace: each for each in spans if each.name == "check default"}
    assert (len(checks), joined.trace in checks) == (2, True)
    (sent,) = (each for each in spans if each.name == "send default" and each.trace != joined.trace)
    assert joined.links == (sent.span,)
    # The phases follow one another, and fill the time from the claim, or from one's own submit.
    for process in (each for each in spans if each.name == "process default"):
        parts = sorted(
            (each.start_ns, each.end_ns) for each in spans if each.parent == process.span
        )
        assert parts[0][0] == process.start_ns
        assert all(end == start for (_, end), (start, _) in pairwise(parts))
        assert parts[-1][1] == process.end_ns


@pytest.mark.slow
def test_each_text_of_a_campaign_is_a_trace(
    desk: Desk, driver: Recorder, receiver: StandIn
) -> None:
    # RQ ends the coordinator's process at once, long before a batch would be due.
    desk.terminal.environ |= asks_for(receiver, OTEL_BSP_SCHEDULE_DELAY="60000")
    worker = desk.start_worker()
    sent = desk.send("a", "b")
    desk.reaches(sent, "finished")
    stop_worker(worker)
    checks = [each for each in receiver.spans() if "leanq.campaign" in each.attributes]
    assert [each.attributes["leanq.campaign"] for each in checks] == [sent, sent]
    assert len({each.trace for each in checks}) == 2


@pytest.mark.slow
def test_a_pool_has_the_spans_of_its_caller(settings: Settings, receiver: StandIn) -> None:
    assert client_of(settings, IN_A_POOL, TEXT, **asks_for(receiver)) == ["accepted"]
    (check,) = (each for each in receiver.spans() if each.name == "check default")
    (sent,) = (each for each in receiver.spans() if each.name == "send default")
    assert (sent.trace, sent.parent) == (check.trace, check.span)
    assert check.attributes["leanq.verdict"] == "accepted"


# Sampled, dropped


@pytest.mark.slow
def test_what_is_not_sampled_leaves_no_span(
    terminal: Terminal, settings: Settings, receiver: StandIn
) -> None:
    never = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}
    worker = a_worker(terminal, settings)
    assert client_of(settings, CHECK, TEXT, "once", **asks_for(receiver, **never))[0] == "accepted"
    ends_well(worker)
    assert receiver.spans() == []


@pytest.mark.slow
@pytest.mark.parametrize("silent", [True, False])
def test_a_receiver_that_takes_nothing_delays_nothing(
    terminal: Terminal, settings: Settings, silent: bool
) -> None:
    terminal.use(settings)
    worker = terminal.start("worker", "--slots", "1", "--driver", "echo")
    wait_for_line(worker.stderr, "serves")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        if silent:
            # Connections are taken, and never answered.
            nobody.listen()
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{nobody.getsockname()[1]}",
            "OTEL_BSP_MAX_QUEUE_SIZE": "16",
            "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        (line,) = client_of(settings, ECHOES, **environ)
    dropped, took_s = (float(word) for word in line.split())
    # More than three spans for each echo, and 16 at most wait.
    assert dropped >= 3 * 200 - 16
    # One batch would take three seconds to be given up.
    assert took_s < 3.0
    ends_well(worker)


@pytest.mark.slow
def test_a_sampler_may_keep_a_part_of_a_trace(terminal: Terminal, settings: Settings) -> None:
    terminal.use(settings)
    worker = terminal.start("worker", "--slots", "1", "--driver", "echo")
    wait_for_line(worker.stderr, "serves")
    assert client_of(settings, PICKY, OTEL_TRACES_EXPORTER="otlp") == ["b'a'"]
    ends_well(worker)


def test_why_nothing_is_sent_is_said(settings: Settings) -> None:
    said = client_of(settings, "import leanq.fleet.tracing as t; print(t.tracer())")
    assert said == ["None"]
    asked = {**os.environ, "OTEL_TRACES_EXPORTER": "zipkin"}
    program = "import leanq.fleet.tracing as t; print(t.tracer())"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=asked, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert "no traces are sent: OTEL_TRACES_EXPORTER is 'zipkin'" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("OTEL_BSP_MAX_QUEUE_SIZE", "100", "max_export_batch_size must be less than"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many", "invalid literal for int() with base 10: 'many'"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "-1", "OTEL_SPAN_EVENT_COUNT_LIMIT must be"),
    ],
)
def test_a_variable_that_opentelemetry_refuses_costs_the_traces_alone(
    name: str, value: str, why: str
) -> None:
    asked = {**os.environ, "OTEL_TRACES_EXPORTER": "otlp", name: value}
    program = "import leanq.fleet.tracing as t; print(t.tracer())"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=asked, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "None\n")
    assert f"no traces are sent: OpenTelemetry refuses its variables: {why}" in done.stderr
