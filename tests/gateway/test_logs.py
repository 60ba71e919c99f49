"""What a gateway logs of its callers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.gateway.gateways import Scripted, key_file, new_gateway
from support.gateway.pages import log_in

from leanq.fleet.logging import JsonLines
from leanq.gateway.keys import KeyFile
from leanq.gateway.logs import Sparing, SparingFilter
from leanq.queue.settings import Settings

OPERATOR = {"secret": "chief", "tenant": "ops", "rights": ["submit", "status", "operate"]}


def lines(caplog: pytest.LogCaptureFixture, name: str) -> list[dict[str, Any]]:
    found = [record for record in caplog.records if record.name == f"leanq.gateway.{name}"]
    return [json.loads(JsonLines().format(record)) for record in found]


async def test_changes_and_refusals_name_who_what_and_the_result_and_no_secret(
    settings: Settings, scripted: Scripted, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "leanq.gateway")
    keys = ({**OPERATOR, "name": "the-chief"}, {"secret": "alicias", "name": "alice"})
    async with new_gateway(settings, keys=KeyFile(key_file(tmp_path, *keys))) as gateway:
        http, url = gateway.http, gateway.url
        chief = {"Origin": url, **await log_in(http, url, "chief")}
        weight = {"tenant": "alice", "weight": "2"}
        assert (await http.post("/page/weight", data=weight, headers=chief)).status_code == 303
        pause = {"kind": "tenant", "name": "alice", "paused": "yes"}
        assert (await http.post("/page/pause", data=pause, headers=chief)).status_code == 303
        alice = {"Authorization": "Bearer alicias", "Origin": url}
        assert (await http.post("/page/pause", data=pause, headers=alice)).status_code == 403
        wrong = await http.post("/page/login", data={"key": "guessed"}, headers={"Origin": url})
        assert wrong.status_code == 403
        tried = {"Authorization": "Bearer guessed-too"}
        assert (await http.get("/v1/status", headers=tried)).status_code == 401
        await http.post("/v1/check?wait=0", json={"code": "-- x", "request_id": "n"}, headers=alice)
        await http.delete("/v1/requests/n", headers=alice)
        await http.get("/health")
        told, access = lines(caplog, "audit"), lines(caplog, "access")
        await http.post("/page/weight", data={"tenant": "alice"}, headers=chief)
        await http.post("/page/pause", data={**pause, "paused": "no"}, headers=chief)
    changed = {"kind": "tenant", "name": "alice", "paused": "yes"}
    assert [(t["key"], t["action"], t["object"], t["result"]) for t in told] == [
        ("the-chief", "login", {}, "ok"),
        ("the-chief", "weight", weight, "ok"),
        ("the-chief", "pause", changed, "ok"),
        ("alice", "pause", changed, "refused"),
        (None, "login", {}, "refused"),
        (None, "wrong key", {}, "refused"),
        ("alice", "withdraw", {"request_id": "n"}, "ok"),
    ]
    assert {t["peer"] for t in told} == {"127.0.0.1"}
    assert {"key": "alice", "route": "/v1/check", "status": 202}.items() <= access[-2].items()
    assert all(t["took_s"] >= 0 for t in access)
    # What needs no key is asked all the time.
    assert not any(t["route"] == "/health" for t in access)
    everything = json.dumps([told, access])
    for secret in ('chief"', "alicias", "guessed", "leanq-session"):
        assert secret not in everything.replace("the-chief", "")


async def test_of_many_refusals_few_are_logged(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "leanq.gateway")
    async with new_gateway(settings, keys=KeyFile(key_file(tmp_path, OPERATOR))) as gateway:
        for _ in range(50):
            await gateway.http.get("/v1/status", headers={"Authorization": "wrong"})
    assert len(lines(caplog, "audit")) == 10


def test_what_was_left_out_in_a_minute_is_counted() -> None:
    now_s = 0.0
    sparing = Sparing(of_kind=2, in_all=3, clock=lambda: now_s)
    assert [sparing.admits(kind) for kind in "aaabbb"] == [True, True, False, True, False, False]
    assert sparing.left_out() == 0
    now_s = 61.0
    assert sparing.left_out() == 3
    assert sparing.left_out() == 0
    assert sparing.admits("a")


def test_warnings_from_one_place_are_few_and_other_lines_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("leanq.gateway")
    spare = SparingFilter()
    caplog.set_level(logging.INFO, "leanq.gateway")
    caplog.handler.addFilter(spare)
    try:
        for number in range(50):
            log.warning("trouble %d", number)
            log.info("news %d", number)
    finally:
        caplog.handler.removeFilter(spare)
    said = [message.partition(" ")[0] for message in caplog.messages]
    assert (said.count("trouble"), said.count("news")) == (10, 50)
