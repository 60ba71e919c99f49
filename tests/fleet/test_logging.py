"""What workers log: JSON lines that name the request, and the trace that it belongs to."""

from __future__ import annotations

import json
import logging
import signal
from typing import Any

import pytest
from support.lean.sites import sample
from support.terminals import Terminal, ended, wait_for_line

from leanq.client import LeanQClient
from leanq.errors import InvalidRequestError
from leanq.fleet import logging as logs
from leanq.lean.environment import Environment
from leanq.producer.request_builder import RequestBuilder
from leanq.queue.settings import Settings

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.slow
def test_a_line_for_each_request(terminal: Terminal, settings: Settings, core: Environment) -> None:
    terminal.use(settings)
    worker = terminal.start("worker", "--json", "--slots", "1")
    wait_for_line(worker.stderr, "serves")
    with LeanQClient(settings) as lean:
        traced = lean.check(sample("and_swap"), traceparent=TRACE)
        plain = lean.check(sample("wrong"))
        assert [future.result(60).verdict for future in (traced, plain)] == ["accepted", "rejected"]
        request_ids = [traced.request_id, plain.request_id]
    worker.send_signal(signal.SIGTERM)
    done = ended(worker)
    assert done.code == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.err.splitlines()]
    said = {line["request_id"]: line for line in lines if "verdict" in line}
    assert set(said) == set(request_ids)
    first = said[request_ids[0]]
    assert (first["verdict"], first["traceparent"], first["environment"]) == (
        *("accepted", TRACE),
        "default",
    )
    assert first["ran_s"] > 0
    assert first["worker"] == said[request_ids[1]]["worker"]
    assert first["attempt"] == said[request_ids[1]]["attempt"]
    assert "traceparent" not in said[request_ids[1]]


@pytest.mark.parametrize("trace", ["x", TRACE.upper(), TRACE + "-00", TRACE[:-1]])
def test_what_is_no_trace(settings: Settings, trace: str) -> None:
    with (
        LeanQClient(settings) as lean,
        pytest.raises(InvalidRequestError, match="not a traceparent"),
    ):
        lean.check("x", traceparent=trace)


def test_the_same_request_shares_a_run_wherever_it_is_traced_to(settings: Settings) -> None:
    calls = RequestBuilder(settings, "me")
    traced, plain = calls.check("x", {"traceparent": TRACE}), calls.check("x", {})
    assert traced.submission.digest == plain.submission.digest != ""
    assert traced.submission.body != plain.submission.body


def test_an_exception_stays_on_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        told = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("leanq", logging.ERROR, "", 1, "%s failed", ("it",), told)
    line = logs.JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line)["message"] == "it failed"
    assert "two\nlines" in json.loads(line)["exception"]
