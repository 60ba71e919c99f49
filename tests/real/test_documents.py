"""Lean's language server on a full library: it says what plain Lean says, with and without the
symbols that forks need."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.lean.libraries import Library
from support.lean.sites import Site, check
from support.required import missing

from leanq.lean.environment import Environment, open_environment
from leanq.lean.run.documents import DocumentRules
from leanq.queue.metrics import COUNTS
from leanq.queue.requests import Reply

# A proof of which Lean checks an auxiliary declaration in the middle.
CHECKED_WITHIN = """def f (n : Nat) : Nat := match n with | 0 => sorry | k + 1 => f k
theorem t (n : Nat) : f n = f n ∧ n = n + 1 := by
  induction n with
  | zero =>
    simp only [f]
    exact nope
  | succ n ih =>
    simp only [f]
    exact nope
"""
WRONG = """theorem t (a b : Nat) (h : a < b) : a + 2 ≤ b := by
  have 𝔸 : a + 1 ≤ b := by omega
  · omega
#check nothing
theorem u (xs : List Nat) : xs ++ [] = xs := by simp; done
example : 1 = 2 := by
  decide
"""
RIGHT = "theorem t (a b : Nat) (h : a < b) : a + 1 ≤ b := by\n  omega\n"


@pytest.fixture
def stripped(library: Library, tmp_path: Path, cache: Path) -> Iterator[Environment]:
    """The library's Lean without the symbols of its programs."""
    if not shutil.which("strip"):
        missing("strip (binutils)")
    made = tmp_path / "stripped"
    shutil.copytree(library.lean.parents[1], made, symlinks=True)
    for path in (made / "bin" / "lean", *made.glob("lib/**/*.so*")):
        subprocess.run(["strip", "--strip-all", path], check=True, timeout=120)
    lean = str(made / "bin" / "lean")
    yield open_environment("stripped", None, lean=lean, cache=cache, environ={})
    # It is large.
    shutil.rmtree(made)


async def test_messages_are_those_of_plain_lean(real_site: Site) -> None:
    await compared(real_site)


async def test_a_stripped_library_is_served(real_site: Site, stripped: Environment) -> None:
    real_site.core = stripped
    await compared(real_site)


async def compared(site: Site) -> None:
    plain = await site.driver(forks=None, documents=DocumentRules(served_from=1 << 30))
    server = await site.driver(forks=None, documents=DocumentRules(served_from=1))
    for header in ("", "import Std\n", "-- 𝔸\nimport Std -- of the header\n/- β -/"):
        told = ((WRONG, 1), (RIGHT, 1), (CHECKED_WITHIN, 0), (f"{WRONG}#where\n", 0), (WRONG, 1))
        for text, is_read in told:
            before = COUNTS["leanq_language_server_total", "read"]
            assert words(await server.run(check(header + text))) == words(
                await plain.run(check(header + text))
            )
            assert COUNTS["leanq_language_server_total", "read"] - before == is_read
    reply = await server.run(check(RIGHT, goals=True))
    assert [each.goals for each in reply.tactics] == [("a b : Nat\nh : a < b\n⊢ a + 1 ≤ b",)]


def words(reply: Reply) -> tuple[object, ...]:
    return reply.verdict, reply.reason, reply.messages, reply.theorems
