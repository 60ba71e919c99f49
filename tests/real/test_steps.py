"""Steps on texts with several holes, on a full library."""

from __future__ import annotations

import asyncio
import random
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.lean.libraries import Library, has_modules
from support.lean.sites import Site, check

from leanq.lean.driver import LeanDriver
from leanq.queue.requests import Reply, Request

ROWS: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "steps.toml").read_text())[
    "text"
]
"""Texts with holes, and what is said of steps on them."""


def said(reply: Reply) -> str:
    assert reply.error is None, reply.error
    return " ".join(filter(None, (reply.verdict, reply.reason)))


async def walk(driver: LeanDriver, state: str | None, tactics: list[str]) -> Reply:
    """The reply to the last of these steps, or to the first that leads nowhere."""
    for tactic in tactics:
        number, is_inside, text = tactic.removeprefix("in ").partition(":")
        inside = int(number) if is_inside and tactic.startswith("in ") else None
        text = tactic if inside is None else text
        reply = await driver.run(Request("step", state=state, tactic=text, timeout_s=120))
        state = reply.state if inside is None else reply.sorries[inside].state
        if state is None:
            break
    return reply


def in_layout(library: Library, source: str) -> str:
    return f"module\npublic section\n{source}" if has_modules(library.layout) else source


def test_there_are_enough_honest_steps() -> None:
    honest = [tactics for row in ROWS for _, tactics, end in row["steps"] if end == "accepted"]
    assert len(honest) >= 120
    assert max(map(len, honest)) >= 5


async def test_steps_beside_other_holes(
    library: Library, real_site: Site, subtests: pytest.Subtests
) -> None:
    driver = await real_site.driver(slots=2)
    turns = asyncio.Semaphore(2)

    async def replies(row: dict[str, Any]) -> list[Reply]:
        async with turns:
            opened = await driver.run(check(in_layout(library, row["source"])))
            assert said(opened) == "incomplete sorry", (row["source"], opened.messages)
            states = [sorry.state for sorry in opened.sorries]
            return [await walk(driver, states[hole], tactics) for hole, tactics, _ in row["steps"]]

    every = await asyncio.gather(*map(replies, ROWS))
    for number, (row, found) in enumerate(zip(ROWS, every, strict=True)):
        for (hole, tactics, expected), reply in zip(row["steps"], found, strict=True):
            with subtests.test(row=number, hole=hole, tactics=tactics):
                rules = (f"{said(reply)} {each.rule}" for each in reply.failed)
                assert expected in (said(reply), reply.verdict, *rules), reply.messages
                if expected == "accepted":
                    assert reply.axioms is not None
                    assert "sorryAx" in reply.axioms


# Parts of sketches, and for each of their holes tactics that close it, or seem to: HOLE stands for
# a tactic, TERM for a term.
_PARTS = (
    (
        "def f{0} (n : Nat) : Nat := TERM\n",
        (("exact n + 1", "exact 0", "cases n\nexact 1\nexact 2"),),
    ),
    (
        "theorem t{0} (p q : Prop) (hp : p) (hq : q) : q ∧ p := by\n"
        "  have h1 : p := by HOLE\n  have h2 : q := TERM\n  exact ⟨h2, TERM⟩\n",
        (("exact hp", "simp_all"), ("exact hq", "assumption"), ("exact h1", "exact hp")),
    ),
    (
        "theorem r{0} : ∀ n : Nat, 0 + n = n\n  | 0 => TERM\n  | n + 1 => by\n"
        "    have h := r{0} n\n    HOLE\n",
        (
            ("rfl", "simp", "exact r{0} 0"),
            ("omega", "rw [← Nat.add_assoc, h]", "exact r{0} (n + 1)"),
        ),
    ),
    (
        "theorem s{0} (n : Nat) : n < n + 1 ∧ n = n := by\n"
        "  by_cases h : n = 0\n  · HOLE\n  · have k := s{0} (n - 1)\n    exact ⟨by omega, rfl⟩\n"
        "termination_by n\ndecreasing_by HOLE\n",
        (
            ("simp [h]", "exact ⟨Nat.lt_succ_self n, rfl⟩", "exact s{0} n", "exact s{0} (n - 1)"),
            ("omega", "exact Nat.sub_lt (Nat.pos_of_ne_zero h) Nat.one_pos"),
        ),
    ),
    (
        "theorem c{0} (a b : Nat) (h : a = b) : a + 1 = b + 1 := by\n"
        "  calc a + 1 = b + 1 := by HOLE\n    _ = b + 1 := TERM\n",
        (("rw [h]", "omega"), ("rfl", "simp")),
    ),
    (
        "mutual\ntheorem x{0} (n : Nat) : n = n := TERM\n"
        "theorem y{0} (n : Nat) : n = n := TERM\nend\n",
        (("rfl", "exact y{0} n"), ("exact x{0} n", "rfl")),
    ),
    (
        "theorem m{0} (n : Nat) (h : n ≠ 0) : 0 < n := by\n"
        "  match n, h with\n  | 0, h => HOLE\n  | n + 1, _ => HOLE\n",
        (("exact absurd rfl h", "contradiction"), ("omega", "exact Nat.succ_pos n")),
    ),
    (
        "def d{0} (n : Nat) (h : n > 0) : Fin n := ⟨0, TERM⟩\n"
        "theorem v{0} (n : Nat) (h : n > 0) : (d{0} n h).val = 0 := TERM\n",
        (("exact h", "omega"), ("rfl", "simp [d{0}]")),
    ),
)


_HOLE = re.compile("HOLE|TERM")
_FILLED = {"HOLE": "({{\n{}\n}})", "TERM": "(by {{\n{}\n}})"}


async def test_holes_that_are_closed_one_by_one_make_a_proof(
    library: Library, real_site: Site
) -> None:
    """Whatever closes each hole of a sketch by itself, closes all of them together."""
    driver = await real_site.driver(slots=2)

    async def try_one(seed: int) -> bool:
        rng = random.Random(seed)
        source, tactics, definitions = "", list[str](), list[str]()
        for number, (text, holes) in enumerate(rng.sample(_PARTS, rng.randint(1, 2))):
            source += text.replace("{0}", str(number))
            tactics += [
                rng.choice((choices[0], *choices)).replace("{0}", str(number)) for choices in holes
            ]
            definitions += [f"{text[4]}{number}"] if text.startswith("def ") else []
        source = in_layout(library, source)
        sketch = _HOLE.sub("sorry", source)
        opened = await driver.run(check(sketch))
        assert len(opened.sorries) == len(tactics) > 0, opened.messages
        closed = {
            (await walk(driver, sorry.state, [tactic])).verdict
            for sorry, tactic in zip(opened.sorries, tactics, strict=True)
        }
        filling = iter(tactics)
        whole = _HOLE.sub(lambda hole: _FILLED[hole[0]].format(next(filling)), source)
        verified = await driver.run(
            Request("verify", code=whole, target=sketch, holes=tuple(definitions))
        )
        if closed == {"accepted"}:
            assert said(verified) == "accepted", (whole, verified.messages, verified.failed)
        return closed == {"accepted"}

    whole = [await asyncio.gather(try_one(seed), try_one(seed + 1)) for seed in range(0, 24, 2)]
    # Else nothing was tried.
    assert 4 <= sum(map(sum, whole)) < 24
