"""Where messages and sorries stand, for texts with all kinds of headers, by real Lean."""

from __future__ import annotations

import pytest
from support.gateway.gateways import new_gateway

from leanq.queue.settings import Settings

HEADERS = (
    "",
    "\n\n",
    "/- of several\nlines -/ -- and one\n",
    "prelude\nimport Core\n",
    "prelude import Core ",
    "\n/- ∀ -/\n\nprelude -- x\n  import\n Core\n\n",
    "prelude\r\nimport Core\r\n",
    "prelude\nimport Core\n/-- of the theorem -/ ",
)
WRONG = "theorem t (α β : Prop) (h : α) : β := h"
OPEN = "theorem t (α : Prop) (h : α) : α := by sorry"


def place(text: str, word: str) -> dict[str, int]:
    """Where ``word`` stands for the last time: lines from 1, columns from 0 in code points."""
    before = text[: text.rindex(word)]
    return {"line": before.count("\n") + 1, "column": len(before) - before.rfind("\n") - 1}


@pytest.mark.slow
async def test_places_are_those_of_the_text_as_it_was_sent(fleet: Settings) -> None:
    async with new_gateway(fleet) as gateway:
        wrong = await gateway.check(*(header + WRONG for header in HEADERS))
        holes = await gateway.check(*(header + OPEN for header in HEADERS))
        unknown = "/- c -/\nprelude\n  import Nowhere\n" + WRONG
        missing = (await gateway.http.post("/v1/check", json={"code": unknown})).json()
    for header, found, hole in zip(HEADERS, wrong, holes, strict=True):
        [error] = (m for m in found["response"]["messages"] if m["severity"] == "error")
        assert error["pos"] == place(header + WRONG, "h"), header
        [sorry] = hole["response"]["sorries"]
        assert sorry["pos"] == place(header + OPEN, "sorry"), header
        assert sorry["endPos"] == {
            **sorry["pos"],
            "column": sorry["pos"]["column"] + len("sorry"),
        }
    # Lean has it at the beginning of the header.
    message = missing["messages"][0]
    assert {name: message[name] for name in ("line", "column")} == place(unknown, "prelude")
    assert "Nowhere" in message["text"]
