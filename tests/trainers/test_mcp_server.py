"""Tools for agents, by the protocol's own client."""

from __future__ import annotations

from typing import Any

import pytest
from mcp import Client
from support.trainers.provers import QED, TableProver

from leanq.local import Pool
from leanq.trainers.mcp_server import make_server

THEOREM = "theorem t (p q : Prop) (h : And p q) : And q p := "


async def call(client: Client, name: str, **arguments: Any) -> dict[str, Any]:
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result
    assert isinstance(result.structured_content, dict)
    return result.structured_content


@pytest.mark.slow
async def test_an_agent_proves_a_theorem_by_steps(pool: Pool) -> None:
    async with Client(make_server(pool)) as agent:
        tools = {tool.name: tool for tool in (await agent.list_tools()).tools}
        assert set(tools) == {"check", "verify", "step", "search"}
        assert all(tool.description for tool in tools.values())
        checked = await call(agent, "check", code=f"{THEOREM}sorry")
        assert (checked["verdict"], checked["reason"]) == ("incomplete", "sorry")
        state = checked["sorries"][0]["state"]
        first = await call(agent, "step", state=state, tactic="constructor")
        assert len(first["goals"]) == 2
        second = await call(agent, "step", state=first["state"], tactic="exact h.right")
        last = await call(agent, "step", state=second["state"], tactic="exact h.left")
        assert last["verdict"] == "accepted"
        proof = f"{THEOREM}And.intro h.right h.left"
        verified = await call(agent, "verify", target=f"{THEOREM}sorry", candidate=proof)
        assert verified["verdict"] == "accepted"
        other = "theorem t (p q : Prop) (h : And p q) : And p q := h"
        refused = await call(agent, "verify", target=f"{THEOREM}sorry", candidate=other)
        assert refused["failed"][0]["rule"] == "type_differs"


@pytest.mark.slow
async def test_a_search_returns_the_proof_or_what_is_closest(pool: Pool) -> None:
    tactics = ["constructor", "exact h.right", "exact h.left"]
    async with Client(make_server(pool)) as agent:
        found = await call(agent, "search", statement=f"{THEOREM}sorry", tactics=tactics)
        assert found["ended"] == "proved"
        assert (await call(agent, "check", code=found["proof"]))["verdict"] == "accepted"
        left = await call(agent, "search", statement=f"{THEOREM}sorry", tactics=tactics[:2])
        assert (left["ended"], left["proof"]) == ("exhausted", None)
        goals = {node["goals"][0].split("⊢ ")[1] for node in left["closest"]}
        assert goals == {"p", "q ∧ p", "q"}


async def test_a_long_proof_is_whole(pool: Pool) -> None:
    statement = f"-- {'long' * 1200}\n{THEOREM}sorry"
    proof = "exact And.intro h.right h.left"
    async with Client(make_server(pool)) as agent:
        found = await call(agent, "search", statement=statement, tactics=[proof])
        assert found["proof"].endswith(proof)


async def test_what_was_wrong_is_told_to_the_agent(pool: Pool) -> None:
    async with Client(make_server(pool)) as agent:
        for name, arguments, said in (
            ("step", {"state": "x", "tactic": "simp"}, "expected 64 hexadecimal digits"),
            ("step", {"state": "0" * 64, "tactic": "simp"}, "0000"),
            ("check", {"code": ""}, "the text is empty"),
            ("search", {"statement": "theorem t : p := h", "tactics": ["simp"]}, "one sorry"),
            ("search", {"statement": f"{THEOREM}sorry", "tactics": []}, "at least 1 item"),
        ):
            result = await agent.call_tool(name, arguments)
            assert result.is_error
            assert said in str(result.content), result


async def test_long_texts_are_cut() -> None:
    table = TableProver({("0", "a"): "g" * 9000, ("0", "b"): QED})
    async with Client(make_server(table)) as agent:
        stepped = await call(agent, "step", state="0", tactic="a")
        assert stepped["goals"] == ["g" * 4000 + "… (5000 more characters)"]
