"""Where Lean spends its time in a text: real Lean with its profiler, and outputs that mislead."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

import httpx2
import pytest
from support.gateway.gateways import Gateway, Scripted
from support.gateway.pages import HTML
from support.lean.sites import Site, check
from support.terminals import Terminal
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.errors import InvalidRequestError
from leanq.lean.outcome import Printed
from leanq.lean.run.process import Run
from leanq.lean.run.profile import profiled
from leanq.lean.sandbox.process import Exit, Finished, Limits
from leanq.producer.request_builder import RequestBuilder
from leanq.queue.requests import DeclarationTime, Message, Profile, Reply, Request
from leanq.queue.settings import Settings

# Its theorem takes seconds.
SLOW = """set_option maxRecDepth 1000000
namespace Ack
def count : Nat → Nat → Nat
  | 0, a => a + 1
  | n + 1, a => count n (count n a)
/-- It is slow. -/
@[simp] theorem slow : count 12 0 = 4096 := by decide
end Ack
theorem quick (p : Prop) (h : p) : p := h
"""
LIMITS = Limits(cpu_s=60.0, wall_s=60.0, memory_bytes=1 << 30)


def line(at: tuple[int, int], text: str, **fields: Any) -> bytes:
    """A message as Lean prints it."""
    place = {"line": at[0], "column": at[1]}
    told = {"data": text, "severity": "information", "pos": place, "endPos": None, **fields}
    return json.dumps(told).encode() + b"\n"


def of(code: str, *said: bytes, stderr: bytes = b"", stopped: Any = None) -> Reply:
    """What is read from such an output of Lean."""
    ended = Exit(None if stopped else 0, 9 if stopped else None, stopped, 1.5, 2.0, 0)
    done = Finished(ended, b"".join(said), stderr)
    return profiled(Run(done, LIMITS, Printed(done.stdout), compiled=stopped is None), code)


# Real Lean


@pytest.mark.slow
async def test_the_heaviest_declaration_comes_first(site: Site) -> None:
    driver = await site.driver()
    reply = await driver.run(check(SLOW, profile=True))
    assert (reply.verdict, reply.reason, reply.messages) == ("unjudged", "not_audited", ())
    # Nothing of it is remembered.
    assert (reply.fingerprint, reply.axioms, reply.kernel) == (None, None, None)
    assert reply.profile
    assert reply.profile.import_ms
    first, *others = reply.profile.declarations
    assert (first.name, first.line) == ("Ack.slow", 6)
    assert first.ms > sum(row.ms for row in others)
    assert {what for what, _ in first.parts[:2]} == {"type checking", "tactic execution of decide"}
    assert {row.name: row.line for row in others} == {
        "set_option maxRecDepth 1000000": 1,
        "namespace Ack": 2,
        "Ack.count": 3,
        "end Ack": 8,
        "quick": 9,
        "(end of the text)": 10,
    }
    # The same text as a check is what it is without a profile.
    plain = await driver.run(check(SLOW))
    assert (plain.verdict, plain.profile) == ("accepted", None)


@pytest.mark.slow
async def test_a_text_that_is_stopped_and_one_that_is_wrong(site: Site) -> None:
    driver = await site.driver()
    reply = await driver.run(check(SLOW.replace("12 0", "16 0"), profile=True, timeout_s=0.5))
    assert (reply.verdict, reply.reason) == ("timeout", "cpu_time")
    assert reply.profile
    assert reply.profile.unfinished in ("Ack.count", "Ack.slow", "quick")
    (message,) = reply.messages
    assert message.text.startswith("leanq: Lean was stopped after")
    assert " took " not in message.text
    reply = await driver.run(check("theorem t (p : Prop) : p := by\n  oops", profile=True))
    assert (reply.verdict, reply.reason) == ("rejected", "lean_error")
    assert reply.messages[0].line == 2
    assert reply.profile
    assert reply.fingerprint is None


@pytest.mark.slow
async def test_profiles_are_no_forks(site: Site) -> None:
    """A comparison of forks with other runs would find two outputs that differ."""
    driver = await site.driver()
    for _ in range(3):
        assert (await driver.run(check("theorem t : 1 = 1 := rfl"))).verdict == "accepted"
    reply = await driver.run(check("theorem t : 1 = 1 := rfl", profile=True))
    assert reply.spent
    assert reply.spent.is_forked is False


@pytest.mark.slow
def test_a_table_and_json(client: Terminal) -> None:
    file = client.file("slow.lean", SLOW)
    done = client.run("profile", file)
    assert done.code == 0
    head, titles, first, *_ = done.out.splitlines()
    assert head.startswith(f"{file}: ")
    assert " ms of Lean's time by declaration, " in head
    assert titles.split() == ["MS", "SHARE", "LINE", "DECLARATION", "MOST", "OF", "IT"]
    assert first.split()[2:4] == ["6", "Ack.slow"]
    assert done.err.startswith("1 profiled in ")
    (row,) = client.run("profile", file, "--json").lines
    assert (row["verdict"], row["messages"]) == ("unjudged", [])
    assert row["profile"]["declarations"][0]["name"] == "Ack.slow"
    assert row["profile"]["declarations"][0]["parts"]["type checking"] > 0
    # A check of the same text comes from no profile.
    assert client.run("submit", file).code == 0


@pytest.mark.slow
def test_what_cannot_be_profiled(client: Terminal) -> None:
    wrong = client.file("wrong.lean", "theorem t : 1 = 2 := rfl")
    done = client.run("profile", wrong, client.file("empty.lean", " "))
    assert done.code == 2
    assert "the text is empty" in done.err
    done = client.run("profile", wrong)
    assert done.code == 0
    head, error, *_ = done.out.splitlines()
    assert head.endswith("; Lean: lean_error")
    assert error.startswith(f"  {wrong}:1:")
    assert ": error: " in error
    assert client.run("profile", "--timeout", "0", wrong).code == 2
    assert client.run("profile", client.file("a.lean", b"\xff").replace("a.lean", "no")).code == 2


# What Lean prints


def test_places_names_and_units() -> None:
    code = (
        "mutual\ntheorem A.x : a := b\nprivate def «y z» := 1\nend\n"
        "class inductive C\ninstance : D := e\nnamespace N\ntheorem _root_.r : a := b\n#eval 1\n"
    )
    reply = of(
        code,
        line((1, 0), "elaboration took 1.5s\nlinting took 2ms\n"),
        line((2, 8), "type checking took 1e+03ms\n"),
        *(line((n, 0), f"linting took {n}ms\n") for n in (5, 6, 7, 8)),
        line((9, 0), "a result\nlinting took 9ms\nand more"),
        stderr=b"interpretation of x took 3ms\nimport took 1.82s\nimport took 9s\n",
    )
    assert reply.messages == (Message("information", 9, 0, "a result\nand more"),)
    assert reply.profile
    assert reply.profile.import_ms == 1820
    assert [(row.name, row.line, row.ms) for row in reply.profile.declarations] == [
        ("A.x, «y z»", 1, 2502.0),
        ("#eval 1", 9, 9.0),
        ("r", 8, 8.0),
        ("namespace N", 7, 7.0),
        ("instance : D := e", 6, 6.0),
        ("C", 5, 5.0),
    ]
    assert reply.profile.declarations[0].parts == (
        *(("elaboration", 1500.0), ("type checking", 1000.0), ("linting", 2.0)),
    )


def test_a_text_can_print_anything() -> None:
    reply = of(
        "theorem t : a := b",
        line((1, 0), "linting took 1ms\nx took 1e99s\nx took 1.2.3ms\nx took 5 ms\ny took -1ms\n"),
        line((99, 4_000_000_000), f"{'z' * 400} took 1ms\ntook 1ms\n took 2ms\nw took 3ms"),
        line((0, 7), "v took 4ms", severity="error"),
        b"no message took 1ms\n",
    )
    assert reply.profile
    (row,) = reply.profile.declarations
    assert (row.name, row.line) == ("t", 1)
    assert row.parts[0] == ("x", 1e9)
    assert reply.verdict == "rejected"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("code", "places"),
    [
        (f"{'/-- -/' * 100}# theorem x", [0]),
        (f"{' ' * 100_000}# {'theorem x ' * 50_000}", [0]),
        (f"{'/-- -/ ' * 50_000}# {'theorem x ' * 50_000}", range(0, 350_000, 7)),
    ],
)
def test_no_text_keeps_a_worker_from_its_heartbeats(code: str, places: Iterable[int]) -> None:
    reply = of(code, *(line((1, at), "elaboration took 1ms") for at in places))
    assert reply.profile is not None
    assert sum(row.ms for row in reply.profile.declarations) > 0


@pytest.mark.slow
def test_deep_namespaces_cost_no_memory() -> None:
    code = "namespace a\n" * 10_000 + "theorem x := y\n" * 20_000
    tracemalloc.start()
    try:
        profile = of(code, line((1, 0), "elaboration took 1ms"), stopped="cpu").profile
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert profile is not None
    assert profile.unfinished == ("a." * 50)


def test_a_command_is_not_what_stands_behind_it() -> None:
    code = "theorem a : x\n#exit\ntheorem b : x"
    reply = of(code, *(line((n, 0), f"linting took {n}ms\n") for n in (1, 2)))
    assert reply.profile
    assert [row.name for row in reply.profile.declarations] == ["#exit", "a"]


def test_many_declarations_and_none() -> None:
    code = "".join(f"theorem t{n} : a := b\n" for n in range(3000))
    said = (line((n + 1, 0), f"linting took {n}ms\n") for n in range(3000))
    reply = of(code, *said)
    assert reply.profile
    assert len(reply.profile.declarations) == 1000
    assert reply.profile.declarations[0].name == "t2999"
    assert of("", b"").profile == of("-- nothing", b"").profile == Profile(())


@pytest.mark.parametrize(
    ("told", "unfinished"),
    [((), "a"), ((1,), "b"), ((1, 2), "d"), ((1, 2, 4), "d"), ((1, 2, 4, 5), "")],
)
def test_where_it_was_stopped(told: tuple[int, ...], unfinished: str) -> None:
    code = (
        "theorem a : x\n@[simp] theorem b : x\n-- c\nset_option d\n/-- d -/ private theorem d : x"
    )
    reply = of(code, *(line((n, 0), "linting took 1ms\n") for n in told), stopped="cpu")
    assert reply.profile
    assert reply.profile.unfinished == unfinished


# On its way


async def test_a_profile_through_a_gateway(gateway: Gateway, scripted: Scripted) -> None:
    told = Profile((DeclarationTime("t", 1, 2.5, (("simp", 2.0),)),), 7.0, "u")
    scripted.replies["-- text"] = Reply("timeout", reason="cpu_time", profile=told)
    async with AsyncLeanQClient(gateway.url) as lean:
        assert (await lean.check("-- text", profile=True)).profile == told
    assert [request.profile for request in scripted.seen] == [True]


def test_only_a_check_has_a_profile() -> None:
    with pytest.raises(InvalidRequestError, match="a verify has no profile; ask for one with a ch"):
        Request("verify", code="x", target="y", profile=True)


def test_no_profile_answers_a_check(settings: Settings) -> None:
    builder = RequestBuilder(settings, "default")
    digests = {builder.check("-- x", {"profile": on}).submission.digest for on in (True, False)}
    assert len(digests | {builder.check("-- x", {}).submission.digest}) == 2


# The page


async def test_a_slow_request_is_profiled_from_its_page(
    gateway: Gateway, scripted: Scripted
) -> None:
    slow, quick = "-- accepted slow", "-- accepted quick"
    told = Profile((DeclarationTime("<b>t</b>", 1, 2.5, (("simp", 2.0),)),), 7.0, "u")
    scripted.replies[slow] = Reply("accepted", cpu_s=1.5)
    scripted.replies[quick] = Reply("accepted", cpu_s=0.5)
    form = 'action="page/profile"'
    assert form not in await checked(gateway, quick)
    page = await checked(gateway, slow)
    assert form in page
    (request_id,) = re.findall(r'name="request_id" value="([^"]+)"', page)
    scripted.replies[slow] = Reply("unjudged", reason="not_audited", cpu_s=2.0, profile=told)
    answer = await post(gateway, "/page/profile", request_id=request_id)
    assert answer.status_code == 303
    page = await ended_page(gateway, answer.headers["Location"])
    assert scripted.seen[-1].profile
    assert scripted.seen[-1].code == slow
    for text in ("by declaration; 7.0 ms for imports", "&lt;b&gt;t&lt;/b&gt;", "simp 2.0"):
        assert text in page
    assert "The first declaration of which Lean told nothing: " in page
    # A profile has none of its own.
    assert form not in page
    (again,) = re.findall(r"page/requests/([^/\"]+)/text", page)
    assert (await post(gateway, "/page/profile", request_id=unquote(again))).status_code == 404
    for none in ("0-none", "9" * 5000 + "-a"):
        assert (await post(gateway, "/page/profile", request_id=none)).status_code == 404


async def checked(gateway: Gateway, code: str) -> str:
    answer = await post(gateway, "/page/check", code=code)
    return await ended_page(gateway, answer.headers["Location"])


async def ended_page(gateway: Gateway, where: str) -> str:
    page = ""

    async def has_ended() -> bool:
        nonlocal page
        page = (await gateway.http.get(where, headers=HTML)).text
        return "CPU in Lean" in page

    await eventually(has_ended)
    return page


async def post(gateway: Gateway, path: str, **fields: str) -> httpx2.Response:
    headers = {**HTML, "Origin": gateway.url}
    return await gateway.http.post(path, data=fields, headers=headers)
