"""What the tests of the page share: fleets with something to see, and a browser that tells all."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec
import redis

from leanq.fleet.stats import DecisionRecord
from leanq.queue.keys import Keys
from leanq.queue.metrics import BUCKETS_S
from leanq.queue.requests import Request
from leanq.queue.results import Submission
from leanq.queue.settings import Settings
from leanq.queue.wire import pack_request
from support.queue.queues import Queue
from support.required import missing

HTML = {"Accept": "text/html"}
BROWSER_TIMEOUT_MS = 60_000

# What a candidate might try to be taken for.
HOSTILE = (
    "theorem t : True := trivial -- </script><script>document.title='gone'</script>",
    "-- <img src=x onerror=\"document.title='gone'\"> <svg/onload=document.title='gone'>",
    "-- \" onmouseover=\"document.title='gone' ' onfocus='document.title=1' autofocus '",
    "-- <form action=//elsewhere.example><button hx-get=//elsewhere.example hx-trigger=load>",
    "-- \u202eesrever\u202c \u2066isolated\u2069 zero\u200bwidth \ufeff \u2028 \x1b[31m \x7f",
    "-- {{ 7 * 7 }} {% raw %} ${7*7} &lt;b&gt; &#60;b&#62; javascript:alert(1)",
    "-- \r\revent: summary\rdata: <h1>taken over</h1>\r\r",
)


async def bury(
    settings: Settings, request_id: str, *, tenant: str, code: str, environment: str = "default"
) -> None:
    """Makes a dead letter in an environment that workers offer, without any of them dying."""
    body = pack_request(Request(op="check", code=code))
    asked = Submission(request_id, environment, tenant, 1, 0, 60_000, body)
    queue = Queue(settings)
    keys = queue.keys
    try:
        # Else a worker would be faster.
        await queue.set_paused("tenant", tenant, paused=True)
        await queue.submit("nobody", [asked])
        with redis.Redis.from_url(settings.url) as connection:
            record: Any = connection.get(keys.request(request_id))
            letter = {"record": record, "n": 3, "w": f"spot-17-{request_id[-4:]}"}
            connection.hset(keys.of("deadreq", request_id), mapping=letter)
            connection.zadd(keys.of("dead"), {request_id: int(time.time() * 1000)})
        await queue.cancel([request_id])
    finally:
        await queue.set_paused("tenant", tenant, paused=False)
        await queue.close()


def note_a_day(settings: Settings, environment: str = "default") -> None:
    """Writes what the scripts would have noted in a day, of which two hours without workers."""
    keys, now = Keys(settings.prefix), int(time.time() // 60)
    totals = {"f:accepted": 0, "f:rejected": 0, "f:incomplete": 0, "f:timeout": 0}
    waited = ran = cpu = 0
    took: Counter[int] = Counter()
    with redis.Redis.from_url(settings.url) as connection:
        for minute in range(now - 1440, now - 5, 5):
            hour = (minute % 1440) / 60
            work = 0.0 if 3 <= hour < 5 else 1 + math.sin((hour - 8) / 24 * 2 * math.pi)
            done = int(220 * work)
            shares = {"accepted": 0.34, "rejected": 0.5, "incomplete": 0.13, "timeout": 0.03}
            for verdict, share in shares.items():
                totals[f"f:{verdict}"] += int(done * share)
            waited += int(done * (300 + 900 * work))
            ran += int(done * (1500 + 400 * work))
            cpu += int(done * 1300)
            # Most take some seconds, and those of the busy hours longer.
            for share, seconds in ((0.3, 1.0), (0.6, 1.5 + work), (0.1, 6 + 10 * work)):
                took[bisect_left(BUCKETS_S, seconds)] += int(done * share)
            finished = {f"f:{environment}:{n[2:]}": count for n, count in totals.items()}
            note = {
                **finished,
                f"s:{environment}": sum(totals.values()),
                f"w_ms:{environment}": waited,
                f"r_ms:{environment}": ran,
                f"u_ms:{environment}": cpu,
                **{f"t:{environment}:{bucket}": count for bucket, count in took.items()},
                f"u:{environment}:alice": int(cpu * 0.62),
                f"u:{environment}:bob": int(cpu * 0.38),
                f"waiting:{environment}": int(60 * work * work),
                "workers": math.ceil(4 * work),
            }
            connection.zadd(keys.of("minutes"), {msgspec.msgpack.encode((minute, note)): minute})
        # The totals go on from there.
        stats = {
            name: count for name, count in note.items() if name[:2] in ("f:", "s:", "u:", "t:")
        }
        times = {name: count for name, count in note.items() if "_ms:" in name}
        for name, count in (stats | times).items():
            connection.hincrby(f"{keys.tag}:stats", name, count)


async def decide(settings: Settings, environment: str = "default") -> None:
    """Tells the queue what a scaler would."""
    queue = Queue(settings)
    made = (
        ("load", 3, 2, "14 wait and 2 run at 1.9 s, 0.8 more come per second; 2 workers ready"),
    )
    for reason, target, order, text in made:
        record = DecisionRecord(time.time() - 40, target, order, reason, text, "leanq-scaler-0")
        await queue.publish_decisions({environment: msgspec.json.encode(record)})
    await queue.close()


@dataclass
class Told:
    """What a browser has told of a page.

    Attributes:
        errors: what stood in the console, or was thrown.
        elsewhere: requests to other hosts.
    """

    errors: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


@dataclass
class Browser:
    """A browser of a user's own, at one gateway."""

    url: str
    told: Told
    page: Any
    context: Any
    _browser: Any

    async def go(self, path: str) -> None:
        """Opens a page of the gateway's."""
        await self.page.goto(f"{self.url}{path}", wait_until="load")

    async def log_in(self, key: str) -> None:
        """Gives the form a key."""
        await self.go("/")
        await self.page.fill("#key", key)
        await self.page.press("#key", "Enter")
        await self.page.wait_for_selector("#summary, #check")

    async def live(self) -> None:
        """Waits until the page has heard from the gateway."""
        await self.page.wait_for_selector("#state.live-now")

    def check(self) -> None:
        """Nothing was wrong with any page, and nothing came from elsewhere."""
        assert self.told.errors == []
        assert self.told.elsewhere == []


def chromium() -> str:
    """Where Debian's Chromium is; skips the test where there is none."""
    found = shutil.which("chromium")
    if found is None:
        missing("chromium (apt-get install chromium)")
    return str(found)


@contextlib.asynccontextmanager
async def new_browser(
    url: str,
    folder: Path,
    *,
    width: int = 1440,
    height: int = 1000,
    dark: bool = False,
) -> AsyncIterator[Browser]:
    """A headless browser with nothing kept from before, that can reach this machine alone."""
    program = chromium()
    from playwright.async_api import async_playwright

    flags = (
        *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update"),
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
    )
    async with async_playwright() as playwright:
        context = await playwright.chromium.launch_persistent_context(
            folder / "profile",
            executable_path=program,
            args=flags,
            headless=True,
            env={**os.environ, "HOME": str(folder)},
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
        )
        context.set_default_timeout(BROWSER_TIMEOUT_MS)
        told = Told()
        host = urlsplit(url).netloc

        def asked(request: Any) -> None:
            parts = urlsplit(request.url)
            if parts.scheme not in ("data", "about") and parts.netloc != host:
                told.elsewhere.append(request.url)

        def said(message: Any) -> None:
            if message.type in ("error", "warning"):
                told.errors.append(message.text)

        context.on("request", asked)
        context.on("console", said)
        context.on("weberror", lambda error: told.errors.append(str(error.error)))
        [page] = context.pages
        try:
            yield Browser(url, told, page, context, None)
        finally:
            await context.close()


async def log_in(http: httpx2.AsyncClient, url: str, key: str) -> dict[str, str]:
    """The headers of a browser that has given the form a key."""
    ours = {"Origin": url, **HTML}
    answer = await http.post("/page/login", data={"key": key}, headers=ours)
    assert answer.status_code == 303, answer.text
    # Several browsers share the client.
    http.cookies.clear()
    return {**cookie_of(answer), **ours}


def cookie_of(answer: httpx2.Response) -> dict[str, str]:
    """What a browser would send after a login."""
    name, _, rest = answer.headers["Set-Cookie"].partition("=")
    return {"Cookie": f"{name}={rest.partition(';')[0]}"}
