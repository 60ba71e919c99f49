"""The fake client beside the real one: what holds for one holds for the other."""

from __future__ import annotations

import asyncio
import doctest
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from support.paths import ROOT
from support.waiting import eventually

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.errors import (
    ClosedError,
    ConflictError,
    InvalidRequestError,
    LostError,
    UnavailableError,
    UnknownEnvironmentError,
    UnknownStateError,
    UsageError,
)
from leanq.queue.requests import Reply, Request
from leanq.queue.settings import Settings
from leanq.trainers import testing
from leanq.trainers.testing import FakeAsyncLeanQClient, FakeFleet, FakeLeanQClient

THEOREM = "theorem t (p : Prop) (h : p) : p := "
DEADLINE_S = 60.0


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.slow)])
def client(request: pytest.FixtureRequest) -> Iterator[LeanQClient]:
    """Each of the two."""
    if request.param == "fake":
        with FakeLeanQClient() as fake:
            yield fake
        return
    fleet: Settings = request.getfixturevalue("fleet")
    with LeanQClient(fleet) as real:
        yield real


def test_verdicts_goals_and_states(client: LeanQClient) -> None:
    assert client.check(f"{THEOREM}h").result(DEADLINE_S).verdict == "accepted"
    checked = client.check(f"{THEOREM}by\n  sorry").result(DEADLINE_S)
    assert (checked.verdict, checked.reason) == ("incomplete", "sorry")
    (hole,) = checked.sorries
    assert (hole.line, hole.column, hole.end_line, hole.end_column) == (2, 2, 2, 7)
    assert hole.goal
    assert hole.state
    stepped = client.step(hole.state, "exact h").result(DEADLINE_S)
    assert (stepped.verdict, stepped.state) == ("accepted", None)
    verified = client.verify(f"{THEOREM}sorry", f"{THEOREM}h").result(DEADLINE_S)
    assert (verified.verdict, verified.reason, verified.attempts) == ("accepted", None, 1)
    results = list(client.map([f"{THEOREM}h", f"{THEOREM}sorry"]))
    assert [result.verdict for result in results] == ["accepted", "incomplete"]


def test_arguments_are_checked_alike(client: LeanQClient) -> None:
    for call in (
        lambda: client.check(""),
        lambda: client.check("x", timeout_s=-1),
        lambda: client.check("x", nonsense=1),  # type: ignore[call-arg]
        lambda: client.check(7),  # type: ignore[arg-type]
        lambda: client.step("0", "simp"),
        lambda: client.step("0" * 64, " "),
        lambda: client.verify(None, "x"),
        lambda: client.check("x", priority=7),
        lambda: client.check("x", env="a b"),
        lambda: client.check("x\0"),
    ):
        with pytest.raises((UsageError, TypeError)):
            call()
    with pytest.raises(InvalidRequestError, match="shard that this queue does not have"):
        client.attach(["7-x"])


def test_what_is_not_known_is_an_error(client: LeanQClient) -> None:
    with pytest.raises(UnknownStateError, match="0000"):
        client.step("0" * 64, "simp").result(DEADLINE_S)
    with pytest.raises(UnknownEnvironmentError, match="'none'; known: default"):
        client.check("x", env="none").result(DEADLINE_S)
    (lost,) = client.attach(["0-nobody"])
    with pytest.raises(LostError):
        lost.result(DEADLINE_S)


def test_a_name_that_is_used_again_has_the_same_reply(client: LeanQClient) -> None:
    name = f"0-again{os.getpid()}"
    first = client.check(f"{THEOREM}h", request_id=name).result(DEADLINE_S)
    again = client.check(f"{THEOREM}h", request_id=name).result(DEADLINE_S)
    (attached,) = client.attach([name])
    assert attached.result(DEADLINE_S).verdict == again.verdict == first.verdict == "accepted"


def test_a_name_that_is_used_again_for_something_else_is_a_conflict(client: LeanQClient) -> None:
    name = f"0-other{os.getpid()}"
    assert client.check(f"{THEOREM}h", request_id=name).result(DEADLINE_S).verdict == "accepted"
    with pytest.raises(ConflictError, match=name):
        client.check(f"{THEOREM}h -- x", request_id=name).result(DEADLINE_S)


def test_a_client_that_is_closed_takes_nothing(client: LeanQClient) -> None:
    client.close()
    with pytest.raises(ClosedError):
        client.check(f"{THEOREM}h")


# The fake alone


def test_the_last_rule_that_fits_holds_as_often_as_it_says() -> None:
    fleet = FakeFleet()
    fleet.on("x", "rejected")
    fleet.on("x", "timeout", times=2)
    fleet.on("xy", UnavailableError("gone"), op="verify")
    fleet.on("z", Reply("exhausted", reason="recursion_depth"))
    fleet.on("len", lambda request: "accepted" if len(request.code) > 5 else "rejected")
    with FakeLeanQClient(fleet) as lean:
        replies = [lean.check("xy").result(DEADLINE_S) for _ in range(3)]
        assert [(reply.verdict, reply.reason) for reply in replies] == [
            *[("timeout", "cpu_time")] * 2,
            ("rejected", "lean_error"),
        ]
        with pytest.raises(UnavailableError, match="gone"):
            lean.verify("t", "xy").result(DEADLINE_S)
        assert lean.check("z").result(DEADLINE_S).reason == "recursion_depth"
        verdicts = [lean.check(code).result(DEADLINE_S).verdict for code in ("len", "len...")]
        assert verdicts == ["rejected", "accepted"]
    assert [request.op for request in fleet.requests] == [*["check"] * 3, "verify", *["check"] * 3]
    assert all(isinstance(request, Request) for request in fleet.requests)


def test_a_step_can_leave_goals() -> None:
    with FakeLeanQClient() as lean:
        lean.fleet.on("intro", "incomplete", op="step")
        (hole,) = lean.check("sorry").result(DEADLINE_S).sorries
        assert hole.state
        first = lean.step(hole.state, "intro h").result(DEADLINE_S)
        assert first.goals == ("⊢ what intro h leaves",)
        assert first.state
        assert lean.step(first.state, "exact h").result(DEADLINE_S).verdict == "accepted"
        again = lean.step(hole.state, "intro h").result(DEADLINE_S)
        assert again.state == first.state


async def test_delays_deadlines_and_withdrawals() -> None:
    fleet = FakeFleet()
    fleet.on("slow", delay_s=3600.0)
    async with FakeAsyncLeanQClient(fleet) as lean:
        assert (await lean.check("slow", deadline_s=0.01)).verdict == "expired"
        task = asyncio.create_task(lean.check("slow"))
        await eventually(lambda: len(fleet.requests) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fleet.cancelled == 1
        last = asyncio.create_task(lean.check("slow"))
        await eventually(lambda: len(fleet.requests) == 3)
    with pytest.raises(ClosedError):
        await last
    with FakeLeanQClient(fleet) as threaded:
        future = threaded.check("slow")
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result(DEADLINE_S)


def test_it_takes_the_place_of_a_client() -> None:
    assert isinstance(FakeLeanQClient(), LeanQClient)
    assert isinstance(FakeAsyncLeanQClient(), AsyncLeanQClient)


def test_the_example() -> None:
    for test in doctest.DocTestFinder(exclude_empty=True).find(testing, globs=vars(testing)):
        assert doctest.DocTestRunner().run(test).failed == 0


USERS_TESTS = """
pytest_plugins = ["leanq.trainers.testing"]

def test_with_a_fake(fake_lean):
    fake_lean.fleet.on("hard", "exhausted")
    assert fake_lean.check("hard").result(60).verdict == "exhausted"

def test_with_lean(lean, lean_queue):
    code = "theorem t (p : Prop) (h : p) : p := h"
    assert lean.check(code).result(60).verdict == "accepted"
    assert lean_queue.url.startswith("unix:")
"""


@pytest.mark.slow
@pytest.mark.parametrize("lean", [True, False])
def test_users_tests_have_a_queue_or_are_skipped(
    tmp_path: Path, cache: Path, core: object, lean: bool
) -> None:
    (tmp_path / "test_users.py").write_text(USERS_TESTS)
    environ = {name: text for name, text in os.environ.items() if name != "CI"}
    environ |= {"LEANQ_CACHE": str(cache), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    environ |= {} if lean else {"LEANQ_LEAN": "/no/such/lean"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_users.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert ("2 passed" if lean else "1 passed, 1 skipped") in said
    assert lean or "/no/such/lean" in said
