"""Requests that are made to break the gateway: each gets an answer that says what is wrong."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from leanq.gateway.access import Access
from leanq.gateway.app import make_app
from leanq.gateway.client import GatewayClient

Ask = Callable[[str, bytes, str], httpx2.Response]

# Of all routes that read a body, and what is no field of any.
FIELDS = (
    *("snippets", "codes", "id", "custom_id", "code", "proof", "timeout", "infotree", "debug"),
    *("environment", "request_id", "state", "tactic", "target", "theorems", "holes", "wait", "op"),
    *("timeout_s", "memory_mb", "priority", "deadline_s", "allow_axioms", "audit", "traceparent"),
    "unknown",
)
PATHS = (
    *("/api/check", "/verify", "/one_pass_verify_batch", "/v1/check", "/v1/verify", "/v1/step"),
    *("/v1/states", "/v1/batch", "/v1/requests/x", "/v1/?"),
)
TEXTS = st.one_of(
    st.sampled_from(["", "theorem", "\0", "\ud800", "é" * 64, "a" * 64, "0-x~y", "check", "full"]),
    st.text(max_size=8),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.just(10**400), st.just(-1)
)


def _deeper(values: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.one_of(
        st.lists(values, max_size=3), st.dictionaries(st.sampled_from(FIELDS), values, max_size=6)
    )


JSON = st.recursive(LEAVES, _deeper, max_leaves=6)
SNIPPETS = st.lists(
    st.fixed_dictionaries({"id": TEXTS, "custom_id": TEXTS, "code": TEXTS}), max_size=3
)
# What comes near to what is wanted.
NEAR = st.fixed_dictionaries(
    {"snippets": SNIPPETS, "codes": SNIPPETS, "code": TEXTS},
    optional={name: JSON for name in FIELDS if name not in ("snippets", "codes", "code")},
)
BODIES = st.one_of(
    st.binary(max_size=40),
    st.one_of(JSON, NEAR).map(lambda value: json.dumps(value).encode()),
    st.one_of(JSON, NEAR).map(lambda value: (json.dumps(value) + "\n{}\n\n[").encode()),
)
TYPES = st.sampled_from(["application/json", "text/plain", "application/x-ndjson", "?"])


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Posts to a gateway whose client was never opened: what is well-formed finds no queue."""
    app = make_app(GatewayClient("redis://127.0.0.1:1"), Access(None, "default"))
    with asyncio.Runner() as runner:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost")

        def post(path: str, body: bytes, kind: str) -> httpx2.Response:
            sent = http.post(path, content=body, headers={"Content-Type": kind})
            return runner.run(sent)

        yield post
        runner.run(http.aclose())


MANY = 2000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/check", {"code": "x", "allow_axioms": [1] * MANY}),
        ("/v1/verify", {"code": "x", "target": "y", "holes": [1] * MANY}),
        ("/v1/check", {"code": "x", **{f"unknown{number}": 1 for number in range(MANY)}}),
        ("/v1/batch", {"op": "check", "code": "x", **{f"no{number}": 1 for number in range(MANY)}}),
        ("/v1/batch", {"op": "check", "code": "x", "allow_axioms": [1] * MANY}),
        ("/v1/batch", {"op": "check", "code": "x", "id": "i" * 1001}),
        ("/api/check", {"snippets": [{}] * MANY}),
        ("/verify", {"codes": [1] * MANY}),
    ],
)
def test_of_many_faults_in_a_body_few_are_told(ask: Ask, path: str, body: dict[str, Any]) -> None:
    # To collect all of them takes the gateway's time and memory, by a body that costs nothing.
    answer = ask(path, json.dumps(body).encode(), "application/json")
    told = answer.json()
    faults = told["detail"] if path in ("/api/check", "/verify") else None
    faults = faults or told.get("problem", told)["errors"]
    assert 1 <= len(faults) <= 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/batch", {"op": "o" * 100_000, "code": "x"}),
        ("/v1/check", {"code": "x", "environment": "e" * 100_000}),
        ("/v1/check", {"code": "x", "request_id": "r" * 100_000}),
        ("/v1/check", {"code": "x", "u" * 100_000: 1}),
        ("/v1/step", {"state": "s" * 100_000, "tactic": "x"}),
        ("/api/check", {"snippets": [{"id": "1", "code": "x"}], "environment": "e" * 100_000}),
        ("/api/check", {"snippets": [{"id": "1", "code": "x"}], "infotree": "i" * 100_000}),
    ],
)
def test_an_answer_does_not_repeat_what_was_sent(ask: Ask, path: str, body: dict[str, Any]) -> None:
    # Of a batch the answers wait until they are read, and of a check each text has one.
    assert len(ask(path, json.dumps(body).encode(), "application/json").content) < 5000


def test_a_field_that_there_is_not_is_named(ask: Ask) -> None:
    answer = ask("/v1/check", b'{"code": "x", "timeouts": 5}', "application/json")
    assert (answer.status_code, "`timeouts`" in answer.json()["detail"]) == (422, True)


BOMB_BYTES = 4 << 20
TEXT = "theorem t : 1 = 1 := rfl\n" * 40
# Their only fault is told when all of them has been read.
HONEST = {
    "/api/check": {
        "snippets": [{"id": str(n), "code": TEXT} for n in range(BOMB_BYTES // len(TEXT))],
        "timeout": -1,
    },
    "/v1/check": {"code": TEXT * (BOMB_BYTES // len(TEXT)), "timeout_s": ""},
}


def _filled(begin: bytes, piece: bytes, end: bytes) -> bytes:
    return begin + piece * ((BOMB_BYTES - len(begin) - len(end)) // len(piece)) + end


BOMBS = {
    "zeros": _filled(b'{"x":[0', b",0", b"]}"),
    "zeros alone": _filled(b"[0", b",0", b"]"),
    "zeros in a field": _filled(b'{"code":"x","allow_axioms":[0', b",0", b"]}"),
    "zeros in a number": _filled(b'{"code":"x","timeout_s":[0', b",0", b"]}"),
    "zeros in a snippet": _filled(
        b'{"timeout":-1,"snippets":[{"id":"","code":"","x":[0', b",0", b"]}]}"
    ),
    "zeros as an id": _filled(b'{"snippets":[{"code":"","id":[0', b",0", b"]}]}"),
    "zeros for a timeout": _filled(b'{"snippets":[{"id":"","code":""}],"timeout":[0', b",0", b"]}"),
    "names": _filled(b'{"code":"x","allow_axioms":[""', b',"ab"', b"]}"),
    "lists": _filled(b'{"x":[0', b",[[[[]]]]", b"]}"),
    "lists for names": _filled(b'{"code":"x","allow_axioms":[0', b",[[[[]]]]", b"]}"),
    "depth": _filled(b'{"x":', b"[", b""),
    "keys": b'{"":0%s}' % b"".join(b',"k%d":0' % n for n in range(BOMB_BYTES // 12)),
    "one key": _filled(b'{"code":0', b',"audit":0', b"}"),
    "snippets": _filled(b'{"snippets":[{"id":"","code":""}', b',{"id":"","code":""}', b"]}"),
    "empty snippets": _filled(b'{"snippets":[{}', b",{}", b"]}"),
    "digits": _filled(b'{"timeout":', b"9", b"}"),
    "decimals": _filled(b'{"code":"x","timeout_s":0.', b"9", b"}"),
    "digits for a text": _filled(b'{"code":', b"9", b"}"),
    "a long id": _filled(b'{"code":"x","request_id":"', b"\\u0041", b'"}'),
    "no end": _filled(b'{"code":"', b"\\u0041", b""),
}


def _cost(ask: Ask, path: str, data: bytes) -> tuple[float, int]:
    """The least CPU time of a request, in seconds, and the memory that it takes, in bytes."""
    took_s, memory = [], []
    for _ in range(3):
        # The kernel begins anew to note the most memory.
        Path("/proc/self/clear_refs").write_text("5")
        before, began_s = _memory("VmRSS"), time.thread_time()
        answer = ask(path, data, "application/json")
        took_s.append(time.thread_time() - began_s)
        memory.append(_memory("VmHWM") - before)
        # What can be read finds no queue.
        assert answer.status_code in (413, 422, 503), answer.text
    return min(took_s), max(memory)


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


@pytest.fixture(scope="module")
def honest(ask: Ask) -> dict[str, float]:
    """The CPU time of reading an ordinary body as large as the bombs, by path."""
    return {path: _cost(ask, path, json.dumps(body).encode())[0] for path, body in HONEST.items()}


@pytest.mark.slow
@pytest.mark.parametrize("path", HONEST)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_costs_no_more_than_an_ordinary_body(
    ask: Ask, honest: dict[str, float], path: str, name: str
) -> None:
    took_s, memory = _cost(ask, path, BOMBS[name])
    # The worst of them takes twice as long.
    assert took_s < 8 * honest[path]
    assert memory < 10 * BOMB_BYTES


@pytest.mark.slow
@given(path=st.sampled_from(PATHS), body=BODIES, kind=TYPES)
def test_no_request_is_an_internal_error(ask: Ask, path: str, body: bytes, kind: str) -> None:
    answer = ask(path, body, kind)
    assert answer.status_code != 500, answer.text
    for line in answer.text.splitlines():
        json.loads(line)
