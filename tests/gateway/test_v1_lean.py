"""leanq's own interface with real Lean: its description's examples, and states."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.gateway.gateways import new_gateway

from leanq.queue.settings import Settings

pytestmark = pytest.mark.slow

THEOREM = "theorem t (p : Prop) (h : p) : p := "


def examples(document: dict[str, Any]) -> dict[str, Any]:
    """The example of each path's body."""
    schemas = document["components"]["schemas"]
    found: dict[str, Any] = {}
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if reference := content.get("application/json", {}).get("schema", {}).get("$ref"):
            [found[path]] = schemas[reference.rpartition("/")[2]]["examples"]
    return found


async def test_the_examples_of_the_descriptions_run(fleet: Settings) -> None:
    async with new_gateway(fleet) as gateway:
        http = gateway.http
        own = examples((await http.get("/v1/openapi.json")).json())
        kimina = examples((await http.get("/api/openapi.json")).json())
        assert own.keys() == {"/check", "/verify", "/step"}
        assert kimina.keys() == {"/api/check", "/verify"}
        for path in ("/check", "/verify"):
            answer = await http.post(f"/v1{path}", json=own[path])
            assert answer.json()["verdict"] == "accepted"
        # Its state is none that a check has ever given.
        answer = await http.post("/v1/step", json=own["/step"])
        assert answer.json()["type"] == "urn:leanq:unknown-state"
        for path, body in kimina.items():
            results = (await http.post(path, json=body)).json()["results"]
            assert all(result["response"]["env"] == 0 for result in results)


async def test_statements_are_left_out_on_demand(fleet: Settings) -> None:
    async with new_gateway(fleet) as gateway:
        for op, texts in {
            "check": {"code": f"{THEOREM}h"},
            "verify": {"code": f"{THEOREM}h", "target": f"{THEOREM}sorry"},
        }.items():
            for asked, statement in ((True, "∀ (p : Prop), p → p"), (False, None)):
                body = {**texts, "statements": asked}
                result = (await gateway.http.post(f"/v1/{op}", json=body)).json()
                assert result["verdict"] == "accepted"
                assert result["theorems"] == [{"name": "t", "statement": statement}]


async def test_a_state_is_stepped_exported_and_imported(fleet: Settings) -> None:
    async with new_gateway(fleet) as gateway:
        http = gateway.http
        code = "theorem t (p q : Prop) (h : p) (g : q) : p ∧ q := by sorry"
        [hole] = (await http.post("/v1/check", json={"code": code})).json()["sorries"]
        body = {"state": hole["state"], "tactic": "constructor"}
        step = (await http.post("/v1/step", json=body)).json()
        assert (step["verdict"], len(step["goals"])) == ("incomplete", 2)
        exported = await http.get(f"/v1/states/{step['state']}/export")
        octets = {"Content-Type": "application/octet-stream"}
        answer = await http.post("/v1/states", content=exported.content, headers=octets)
        assert answer.json() == {"state": step["state"]}
        line = {"op": "step", "state": step["state"], "tactic": "exact h\nexact g", "id": "last"}
        wrong = {"op": "verify", "target": f"{THEOREM}sorry", "code": "-- nothing", "id": "wrong"}
        lines = "".join(f"{json.dumps(each)}\n" for each in (line, wrong))
        answer = await http.post("/v1/batch", content=lines)
        ends = {each["id"]: each["result"] for each in map(json.loads, answer.text.splitlines())}
        assert ends["last"]["verdict"] == "accepted"
        assert ends["wrong"]["failed"] == [
            {**ends["wrong"]["failed"][0], "name": "t", "rule": "missing"}
        ]
