"""The page in a real browser: live, by keyboard, on a phone, in both themes, with hostile texts."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import redis
from support.gateway.gateways import Gateway, Scripted, key_file, new_gateway
from support.gateway.pages import HOSTILE, Browser, bury, decide, new_browser, note_a_day
from support.queue.queues import Queue
from support.waiting import eventually

from leanq.fleet.stats import DecisionRecord
from leanq.gateway.keys import KeyFile
from leanq.queue.keys import Keys, new_request_id
from leanq.queue.requests import Message, Reply, Sorry
from leanq.queue.settings import Settings

pytestmark = [
    pytest.mark.slow,
    # Of the standard library's, in playwright's transport.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KEYS = (
    {"secret": "chief", "tenant": "ops", "rights": ["submit", "status", "operate"]},
    {"secret": "alice"},
)
WIDTHS = (360, 820, 1440)
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture
async def gateway(settings: Settings, scripted: Scripted, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with keys, in front of a fleet with something to see."""
    note_a_day(settings)
    await decide(settings)
    queue = Queue(settings)
    await queue.set_paused("tenant", "carol", paused=True)
    await queue.set_weight("alice", 2)
    file = key_file(tmp_path, *KEYS)
    async with new_gateway(settings, keys=KeyFile(file)) as made:
        yield made
    await queue.set_paused("tenant", "carol", paused=False)
    await queue.set_weight("alice", None)
    await queue.call(lambda connection: connection.delete(queue.keys.of("scaler")))
    await queue.close()


@contextlib.asynccontextmanager
async def logged_in(
    gateway: Gateway, folder: Path, key: str = "chief", width: int = 1440, *, dark: bool = False
) -> AsyncIterator[Browser]:
    async with new_browser(gateway.url, folder, width=width, dark=dark) as browser:
        await browser.log_in(key)
        yield browser
        browser.check()


async def test_the_overview_is_live_without_being_loaded_again(
    gateway: Gateway, settings: Settings, tmp_path: Path
) -> None:
    async with logged_in(gateway, tmp_path) as browser:
        page = browser.page
        await browser.live()
        await page.evaluate("window.here = 'since the first load'")
        rejected = page.locator("#verdicts tr", has_text="rejected").locator("td").last
        before = await rejected.inner_text()
        await gateway.http.post(
            "/v1/check", json={"code": "-- rejected"}, headers={"Authorization": "Bearer alice"}
        )
        after = f"{int(before.replace(',', '')) + 1:,}"
        await rejected.filter(has_text=after).wait_for()
        # A dead letter appears, is retried, and is gone.
        letter = new_request_id(1)
        await bury(settings, letter, tenant="alice", code="-- accepted")
        row = page.locator("#dead tbody tr")
        await row.wait_for()
        await row.get_by_text("Retry").click()
        await row.wait_for(state="detached")
        # So is another, after a question.
        await bury(settings, new_request_id(1), tenant="alice", code="-- accepted")
        page.once("dialog", lambda dialog: dialog.accept())
        await row.get_by_text("Drop").click()
        await row.wait_for(state="detached")
        # What is being typed stays, whatever else changes.
        weight = page.get_by_label("Weight of alice")
        await weight.fill("3.5")
        await gateway.http.post(
            "/v1/check", json={"code": "-- timeout"}, headers={"Authorization": "Bearer alice"}
        )
        await page.locator("#verdicts tr", has_text="timeout").wait_for()
        assert await weight.input_value() == "3.5"
        await weight.press("Enter")
        queue = Queue(settings)

        async def weighs() -> bool:
            return (await queue.status()).weights.get("alice") == 3.5

        await eventually(weighs)
        await queue.close()
        assert await page.locator(".chart canvas").count() == 3
        assert await page.evaluate("window.here") == "since the first load"


async def test_a_text_is_checked_live_and_hostile_ones_are_inert(
    gateway: Gateway, scripted: Scripted, tmp_path: Path
) -> None:
    async with logged_in(gateway, tmp_path, "alice") as browser:
        page = browser.page
        await browser.go("/page/check")
        title = await page.title()
        await page.fill("#code", "-- held for a while")
        await page.press("#code", "Control+Enter")
        await page.locator("#verdict .v-pending").wait_for()
        await eventually(lambda: bool(scripted.running))
        scripted.gate.set()
        await page.locator("#verdict .v-accepted").wait_for()

        code = "\n".join(text.replace("\r", "") for text in HOSTILE)
        messages = [
            Message("error", number, 0, text, number, 10_000)
            for number, text in enumerate(HOSTILE, 1)
        ]
        messages.append(Message("error", 2, 3, "\0" + "long " * 200_000, 2, 9))
        messages += [Message("warning", 3, 0, f"{HOSTILE[1]} {n}") for n in range(10_000)]
        sorries = (Sorry(1, 0, HOSTILE[0], None),)
        scripted.replies[code] = Reply("rejected", tuple(messages), sorries, reason="lean_error")
        await page.fill("#code", code)
        await page.click("button.main")
        await page.locator("#verdict .v-rejected").wait_for()
        assert await page.locator("#verdict .line").count() == code.count("\n") + 1
        assert await page.locator("#verdict .unseen").count() >= 9
        for selector in ("#verdict img", "#verdict script", "#verdict article form", "#verdict h1"):
            assert await page.locator(selector).count() == 0, selector
        # Also as a page of its own, and after all of it has been touched.
        await page.click("#verdict .headline a.id")
        await page.locator("main .v-rejected").wait_for()
        for mark in await page.locator("mark").all():
            await mark.hover()
        shown = await page.locator(".line code").first.inner_text()
        assert shown == HOSTILE[0]
        assert await page.evaluate(OVERFLOW) <= 0
        assert title != "gone"
        assert "gone" not in await page.title()


async def test_what_cannot_be_done_is_said(gateway: Gateway, tmp_path: Path) -> None:
    async with new_browser(gateway.url, tmp_path) as browser:
        await browser.go("/")
        await browser.page.fill("#key", "wrong")
        await browser.page.press("#key", "Enter")
        await browser.page.get_by_text("This key is not known").wait_for()
        await browser.log_in("alice")
        await browser.go("/page/check")
        await browser.page.fill("#code", "   ")
        await browser.page.click("button.main")
        await browser.page.locator("#said", has_text="the text is empty").wait_for()
        await browser.page.get_by_text("Log out").click()
        await browser.page.locator("#key").wait_for()
        assert browser.told.elsewhere == []
        # The browser and htmx note each answer that refuses, and there is nothing else.
        assert all(re.search("(status of|Error Code) 4", text) for text in browser.told.errors)


async def test_every_control_is_reached_and_used_by_keyboard(
    gateway: Gateway, settings: Settings, tmp_path: Path
) -> None:
    await bury(settings, letter := new_request_id(1), tenant="alice", code="-- accepted")
    async with logged_in(gateway, tmp_path) as browser:
        page = browser.page
        await browser.live()
        await page.evaluate("document.activeElement.blur()")
        controls = "a[href], button, input:not([type=hidden]), select, textarea, summary"
        visible = f"[...document.querySelectorAll('{controls}')].filter(e => e.checkVisibility())"
        count = await page.evaluate(f"{visible}.length")
        reached = set()
        for _ in range(count + 5):
            await page.keyboard.press("Tab")
            reached.add(
                await page.evaluate(
                    "(() => { const e = document.activeElement, s = getComputedStyle(e);"
                    f"return {visible}.indexOf(e) + (s.outlineStyle === 'none' ? ' unseen' : '')"
                    "})()"
                )
            )
        assert {str(number) for number in range(count)} <= reached, count
        # By Enter alone: the letter is retried.
        await page.locator("#dead").get_by_text("Retry").focus()
        await page.keyboard.press("Enter")
        await page.locator("#dead tbody tr").wait_for(state="detached")
        # The first Tab on a page leads to its content.
        await browser.go("/")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        assert await page.evaluate("document.activeElement.id") == "main"
    del letter


@pytest.mark.parametrize("dark", [False, True])
async def test_it_fits_every_width_in_both_themes(
    gateway: Gateway, settings: Settings, scripted: Scripted, tmp_path: Path, dark: bool
) -> None:
    long = "tenant-with-the-longest-name-that-there-can-be-0123456789-abcdef"
    await bury(settings, new_request_id(1), tenant=long, code="-- accepted")
    scripted.replies["x" * 3000] = Reply("rejected", (Message("error", 1, 0, "y" * 3000),))
    async with logged_in(gateway, tmp_path, dark=dark) as browser:
        page = browser.page
        ground = "getComputedStyle(document.body).backgroundColor"
        dark_ground, light_ground = "rgb(18, 21, 26)", "rgb(246, 247, 249)"
        assert await page.evaluate(ground) == (dark_ground if dark else light_ground)
        for width in WIDTHS:
            await page.set_viewport_size({"width": width, "height": 800})
            await browser.go("/")
            await browser.live()
            assert await page.evaluate(OVERFLOW) <= 0, width
            await browser.go("/page/check")
            await page.fill("#code", "x" * 3000)
            await page.click("button.main")
            await page.locator("#verdict .v-rejected").wait_for()
            assert await page.evaluate(OVERFLOW) <= 0, width
        # The switch counts more than the system, and is kept.
        await page.click("#theme")
        await browser.go("/")
        assert await page.evaluate(ground) == (light_ground if dark else dark_ground)
        await page.locator("#dead").get_by_text("Retry").click()
        await page.locator("#dead tbody tr").wait_for(state="detached")


async def test_hostile_names_in_every_place_are_inert(
    gateway: Gateway, settings: Settings, tmp_path: Path
) -> None:
    keys = Keys(settings.prefix)
    names = [text.replace("\r", "\n") for text in HOSTILE]
    with redis.Redis.from_url(settings.url) as connection:
        forged = {
            f"{keys.tag}:info": dict.fromkeys(names, b"\xc1 no msgpack"),
            f"{keys.tag}:paused": {f"{kind}:{name}": 1 for name in names for kind in "te"},
            f"{keys.tag}:stats": {f"f:{name}:{name}": 5 for name in names},
            f"{keys.tag}:environments": dict.fromkeys(names, 1),
            keys.of("scaler"): {
                name: msgspec.json.encode(DecisionRecord(time.time(), 1, 1, name, name, name))
                for name in names
            },
        }
        try:
            for key, fields in forged.items():
                kind = connection.type(key)
                if kind in (b"hash", b"none"):
                    connection.hset(key, mapping=fields)
            connection.zadd(keys.of("workers"), dict.fromkeys(names, time.time() * 1000 + 60_000))
            connection.zadd(keys.of("dead"), dict.fromkeys(names, 1))
            async with logged_in(gateway, tmp_path) as browser:
                page = browser.page
                dialogs: list[str] = []
                page.on("dialog", lambda dialog: dialogs.append(dialog.message))
                await page.evaluate(
                    "document.addEventListener('securitypolicyviolation',"
                    " e => console.error('refused: ' + e.blockedURI))"
                )
                await browser.live()
                await page.get_by_text("img src=x").first.wait_for()
                for mark in await page.locator("summary").all():
                    await mark.focus()
                inert = await page.evaluate(
                    "[...document.querySelectorAll('*')].every(each => "
                    "each.getAttributeNames().every(name => !name.startsWith('on')))"
                )
                assert inert
                for selector in ("img[src=x]", "main script", "form[action*=elsewhere]"):
                    assert await page.locator(selector).count() == 0, selector
                assert "elsewhere" in await page.locator("body").inner_text()
                assert await page.title() not in ("gone", "1")
                assert dialogs == []
        finally:
            for key, fields in forged.items():
                if connection.type(key) == b"hash":
                    connection.hdel(key, *fields)
            connection.zrem(keys.of("workers"), *names)
            connection.zrem(keys.of("dead"), *names)
