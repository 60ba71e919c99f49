"""Keys that may use some environments: states of others are not theirs, though the tenant is."""

from __future__ import annotations

from pathlib import Path

from support.gateway.gateways import Scripted, key_file, new_gateway
from support.queue.queues import Queue

from leanq.gateway.access import Access
from leanq.gateway.keys import KeyFile
from leanq.lean.goals.recipes import Hole, Recipe, Source
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings
from leanq.states import RedisStates


async def test_a_state_of_another_environment_is_neither_stepped_nor_exported(
    settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    own, other = (
        Recipe(Source(print_, "x := sorry", (Hole(5, "term"),)), 0) for print_ in ("own", "other")
    )
    queue = Queue(settings)
    for recipe in (own, other):
        await RedisStates([queue]).keep(dict(recipe.records()))
    offers = {"default": b"", "secret": b""}
    await queue.register("w", b"", offers, {"default": "own", "secret": "other"})
    keys = KeyFile(
        key_file(
            tmp_path,
            {"secret": "all", "tenant": "t"},
            {"secret": "some", "tenant": "t", "environments": ["default"]},
        )
    )
    some = keys.find("some")
    assert some
    access = Access(keys, "default")
    async with new_gateway(settings, keys=keys) as gateway:
        http, key = gateway.http, {"Authorization": "some"}
        mine, others = (
            access.sealed(some, Reply("incomplete", state=recipe.id)).state
            for recipe in (own, other)
        )
        for environment in ({}, {"environment": "default"}):
            body = {"state": mine, "tactic": "skip", **environment}
            answer = await http.post("/v1/step", json=body, headers=key)
            assert answer.status_code == 200, answer.text
            body["state"] = others
            refused = [
                await http.post("/v1/step", json=body, headers=key),
                await http.get(f"/v1/states/{others}/export", params=environment, headers=key),
            ]
            assert [answer.status_code for answer in refused] == [403] * 2, refused[0].text
            assert "the state is of an environment" in refused[0].json()["detail"]
            lines = b'{"op": "step", "state": "%s", "tactic": "skip"}' % str(others).encode()
            answer = await http.post("/v1/batch", content=lines, headers=key)
            assert answer.json()["problem"]["status"] == 403
        body = {"state": others, "tactic": "skip", "environment": "secret"}
        assert (await http.post("/v1/step", json=body, headers=key)).status_code == 403
    assert {request.state for request in scripted.seen} == {own.id}
    await queue.release("w", [], leave=True)
    await queue.close()
