"""The page: what it shows to whom, who may change what, and what browsers are told about it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urljoin

import httpx2
import pytest
import redis
from fastapi import Request, Response
from support.fleets import echo_body, submission, working
from support.gateway.gateways import STATE, Gateway, Scripted, key_file, new_gateway
from support.gateway.pages import HOSTILE, HTML, bury, cookie_of, decide, log_in, note_a_day
from support.queue.queues import Queue
from support.servers import Server, own_server
from support.terminals import Terminal
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.fleet.stats import EnvironmentStats, FleetStats
from leanq.gateway.access import Access
from leanq.gateway.client import GatewayClient, RequestName
from leanq.gateway.keys import KeyFile
from leanq.gateway.page.looks import FleetLooks
from leanq.gateway.page.sections import SECTIONS
from leanq.gateway.page.sessions import SESSION_S, Sessions
from leanq.queue.keys import Keys, new_request_id
from leanq.queue.requests import Message, Reply, Sorry
from leanq.queue.results import merged
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_info

OPERATOR = {"secret": "chief", "tenant": "ops", "rights": ["submit", "status", "operate"]}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@contextlib.asynccontextmanager
async def keyed(
    settings: Settings, folder: Path, *keys: dict[str, Any]
) -> AsyncIterator[tuple[Gateway, dict[str, dict[str, str]]]]:
    """A gateway with keys, and the headers of a browser that has logged in with each."""
    keys = keys or ({"secret": "alice"}, {"secret": "bob"}, OPERATOR)
    async with new_gateway(settings, keys=KeyFile(key_file(folder, *keys))) as gateway:
        who = [key["secret"] for key in keys]
        yield gateway, {name: await log_in(gateway.http, gateway.url, name) for name in who}


async def shown(gateway: Gateway, headers: dict[str, str], path: str = "/") -> str:
    answer = await gateway.http.get(path, headers={**HTML, **headers})
    assert answer.status_code == 200, answer.text
    return answer.text


async def change(
    gateway: Gateway, headers: dict[str, str], path: str, **fields: str
) -> httpx2.Response:
    answer = await gateway.http.post(path, data=fields, headers={"Origin": gateway.url, **headers})
    gateway.http.cookies.clear()
    return answer


async def test_the_page_is_at_the_root_for_browsers_alone(gateway: Gateway) -> None:
    answer = await gateway.http.get("/", headers=HTML)
    assert answer.headers["Content-Type"].startswith("text/html")
    for title in (
        "Environments",
        "Tenants",
        "Dead letters",
        "Scaler",
        "Last 24 hours",
    ):
        assert title in answer.text
    assert (await gateway.http.get("/")).json() == {"status": "ok"}


async def test_the_page_warns_of_a_server_that_is_nearly_full() -> None:
    with own_server() as server:
        async with new_gateway(server.settings) as gateway:
            with redis.Redis.from_url(server.settings.url) as connection:
                connection.set("large", bytes(64 << 20))
                connection.config_set("maxmemory", int((65 << 20) / 0.88))

            async def is_warned() -> bool:
                page = await shown(gateway, {})
                return bool(re.search(r"Redis uses 8\d% of its memory; a full one refuses", page))

            await eventually(is_warned)


async def test_browsers_are_told_to_load_nothing_from_elsewhere(gateway: Gateway) -> None:
    paths = ("/", "/page/check", "/page/nowhere", "/page/static/leanq.css", "/page/requests/0-x")
    for path in paths:
        headers = (await gateway.http.get(path, headers=HTML)).headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "same-origin"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert (await gateway.http.get("/", headers=HTML)).headers["Cache-Control"] == "no-store"
    static = await gateway.http.get("/page/static/vendor/htmx.min.js")
    assert "javascript" in static.headers["Content-Type"]
    for path in ("/page/static/../routes.py", "/page/static/%2e%2e/routes.py"):
        assert (await gateway.http.get(path)).status_code == 404


@pytest.mark.slow
async def test_a_browser_logs_in_and_out(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    async with keyed(settings, tmp_path) as (gateway, browsers):
        stranger = await gateway.http.get("/", headers=HTML)
        assert "Log in" in stranger.text
        assert "Environments" not in stranger.text
        for wrong in ("", "nobody", "None", "x" * 5000):
            answer = await change(gateway, HTML, "/page/login", key=wrong)
            assert answer.status_code in (403, 413), wrong
            assert "Set-Cookie" not in answer.headers
        answer = await change(gateway, HTML, "/page/login", key=" alice ")
        cookie = answer.headers["Set-Cookie"]
        assert cookie.startswith("leanq-session=")
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {*cookie.split("; ")}
        assert "alice" in await shown(gateway, cookie_of(answer))
        # A key in the header serves as everywhere.
        assert "Environments" in await shown(gateway, {"Authorization": "Bearer bob"})
        out = await change(gateway, browsers["alice"], "/page/logout")
        assert "Max-Age=0" in out.headers["Set-Cookie"]


@pytest.mark.slow
async def test_a_session_is_that_of_its_key_alone(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    file = key_file(tmp_path, {"secret": "alice"}, {"secret": "bob"})
    async with new_gateway(settings, keys=KeyFile(file)) as gateway:
        alice = await log_in(gateway.http, gateway.url, "alice")
        bob = await log_in(gateway.http, gateway.url, "bob")

        for headers in (alice, bob):
            # It is asked for at other gateways, too.
            del headers["Origin"]
        assert "Log in" not in await shown(gateway, alice)
        name, until, signature = alice["Cookie"].split(".")
        other = bob["Cookie"].split(".")
        forged = (
            f"{other[0]}.{until}.{signature}",
            f"{name}.{int(until) + 1}.{signature}",
            f"{name}.{until}.{signature[:-1]}0",
            f"{name}.{until}.",
            f"{name}.nan.{signature}",
            "leanq-session=é.1.2",
            "leanq-session=" + "." * 1000,
        )
        for cookie in forged:
            answer = await gateway.http.get("/", headers={**HTML, "Cookie": cookie.encode()})
            assert "Log in" in answer.text, cookie
        # Another gateway with the same file knows it, and one with another key of that name not.
        async with new_gateway(settings, keys=KeyFile(file)) as second:
            assert "Log in" not in await shown(second, alice)
        key_file(tmp_path, {"secret": "carol", "name": "alice"}, {"secret": "bob"})
        async with new_gateway(settings, keys=KeyFile(file)) as third:
            assert "Log in" in await shown(third, alice)
            assert "Log in" not in await shown(third, bob)


async def test_a_session_ends_after_a_week(tmp_path: Path) -> None:
    access = Access(KeyFile(key_file(tmp_path, {"secret": "alice"})), "default")
    now_s = 1e9
    sessions = Sessions(access, lambda: now_s)
    [key] = [key for key in (sessions.key_given("alice"),) if key]
    hosts = {"127.0.0.1:8000": False, "lean.example": True, "localhost": False, "[::1]:9": False}
    for host, over_tls in hosts.items():
        made = Response()
        now_s = 1e9
        sessions.begin(_request(host), made, key)
        cookie = made.headers["Set-Cookie"]
        assert ("Secure" in cookie, cookie.startswith("__Host-")) == (over_tls, over_tls)
        asking = _request(host, cookie.partition(";")[0])
        for age_s, found in ((0, key), (SESSION_S - 1, key), (SESSION_S + 1, None)):
            now_s = 1e9 + age_s
            assert sessions.key_of(asking) == found


def _request(host: str, cookie: str = "") -> Request:
    headers = [(b"host", host.encode()), (b"cookie", cookie.encode())]
    return Request({"type": "http", "headers": headers})


async def test_a_change_comes_from_this_page_alone(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    async with keyed(settings, tmp_path) as (gateway, browsers):
        chief = {name: value for name, value in browsers["chief"].items() if name != "Origin"}
        body = "kind=tenant&name=alice&paused=yes"
        for origin in ({}, {"Origin": "null"}, {"Origin": "https://elsewhere.example"}):
            headers = {**FORM, **chief, **origin}
            answer = await gateway.http.post("/page/pause", content=body, headers=headers)
            assert answer.status_code == 403, origin
        # By a GET nothing changes.
        assert (await gateway.http.get(f"/page/pause?{body}", headers=chief)).status_code == 405
        queue = Queue(settings)
        assert not (await queue.status()).paused
        await queue.close()


async def test_without_keys_all_is_seen_and_nothing_but_own_requests_changed(
    gateway: Gateway, settings: Settings
) -> None:
    letter = new_request_id(1)
    await bury(settings, letter, tenant="somebody", code="-- theirs")
    page = await shown(gateway, {})
    assert "somebody" in page
    assert "without keys" in page
    assert "<button" not in page.split('id="dead"')[1].split("</section>")[0]
    ours: dict[str, str] = {}
    refused = {
        "/page/pause": {"kind": "tenant", "name": "x", "paused": "yes"},
        "/page/weight": {"tenant": "x", "weight": "2"},
    }
    for path, fields in refused.items():
        assert (await change(gateway, ours, path, **fields)).status_code == 403
    for what in ("retry", "drop"):
        answer = await change(gateway, ours, f"/page/dead/{what}", request_id=letter)
        assert answer.status_code == 422
    assert (await gateway.http.get(f"/page/requests/{letter}", headers=HTML)).status_code == 404
    mine = new_request_id(1)
    await bury(settings, mine, tenant="default", code="-- mine")
    assert (await change(gateway, ours, "/page/dead/drop", request_id=mine)).status_code == 303
    queue = Queue(settings)
    assert await queue.dead_request_ids(9) == [letter]
    await queue.drop_dead(letter)
    await queue.close()


async def test_all_links_lead_below_the_path_that_a_proxy_takes_away(gateway: Gateway) -> None:
    sent = await change(gateway, {}, "/page/check", code="-- a text")
    seen = urljoin("https://host/leanq/page/check", sent.headers["Location"])
    request_id = seen.removeprefix("https://host/leanq/page/requests/")
    for path in ("", "page/check", f"page/requests/{request_id}", "page/nowhere/at/all"):
        answer = await gateway.http.get(f"/{path}", headers=HTML)
        links = re.findall(r'(?:href|src|action|hx-get|hx-post|sse-connect)="([^"]*)"', answer.text)
        base = urljoin(f"https://host/leanq/{path}", links[0])
        assert base == "https://host/leanq/"
        for link in links[1:]:
            assert urljoin(base, link).startswith("https://host/leanq/"), link
        assert urljoin(base, f"./{path}#main") in {urljoin(base, link) for link in links}


async def test_what_is_claimed_ahead_uses_no_slot(gateway: Gateway, settings: Settings) -> None:
    queue = Queue(settings)
    info = pack_info({"slots": 2, "environments": ["echo"]})
    await queue.register("w", info, {"echo": pack_info({})})
    requests = [submission(f"0-{n}", echo_body(b"x")) for n in range(4)]
    await queue.submit("client", requests)
    jobs = (await queue.claim("w", ["echo"], 4, busy=0, token="n:")).jobs
    assert len(jobs) == 4

    async def is_told() -> bool:
        await queue.renew("w")
        page = await shown(gateway, {})
        in_slots = page.count('2<span class="of"> / 2</span>')
        return in_slots == 2 and "slots in use, 2 claimed ahead" in page

    await eventually(is_told)
    await queue.release("w", [(job.request_id, job.token) for job in jobs], leave=True)
    await queue.cancel([f"0-{n}" for n in range(4)])
    await queue.close()


async def test_tenants_see_nothing_of_one_another(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    async with keyed(settings, tmp_path) as (gateway, browsers):
        letters = {who: new_request_id(1) for who in ("alice", "bob")}
        for who, letter in letters.items():
            await bury(settings, letter, tenant=who, code=f"-- dead of {who}")
        await eventually(lambda: _is_told(gateway, browsers["chief"], *letters.values()))
        # Of alice: one that runs, one that has ended, one sent to Redis itself.
        alice = {"Authorization": "Bearer alice"}
        for name in ("held", "done"):
            body = {"code": f"-- {name} secret of alice", "request_id": name}
            await gateway.http.post("/v1/check?wait=0", json=body, headers=alice)
        await eventually(lambda: len(scripted.running) == 1)
        ids = [RequestName("alice", name).request_id(1) for name in ("held", "done")]
        async with AsyncLeanQClient(settings, tenant="alice") as direct:
            reply = await direct.check("-- accepted of alice, not by the gateway")
        ids += [letters["alice"], reply.request_id]

        for path in ("/", "/page/check"):
            page = await shown(gateway, browsers["bob"], path)
            assert "alice" not in page
            assert letters["alice"] not in page
        assert letters["bob"] in await shown(gateway, browsers["bob"])
        for request_id in ids:
            for path in ("", "/live", "/text"):
                where = f"/page/requests/{request_id}{path}"
                answer = await gateway.http.get(where, headers={**browsers["bob"]})
                assert answer.status_code == 404, where
                assert "secret" not in answer.text
            answer = await change(gateway, browsers["bob"], "/page/withdraw", request_id=request_id)
            assert answer.status_code == 404
            for what in ("retry", "drop"):
                answer = await change(
                    gateway, browsers["bob"], f"/page/dead/{what}", request_id=request_id
                )
                assert answer.status_code == 422
        for path, fields in (
            ("/page/pause", {"kind": "tenant", "name": "bob", "paused": "yes"}),
            ("/page/weight", {"tenant": "bob", "weight": "9"}),
        ):
            assert (await change(gateway, browsers["bob"], path, **fields)).status_code == 403

        # The owner and the operator see them, and what a reply of a direct client does not say.
        for request_id in ids[:3]:
            for who in ("alice", "chief"):
                where = f"/page/requests/{request_id}"
                assert "of alice" in await shown(gateway, browsers[who], where)
        where = f"/page/requests/{reply.request_id}"
        assert "does not keep a text" in await shown(gateway, browsers["chief"], where)
        scripted.gate.set()
        for who in ("alice", "chief"):
            mine = letters["alice" if who == "alice" else "bob"]
            answer = await change(gateway, browsers[who], "/page/dead/drop", request_id=mine)
            assert answer.status_code == 303
        await gateway.http.get("/v1/requests/held?wait=60", headers=alice)


async def _is_told(gateway: Gateway, headers: dict[str, str], *texts: str) -> bool:
    page = await shown(gateway, headers)
    return all(text in page for text in texts)


async def test_who_fills_the_queue_is_named_to_who_may_know(
    settings: Settings, scripted: Scripted, tmp_path: Path, terminal: Terminal
) -> None:
    terminal.use(settings)
    async with (
        keyed(settings, tmp_path) as (gateway, who),
        AsyncLeanQClient(settings, tenant="alice") as alice,
        AsyncLeanQClient(settings, tenant="bob") as bob,
    ):
        for name, client in (("alice", alice), ("bob", bob)):
            scripted.replies[name] = Reply("accepted", cpu_s=1.0)
            await client.check(name)
        many = [asyncio.create_task(bob.check(f"-- held b{n}")) for n in range(200)]
        await eventually(lambda: len(scripted.running) == 16)
        few = [asyncio.create_task(alice.check(f"-- held a{n}")) for n in range(20)]
        told = "bob has 184 of the 204 requests that wait in default"
        await eventually(lambda: _is_told(gateway, who["chief"], told))
        assert told in await shown(gateway, who["bob"])
        assert "bob has" not in await shown(gateway, who["alice"])
        status = await asyncio.to_thread(terminal.run, "status")
        assert re.search(r"(?m)^floods +bob has 184 of what waits in default$", status.out)
        scripted.gate.set()
        await asyncio.gather(*few, *many)


async def test_an_operator_pauses_resumes_weighs_and_retries(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    async with keyed(settings, tmp_path) as (gateway, browsers):
        chief = browsers["chief"]
        queue = Queue(settings)
        for kind, name in (("tenant", "alice"), ("environment", "default")):
            fields = {"kind": kind, "name": name}
            answer = await change(gateway, chief, "/page/pause", **fields, paused="yes")
            assert answer.headers["Location"] == f"../#{kind}s"
            assert f"{kind[0]}:{name}" in (await queue.status()).paused
            assert "is paused for" in await shown(gateway, chief)
            await change(gateway, chief, "/page/pause", **fields, paused="no")
            assert not (await queue.status()).paused
        for weight, known in (("2.5", {"bob": 2.5}), ("", {})):
            await change(gateway, chief, "/page/weight", tenant="bob", weight=weight)
            assert (await queue.status()).weights == known
        for fields in ({"weight": "nan"}, {"weight": "0"}, {"weight": "x"}, {"tenant": "a b"}):
            wrong = {"tenant": "bob", "weight": "1", **fields}
            answer = await change(gateway, chief, "/page/weight", **wrong)
            assert answer.status_code == 422, fields
        unknown = {"kind": "environment", "name": "nowhere", "paused": "yes"}
        assert (await change(gateway, chief, "/page/pause", **unknown)).status_code == 404

        letter = new_request_id(1)
        await bury(settings, letter, tenant="bob", code="-- once more")
        # By script the part of the page comes back, and without one the page.
        answer = await change(
            gateway, {**chief, "HX-Request": "true"}, "/page/dead/retry", request_id=letter
        )
        assert answer.status_code == 200
        assert letter not in answer.text
        await eventually(lambda: "-- once more" in [each.code for each in scripted.seen])
        assert await queue.dead_request_ids(9) == []
        await queue.close()


async def test_a_key_sees_its_environments_alone(settings: Settings, tmp_path: Path) -> None:
    keys = ({"secret": "narrow", "environments": ["one"]}, OPERATOR)
    async with (
        working(settings, Scripted("one")),
        working(settings, Scripted("two")),
        keyed(settings, tmp_path, *keys) as (gateway, browsers),
    ):
        for secret, visible in (("narrow", False), ("chief", True)):
            page = await shown(gateway, browsers[secret])
            assert ("two" in re.findall(r'class="name">(\w+)<', page)) is visible
            assert "one" in re.findall(r'class="name">(\w+)<', page)
        form = {"code": "-- accepted", "environment": "two"}
        assert (await change(gateway, browsers["narrow"], "/page/check", **form)).status_code == 403


async def test_a_key_that_may_only_submit_sees_no_fleet(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    keys = ({"secret": "sender", "rights": ["submit"]}, {"secret": "watcher", "rights": ["status"]})
    async with keyed(settings, tmp_path, *keys) as (gateway, browsers):
        root = await gateway.http.get("/", headers=browsers["sender"])
        assert root.headers["Location"] == "./page/check"
        answer = await gateway.http.get("/page/events", headers=browsers["sender"])
        assert answer.status_code == 403
        answer = await change(gateway, browsers["watcher"], "/page/check", code="-- accepted")
        assert answer.status_code == 403
        assert "right &#39;submit&#39;" in answer.text


async def test_a_text_is_checked_and_its_page_tells_all(
    gateway: Gateway, scripted: Scripted
) -> None:
    code = "theorem t (p : Prop) : p := by\n  oops"
    messages = (
        Message("error", 2, 2, "unknown tactic <oops>", 2, 6),
        Message("warning", 7, 0, "beyond the text"),
    )
    scripted.replies[code] = Reply(
        "rejected", messages, (Sorry(1, 3, "⊢ p", STATE),), reason="lean_error"
    )
    # Browsers end the lines of a form so.
    answer = await change(gateway, HTML, "/page/check", code=code.replace("\n", "\r\n"))
    assert answer.status_code == 303
    where = urljoin("/page/check", answer.headers["Location"])
    page = ""

    async def has_ended() -> bool:
        nonlocal page
        page = await shown(gateway, {}, where)
        return "rejected" in page

    await eventually(has_ended)
    assert '<mark class="error">oops</mark>' in page
    assert "unknown tactic &lt;oops&gt;" in page
    assert "beyond the text" in page
    for text in ("lean_error", "⊢ p", STATE, "In the queue", "CPU in Lean"):
        assert text in page
    # A goal stands behind the line of its sorry, and once.
    assert page.index('id="L1"') < page.index("⊢ p") < page.index('id="L2"')
    assert page.count("⊢ p") == 1
    text = await gateway.http.get(f"{where}/text")
    assert text.text == code
    assert text.headers["Content-Disposition"].startswith("attachment")
    assert text.headers["Content-Type"].startswith("text/plain")

    target = {"code": "theorem t : a := b", "target": "theorem t : a := sorry"}
    await change(gateway, HTML, "/page/check", **target)
    await eventually(lambda: scripted.seen[-1].op == "verify")
    assert (await change(gateway, {}, "/page/check", code=" ")).status_code == 422
    assert (await change(gateway, {}, "/page/check", code="a\0b")).status_code == 422


@pytest.mark.slow
@pytest.mark.parametrize("lines", [0, 1900], ids=["small", "large"])
async def test_a_request_is_seen_while_it_runs_and_withdrawn(
    gateway: Gateway, scripted: Scripted, lines: int
) -> None:
    code = "\n".join(["-- held up", *(f"-- line {n}" for n in range(lines))])
    script = {"HX-Request": "true"}
    answer = await change(gateway, script, "/page/check", code=code)
    assert answer.status_code == 200
    assert "/live" in answer.text
    await eventually(lambda: scripted.running == [code])
    [request_id] = re.findall(r'name="request_id" value="([^"]+)"', answer.text)
    where = f"/page/requests/{request_id}"
    page = await shown(gateway, {}, where)
    assert "running" in page
    assert "<dt>runs</dt>" in page
    assert "-- held up" in await shown(gateway, {}, where)
    assert not lines or f"-- line {lines - 1}" in await shown(gateway, {}, where)
    looks = await gateway.http.get("/", headers=HTML)
    assert request_id.partition("~")[2] in looks.text
    answer = await change(gateway, script, "/page/withdraw", request_id=request_id)
    assert "cancelled" in answer.text
    await eventually(lambda: scripted.stopped == [code])


@pytest.mark.parametrize("code", [text for text in HOSTILE if "\0" not in text])
async def test_a_hostile_text_is_shown_and_is_nothing_else(
    gateway: Gateway, scripted: Scripted, code: str
) -> None:
    evil = code.replace("\r", "\n")
    told = tuple(Message("error", 1, n, f"{code}\0", 1, n + 9) for n in range(3))
    scripted.replies[evil] = Reply(
        "rejected", told, (Sorry(1, 0, code, None),), reason="lean_error"
    )
    answer = await change(gateway, {"HX-Request": "true"}, "/page/check", code=evil)
    where = "/" + re.findall(r'href="(page/requests/[^"/]+)"', answer.text)[0]
    page = ""

    async def has_ended() -> bool:
        nonlocal page
        page = await shown(gateway, {}, where)
        return "rejected" in page

    await eventually(has_ended)
    for phase in ("waited", "claimed", "elaborated", "settled"):
        assert f"<dt>{phase}</dt>" in page
    article = page.split('<article id="request"')[1]
    for markup in ("<script", "<img", "<svg/", "<form action=//", "\u202e", "\x1b", "\r", "\x00"):
        assert markup not in article, markup
    assert not re.search(r"<[^>]*\son\w+=", article)


async def test_hostile_names_in_redis_are_shown_and_are_nothing_else(
    gateway: Gateway, settings: Settings
) -> None:
    keys = Keys(settings.prefix)
    name = "<img src=x onerror=alert(1)>\u202e\r\nevent: summary\r\ndata: gone\"'"
    with redis.Redis.from_url(settings.url) as connection:
        connection.zadd(keys.of("workers"), {name: time.time() * 1000 + 60_000})
        connection.hset(f"{keys.tag}:info", name, b"\xc1 no msgpack")
        connection.hset(f"{keys.tag}:paused", f"t:{name}", 1)
        connection.hset(
            keys.of("scaler"), name, b'{"at": 9e9, "target": 1, "order": 1, "reason": "<b>", '
        )
        connection.hset(f"{keys.tag}:stats", f"f:{name}:<b>", 5)
        connection.zadd(keys.of("dead"), {name: 1})
        page = await shown(gateway, {})
        assert "&lt;img" in page
        for markup in ("<img src=x", "<b>5", "\u202e", "\r"):
            assert markup not in page
        async with gateway.http.stream("GET", "/page/events") as stream:
            async for line in stream.aiter_lines():
                assert not line.startswith(("data: gone", "event: summary<"))
                if line == "event: scaler":
                    break
        connection.zrem(keys.of("workers"), name)
        connection.hdel(f"{keys.tag}:info", name)
        connection.hdel(f"{keys.tag}:paused", f"t:{name}")
        connection.hdel(keys.of("scaler"), name)
        connection.zrem(keys.of("dead"), name)


async def events_of(gateway: Gateway, headers: dict[str, str], told: list[str]) -> None:
    async with gateway.http.stream("GET", "/page/events", headers=headers) as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        async for line in stream.aiter_lines():
            name, _, event = line.partition(": ")
            told += [event] if name == "event" else []


@pytest.mark.slow
async def test_all_who_watch_share_one_look(
    gateway: Gateway, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = FleetLooks._look  # noqa: SLF001

    async def counted(self: FleetLooks) -> Any:
        nonlocal looks
        looks += 1
        return await look(self)

    monkeypatch.setattr(FleetLooks, "_look", counted)
    told: list[list[str]] = [[] for _ in range(20)]
    watching = [asyncio.create_task(events_of(gateway, {}, each)) for each in told]
    await eventually(lambda: all(len(each) >= len(SECTIONS) for each in told))
    assert {"summary", "dead", "scaler"} <= {*told[0]}
    before = looks
    await gateway.check("-- rejected")
    counts = [each.count("verdicts") for each in told]
    await eventually(
        lambda: all(e.count("verdicts") > n for e, n in zip(told, counts, strict=True))
    )
    assert looks - before <= 5
    # What changes slowly is not sent again at once.
    assert all(each.count("history") == 1 for each in told)
    # Whoever watches does not hold the gateway's end up.
    started = time.monotonic()
    gateway.server.stop()
    await asyncio.gather(*watching)
    assert time.monotonic() - started < 5


def test_looks_that_are_kept_for_their_rates_are_small() -> None:
    def stats(at_s: float) -> FleetStats:
        used = {f"tenant-{number}": at_s + number for number in range(100)}
        made = {f"environment-{number}": EnvironmentStats() for number in range(10)}
        for each in made.values():
            each.submitted = int(at_s)
            each.tenants_cpu_s = {str(name): cpu_s + 1 for name, cpu_s in used.items()}
        return FleetStats(at_s, merged([]), made)

    looks = FleetLooks(cast("GatewayClient", SimpleNamespace(queues=())))
    tracemalloc.start()
    try:
        for at_s in range(1000, 1300, 2):
            looks._keep_totals(stats(at_s))  # noqa: SLF001
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 4 << 20


@pytest.mark.slow
async def test_a_stream_ends_with_its_key(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    async with keyed(settings, tmp_path) as (gateway, browsers):
        told: list[str] = []
        watching = asyncio.create_task(events_of(gateway, browsers["alice"], told))
        await eventually(lambda: "scaler" in told)
        key_file(tmp_path, {"secret": "bob"})
        await asyncio.wait_for(watching, 60)
        assert told[-1] == "ended"


async def test_the_day_is_shown_when_all_workers_are_gone(settings: Settings) -> None:
    queue = Queue(settings)
    await queue.register("gone", b"", {"default": b""})
    await queue.release("gone", [], leave=True)
    await queue.close()
    note_a_day(settings)
    await decide(settings)
    async with new_gateway(settings) as gateway:
        page = await shown(gateway, {})
        assert "No worker is alive" in page
        assert page.count("data-row=") > 80
        verdicts = page.split('id="verdicts"')[1].split("</section>")[0]
        day = [int(n.replace(",", "")) for n in re.findall(r"<td>([\d,]+)</td>", verdicts)]
        assert max(day) > 10_000
        assert "more come per second" in page
    with redis.Redis.from_url(settings.url) as connection:
        connection.delete(Keys(settings.prefix).of("scaler"))


async def test_a_queue_out_of_reach_is_said_without_where_it_is(one: Server) -> None:
    async with new_gateway(one.settings) as gateway:
        one.stop()
        answer = await gateway.http.get("/", headers=HTML)
        assert answer.status_code == 503
        assert "cannot reach its queue" in answer.text
        assert one.settings.url not in answer.text
        assert "Retry-After" in answer.headers
        # The browser looks again by itself.
        assert answer.headers["Refresh"] == "5"


async def test_a_withdrawn_request_is_no_failure(gateway: Gateway, scripted: Scripted) -> None:
    # What ended since this first look is counted.
    await shown(gateway, {})
    held = await gateway.http.post("/v1/check?wait=0", json={"code": "-- held", "request_id": "w"})
    assert held.status_code == 202
    await eventually(lambda: bool(scripted.running))
    assert (await gateway.http.delete("/v1/requests/w")).json()["verdict"] == "cancelled"

    async def is_counted() -> bool:
        return "cancelled" in await shown(gateway, {})

    await eventually(is_counted)
    page = await shown(gateway, {})
    (failed,) = re.findall(r"(?s)<dt>No verdict</dt>\s*<dd>(.*?)</dd>", page)
    assert failed.strip() == "0"


async def test_forms_keep_to_the_limits_of_their_key(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    small = {"secret": "alice", "body_mb": 1, "outstanding_mb": 2}
    async with keyed(settings, tmp_path, small) as (gateway, who):
        text = "-- " + "a" * (1 << 20)
        assert (await change(gateway, who["alice"], "/page/check", code=text)).status_code == 413
        # Half of a form is held, and no more than the key allows of its tenant's.
        host, _, port = gateway.url.removeprefix("http://").partition(":")
        head = "".join(f"{name}: {value}\r\n" for name, value in who["alice"].items())
        form = f"POST /page/check HTTP/1.1\r\nHost: {host}:{port}\r\nOrigin: {gateway.url}\r\n"
        begun = f"{form}{head}Content-Length: 900000\r\n\r\ncode={'a' * 800_000}".encode()
        pairs = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        for _, writer in pairs:
            writer.write(begun)
            await writer.drain()
        reading = {asyncio.ensure_future(reader.read(64)) for reader, _ in pairs}
        async with asyncio.timeout(60):
            (refused,), waiting = await asyncio.wait(reading, return_when="FIRST_COMPLETED")
        assert refused.result().startswith(b"HTTP/1.1 429")
        assert len(waiting) == 2
        for _, writer in pairs:
            writer.close()
        await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.slow
async def test_the_page_of_a_text_is_cut_whatever_stands_in_it(
    gateway: Gateway, scripted: Scripted
) -> None:
    for text in ("\u202e\u202d" * 300_000, "<\n" * 300_000, "∀" * 600_000):
        scripted.replies[f"-- {text}"] = Reply(
            "rejected",
            tuple(Message("error", line, 0, text[:20_000]) for line in range(1, 300)),
            reason="lean_error",
        )
        began_s = time.process_time()
        answer = await change(
            gateway, {**HTML, "HX-Request": "true"}, "/page/check", code=f"-- {text}"
        )
        assert answer.status_code == 200
        request_id = re.findall(r"page/requests/([^/\"]+)", answer.text)[0]
        await gateway.http.get(f"/v1/requests/{request_id.partition('~')[2]}?wait=60")
        shown_ = await gateway.http.get(f"/page/requests/{request_id}", headers=HTML)
        assert shown_.status_code == 200
        assert len(shown_.content) < 3_000_000
        assert time.process_time() - began_s < 10
        assert "more lines" in shown_.text or "more characters" in shown_.text


@pytest.mark.slow
async def test_the_streams_of_one_key_leave_room_for_others(
    settings: Settings, scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanq.gateway.page.routes._MOST_WATCHERS_OF_KEY", 3)
    async with (
        keyed(settings, tmp_path, {"secret": "alice"}, OPERATOR) as (gateway, who),
        contextlib.AsyncExitStack() as opened,
    ):
        events: list[AsyncIterator[bytes]] = []

        async def watch(headers: dict[str, str]) -> int:
            stream = gateway.http.stream("GET", "/page/events", headers=headers)
            answer = await opened.enter_async_context(stream)
            if answer.status_code == 200:
                events.append(answer.aiter_bytes())
                await anext(events[-1])
            return answer.status_code

        assert [await watch(who["alice"]) for _ in range(4)] == [200, 200, 200, 503]
        assert await watch(who["chief"]) == 200


async def test_streams_of_one_key_that_come_at_once_are_counted(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanq.gateway.page.routes._MOST_WATCHERS_OF_KEY", 3)
    ask = b"GET /page/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer alice\r\n\r\n"
    async with keyed(settings, tmp_path, {"secret": "alice"}) as (gateway, _):
        where = gateway.http.base_url.host, gateway.http.base_url.port
        opened = [await asyncio.open_connection(*where) for _ in range(12)]
        # The gateway shares this loop, so it finds them all in one turn.
        for _, writer in opened:
            writer.write(ask)
        answers = [await reader.readuntil(b"\r\n") for reader, _ in opened]
        for _, writer in opened:
            writer.close()
        assert sum(b" 200 " in answer for answer in answers) == 3
        assert sum(b" 503 " in answer for answer in answers) == 9
