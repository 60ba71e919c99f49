"""Nothing pays for a check or a step: all rewards are of verifications.

tests/adapters says the same of environments, beside the library that each needs, and
tests/campaigns/test_campaign_replay.py of campaigns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.testclient import TestClient
from support.gateway.gateways import Gateway
from support.paths import ROOT
from support.trainers.provers import Flatterer

from leanq.trainers.reward_server import make_app
from leanq.trainers.rewards import LeanReward, proof_text
from leanq.trainers.search import ProofSearch, SearchNode

# starlette says of its own client that another one is to come.
pytestmark = pytest.mark.filterwarnings("ignore")

STATEMENT = "theorem t (p : Prop) (h : p) : p := sorry"


@pytest.mark.parametrize(
    "score",
    [
        lambda lean: LeanReward(lean),
        lambda lean: LeanReward(lean, extract=proof_text),
    ],
)
async def test_reward_functions(score: Any) -> None:
    lean = Flatterer()
    answers = ["h", "theorem t (p : Prop) (h : p) : p := h", "theorem other : True := trivial"]
    assert await score(lean)(completions=answers, statement=[STATEMENT] * 3) == [0.0] * 3
    assert lean.asked == ["verify"] * 3


def test_the_reward_server() -> None:
    http = TestClient(make_app(LeanReward(Flatterer())))
    body = {"query": ["Prove it. h"], "prompts": ["Prove it. "], "labels": [STATEMENT]}
    assert http.post("/get_reward", json=body).json()["rewards"] == [0.0]
    message = {"type": "message", "role": "assistant", "content": "h"}
    row = {"statement": STATEMENT, "response": {"output": [message]}}
    assert http.post("/verify", json=row).json()["reward"] == 0.0
    # Without a statement there is nothing to compare with, and no reward.
    for path, unnamed in (("/verify", {"response": {}}), ("/get_reward", {**body, "labels": []})):
        answer = http.post(path, json=unnamed)
        assert answer.status_code == 422
        assert "reward" not in answer.json()


async def test_a_search_takes_no_step_for_a_proof() -> None:
    lean = Flatterer()

    async def propose(nodes: Sequence[SearchNode]) -> list[list[str]]:
        return [["exact h"] for _ in nodes]

    found = await ProofSearch(STATEMENT, propose).run(lean)
    assert (found.ended, found.code) == ("exhausted", None)
    assert lean.asked[-1] == "verify"


def test_one_place_alone_makes_a_reward_of_a_verdict() -> None:
    made_in = ROOT / "leanq" / "queue" / "requests.py"
    calls = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "leanq").rglob("*.py")
        if path != made_in and re.search(r"(?<![\w.\"'])reward\((?!verdict\b)", path.read_text())
    }
    # It is called by LeanReward, which verifies, and by campaigns for rows with a target.
    assert calls == {"leanq/trainers/replay_writer.py"}


async def test_no_route_of_the_gateway_names_a_reward(gateway: Gateway) -> None:
    for interface in ("/v1/openapi.json", "/api/openapi.json"):
        described = (await gateway.http.get(interface)).json()
        assert described["paths"]
        assert "reward" not in str(described).lower(), interface
