"""Rewards over HTTP, in the shapes that OpenRLHF and NeMo Gym document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from adapters.cheats import CHEATS, HEAD, PROOF, STATEMENT
from starlette.testclient import TestClient

from leanq.errors import UnavailableError
from leanq.local import Pool
from leanq.trainers.reward_server import MAX_BODY_BYTES, make_app
from leanq.trainers.rewards import LeanReward
from leanq.trainers.testing import FakeLeanQClient

# starlette says of its own client that another one is to come.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def fake() -> Iterator[FakeLeanQClient]:
    with FakeLeanQClient() as client:
        yield client


@pytest.fixture
def http(fake: FakeLeanQClient) -> TestClient:
    return TestClient(make_app(LeanReward(fake, stall_s=0.2)))


def of_openrlhf(*answers: str, labels: tuple[str, ...] = ()) -> dict[str, Any]:
    prompts = [f"<user>Prove {n}.<assistant>" for n in range(len(answers))]
    return {
        "query": [f"<s>{p}{answer}</s>" for p, answer in zip(prompts, answers, strict=True)],
        "prompts": prompts,
        "labels": list(labels) or [STATEMENT] * len(answers),
    }


def of_nemo_gym(answer: str) -> dict[str, Any]:
    reasoning = {"type": "reasoning", "summary": []}
    message = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": answer, "annotations": []}],
    }
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "Prove it."}]},
        "verifier_metadata": {"statement": STATEMENT},
        "response": {"id": "r", "object": "response", "output": [reasoning, message]},
    }


@pytest.mark.slow
def test_answers_are_verified_against_their_labels(pool: Pool) -> None:
    http = TestClient(make_app(LeanReward(pool)))
    cheats = {name: text for name, text in CHEATS.items() if name != "half_a_surrogate_pair"}
    answers = [f"```lean\n{HEAD}{PROOF}\n```", *cheats.values()]
    told = http.post("/get_reward", json=of_openrlhf(*answers)).json()
    assert told["rewards"] == told["scores"] == [1.0] + [0.0] * len(cheats)
    assert told["extra_logs"]["accepted"] == told["rewards"]
    assert sum(told["extra_logs"]["no_reward"]) == 0


def test_a_row_of_nemo_gym_is_verified_and_comes_back(pool: Pool) -> None:
    http = TestClient(make_app(LeanReward(pool)))
    assert http.post("/seed_session", json={}).json() == {}
    row = of_nemo_gym(HEAD + PROOF)
    told = http.post("/verify", json=row).json()
    assert told == {**row, "reward": 1.0, "mask_sample": False}
    beside = {**of_nemo_gym(STATEMENT), "statement": STATEMENT, "verifier_metadata": None}
    assert http.post("/verify", json=beside).json()["reward"] == 0.0
    silent = {**row, "response": {"output": []}}
    assert http.post("/verify", json=silent).json()["reward"] == 0.0


def test_what_has_no_verdict_is_left_out(fake: FakeLeanQClient, http: TestClient) -> None:
    fake.fleet.on("slow", "timeout")
    fake.fleet.on("wrong", "rejected")
    told = http.post("/get_reward", json=of_openrlhf("slow", "right", "wrong")).json()
    assert told["rewards"] == [0.5, 1.0, 0.0]
    assert told["extra_logs"]["no_reward"] == [1.0, 0.0, 0.0]
    alone = http.post("/get_reward", json=of_openrlhf("slow"))
    assert (alone.status_code, alone.json()["error"]) == (503, "NoRewardError")
    told = http.post("/verify", json=of_nemo_gym("slow")).json()
    assert (told["reward"], told["mask_sample"]) == (0.0, True)
    assert told["failure_kind"] == "leanq:timeout"


def test_a_fleet_that_does_not_answer_is_no_reward(fake: FakeLeanQClient, http: TestClient) -> None:
    fake.fleet.on("stalls", delay_s=60)
    fake.fleet.on("gone", UnavailableError("no server"))
    for answer, error in (("stalls", "StalledError"), ("gone", "UnavailableError")):
        for path, body in (("/get_reward", of_openrlhf(answer)), ("/verify", of_nemo_gym(answer))):
            told = http.post(path, json=body)
            assert (told.status_code, told.json()["error"]) == (503, error)
            assert told.headers["retry-after"] == "5"
            assert "reward" not in told.json()


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/get_reward", "[]", "expected a JSON object"),
        ("/get_reward", "{", "expected a JSON object"),
        ("/get_reward", "[" * 100_000, "expected a JSON object"),
        ("/get_reward", '{"query": ["a"]}', "expected 'prompts', a list of texts"),
        ("/get_reward", '{"query": "a", "prompts": [], "labels": []}', "expected 'query'"),
        ("/get_reward", '{"query": ["a"], "prompts": ["a"], "labels": []}', "same length"),
        ("/get_reward", '{"query": ["a"], "prompts": ["b"], "labels": ["s"]}', "hold its prompt"),
        ("/get_reward", '{"query": ["a"], "prompts": [""], "labels": ["s"]}', "hold its prompt"),
        ("/verify", "{}", "expected the text 'statement'"),
        ("/verify", '{"statement": "s"}', "expected 'response'"),
        ("/verify", '{"statement": 1, "response": {"output": []}}', "expected the text"),
    ],
)
def test_wrong_requests_are_told(http: TestClient, path: str, body: str, said: str) -> None:
    told = http.post(path, content=body)
    assert told.status_code == 422, told.text
    assert said in told.json()["detail"]


def test_what_no_text_can_hold_earns_nothing_and_comes_back(pool: Pool) -> None:
    http = TestClient(make_app(LeanReward(pool)))
    row = json.dumps(of_nemo_gym(f"{HEAD}{PROOF} -- \ud800"))
    told = http.post("/verify", content=row)
    assert (told.status_code, told.json()["reward"]) == (200, 0.0)


def test_what_others_say_is_no_answer(http: TestClient) -> None:
    row = of_nemo_gym(STATEMENT)
    said = {"type": "message", "role": "user", "content": [{"text": HEAD + PROOF}]}
    row["response"]["output"].append(said)
    assert http.post("/verify", json=row).json()["reward"] == 0.0


def test_a_request_has_an_end(http: TestClient) -> None:
    told = http.post("/verify", content=b" " * (MAX_BODY_BYTES + 1))
    assert (told.status_code, "more than" in json.loads(told.text)["detail"]) == (422, True)
