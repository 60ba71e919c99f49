"""Requests that are made to break the gateway: each gets an answer that says what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
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


@pytest.mark.slow
@given(path=st.sampled_from(PATHS), body=BODIES, kind=TYPES)
def test_no_request_is_an_internal_error(ask: Ask, path: str, body: bytes, kind: str) -> None:
    answer = ask(path, body, kind)
    assert answer.status_code != 500, answer.text
    for line in answer.text.splitlines():
        json.loads(line)
