"""Infotrees: what the REPL prints of how Lean has elaborated a text, in the reply to a check."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.lean.sites import Site, check
from support.lean.tiny import BAD, GOOD
from support.paths import TRANSCRIPTS

from leanq.lean.repl import driver as driver_module
from leanq.queue.requests import Reply


def tree_of(reply: Reply) -> Any:
    return None if reply.infotree is None else json.loads(reply.infotree)


def made(text: str) -> list[dict[str, Any]]:
    return [{"node": {"stx": {"pp": text.strip()}}, "kind": "CommandInfo", "children": []}]


@pytest.mark.slow
@pytest.mark.skipif(not TRANSCRIPTS.exists(), reason=f"there are no transcripts in {TRANSCRIPTS}")
@pytest.mark.parametrize("name", ["infotree", "infotree_theorem"])
async def test_a_reply_has_the_tree_that_was_recorded(site: Site, name: str) -> None:
    request, answer = (
        json.loads((TRANSCRIPTS / f"{name}.{end}").read_text()) for end in ("in", "expected.out")
    )
    driver = await site.standin("--know", str(TRANSCRIPTS), "--only", name)
    asked = check(request["cmd"], audit=False, infotree=request["infotree"])
    reply = await driver.run(asked)
    assert tree_of(reply) == answer["infotree"]
    assert (await driver.run(check(request["cmd"], audit=False))).infotree is None


async def test_every_verdict_of_leans_comes_with_its_tree(site: Site) -> None:
    driver = await site.standin()
    hole = "theorem two := by sorry\n"
    for text, verdict in ((GOOD, "unjudged"), (BAD, "rejected"), (hole, "incomplete")):
        reply = await driver.run(check(text, audit=False, infotree="full"))
        assert (reply.verdict, tree_of(reply)) == (verdict, made(text))
        # What the REPL would accept is for Lean to say; the tree is the REPL's all the same.
        reply = await driver.run(check(text, infotree="full"))
        assert (reply.error, tree_of(reply)) == (None, made(text))


@pytest.mark.slow
async def test_a_text_that_the_repl_cannot_tell_of_has_a_verdict_and_says_why_no_tree(
    site: Site,
) -> None:
    driver = await site.standin()
    reply = await driver.run(check(f"{BAD}-- standin:crash", infotree="tactics"))
    assert (reply.verdict, reply.infotree) == ("rejected", None)
    assert "there is no infotree: no process of the REPL" in reply.messages[0].text
    # A timeout says nothing about the text, its tree neither.
    slow = check(f"{GOOD}-- standin:spin", timeout_s=0.3, audit=False, infotree="full")
    reply = await driver.run(slow)
    assert (reply.verdict, reply.infotree) == ("timeout", None)


async def test_a_tree_that_is_too_large_for_a_reply_is_left_out(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "MAX_INFOTREE_BYTES", 1000)
    driver = await site.standin()
    reply = await driver.run(check(f"{BAD}-- {'x' * 1000}", infotree="full"))
    assert (reply.verdict, reply.infotree) == ("rejected", None)
    assert "a reply may have 1000 of it" in reply.messages[0].text
    reply = await driver.run(check(BAD, infotree="full"))
    assert tree_of(reply) == made(BAD)


async def test_without_the_repl_a_request_for_one_ends_with_an_error(site: Site) -> None:
    driver = await site.driver()
    reply = await driver.run(check(GOOD, infotree="full"))
    assert "no infotree can be had here" in (reply.error or "")
