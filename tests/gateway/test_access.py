"""The rules of who may do what, and how often."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from support.gateway.gateways import STATE, key_file

from leanq.errors import UnknownStateError, UsageError
from leanq.gateway.access import Access, Authenticated, Screened
from leanq.gateway.keys import KeyFile
from leanq.gateway.limits import Connections
from leanq.queue.requests import Reply


class Nothing:
    """A gateway without requests, but for texts of so many bytes."""

    def __init__(self, texts_bytes: int = 0) -> None:
        self._texts_bytes = texts_bytes

    def outstanding(self, _tenant: str) -> int:
        return 0

    def outstanding_bytes(self, _tenant: str) -> int:
        return self._texts_bytes


def test_bodies_on_their_way_and_texts_that_wait_share_one_limit(tmp_path: Path) -> None:
    limits = {"body_mb": 1, "outstanding_mb": 2, "tenant": "alice"}
    keys = key_file(tmp_path, {"secret": "a", **limits}, {"secret": "b"})
    access = Access(KeyFile(keys), "default")
    alice, bob = access.key_of("a"), access.key_of("b")
    with access.body(alice) as first, access.body(alice) as second, access.body(bob) as other:
        first(1 << 20)
        second(1 << 20)
        other(64 << 20)
        access.admit(alice, 1, Nothing())
        for refused in (lambda: second(1), lambda: access.admit(alice, 1, Nothing(1))):
            with pytest.raises(HTTPException, match="take the 2 MiB") as error:
                refused()
            assert error.value.status_code == 429
    access.admit(alice, 1, Nothing(2 << 20))
    with access.body(alice) as again:
        again(2 << 20)
    path = key_file(tmp_path, {"secret": "a", "outstanding_mb": 1})
    with pytest.raises(UsageError, match="outstanding_mb must be at least body_mb"):
        KeyFile(path)


def test_what_has_no_body_is_refused_by_no_limit_of_bodies(tmp_path: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.append((await receive())["body"])
        await PlainTextResponse("here")(scope, receive, send)

    received: list[bytes] = []
    limits = {"body_mb": 1, "outstanding_mb": 1}
    access = Access(KeyFile(key_file(tmp_path, {"secret": "a", **limits})), "default")
    none: frozenset[str] = frozenset()
    behind = Authenticated(app, access, Connections(3), none, "/page", none, lambda *_: Response())
    with access.holding(access.key_of("a")) as hold:
        hold(1, 1 << 20)
        # Results that wait for their reader go beyond the limit.
        hold(1, 1)
        TestClient(behind).post("/", headers={"Authorization": "Bearer a"})
    assert received == [b""]


def test_a_rate_is_kept_and_a_large_batch_is_waited_for_afterwards(tmp_path: Path) -> None:
    now_s = 0.0
    keys = KeyFile(key_file(tmp_path, {"secret": "s", "rate_per_s": 10}))
    access = Access(keys, "default", clock=lambda: now_s)
    key = access.key_of("s")

    def wait_s(count: int) -> int:
        try:
            access.admit(key, count, Nothing())
        except HTTPException as error:
            return int((error.headers or {})["Retry-After"])
        return 0

    assert [wait_s(1) for _ in range(10)] == [0] * 10
    assert wait_s(1) == 1
    now_s = 0.1
    assert wait_s(1) == 0
    assert wait_s(1) == 1
    now_s = 10.0
    assert wait_s(50) == 0
    assert wait_s(1) == 4
    now_s = 14.1
    assert wait_s(1) == 0


def test_states_are_sealed_by_tenant_and_by_the_files_secret(tmp_path: Path) -> None:
    path = key_file(
        tmp_path,
        {"secret": "a1", "tenant": "alice"},
        {"secret": "a2", "tenant": "alice"},
        {"secret": "b", "tenant": "bob"},
    )
    access = Access(KeyFile(path), "default")
    first, second, other = (access.key_of(secret) for secret in ("a1", "a2", "b"))
    sealed = access.sealed(first, Reply("incomplete", state=STATE)).state
    assert sealed
    assert access.state(second, sealed) == STATE
    with pytest.raises(UnknownStateError):
        access.state(other, sealed)
    path.write_text(path.read_text().replace("5" * 32, "6" * 32))
    with pytest.raises(UnknownStateError):
        Access(KeyFile(path), "default").state(first, sealed)
    alone = Access(None, "default")
    assert alone.state(alone.key_of(None), STATE) == STATE


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("lean.example", "https://lean.example", 200),
        ("lean.example", "http://lean.example", 403),
        ("lean.example", "ftp://lean.example", 403),
        ("lean.example", "https://lean.example:8443", 403),
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("127.0.0.1:8000", "https://127.0.0.1:8000", 200),
        ("127.0.0.1:8000", "http://127.0.0.1:8001", 403),
        ("lean.example", "null", 403),
        ("lean.example", "https://[", 403),
    ],
)
def test_an_origin_is_this_site_by_its_scheme_too(host: str, origin: str, status: int) -> None:
    http = TestClient(Screened(PlainTextResponse("here")))
    answer = http.get("/", headers={"Host": host, "Origin": origin})
    assert answer.status_code == status
