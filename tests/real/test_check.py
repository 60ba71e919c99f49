"""Checks on a full library."""

from __future__ import annotations

from support.sites import Site, check

RIGHT = "import Std\ntheorem t (x y : Nat) (h : x < y) : x + 1 ≤ y := by omega\n"


async def test_a_right_proof_is_accepted(real_site: Site) -> None:
    reply = await (await real_site.driver()).run(check(RIGHT))
    assert (reply.verdict, reply.reason) == ("accepted", None), reply.messages
    assert [theorem.name for theorem in reply.theorems] == ["t"]
