"""Campaigns over HTTP: started from rows, followed, reported on and ended, by their own tenant."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.campaigns.campaigns import Desk, stop_worker
from support.gateway.gateways import Gateway, Scripted, key_file, new_gateway, reply_with

from leanq.gateway.campaigns import TenantCampaigns
from leanq.gateway.keys import KeyFile
from leanq.queue.settings import Settings

CODES = ("-- accepted", "-- rejected", "-- incomplete", "-- accepted again")
ROWS = "\n".join(json.dumps({"id": n, "code": code}) for n, code in enumerate(CODES))

OTHER_OPTIONS = {"timeout_s": 61, "priority": 1, "first_success": True, "environment": "other"}


def of(who: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {who}"}}


@pytest.mark.slow
async def test_a_tenant_follows_its_own_campaigns_alone(
    settings: Settings, scripted: Scripted, desk: Desk, tmp_path: Path
) -> None:
    keys = KeyFile(
        key_file(
            tmp_path,
            {"secret": "alice"},
            {"secret": "bob"},
            {"secret": "carol", "environments": ["default"], "rights": ["status"]},
            {"secret": "dave", "environments": ["other"]},
        )
    )
    campaigns = TenantCampaigns(desk.campaigns, tmp_path)
    async with new_gateway(settings, keys=keys, campaigns=campaigns) as gateway:
        http = gateway.http
        named = "/v1/campaigns?request_id=sweep"
        started = await http.post(named, content=ROWS, **of("alice"))
        assert started.status_code == 201, started.text
        where = started.headers["Location"]
        assert (await http.get(where, **of("alice"))).json()["state"] == "queued"
        early = await http.get(f"{where}/report", **of("alice"))
        assert (early.status_code, early.json()["status"]) == (409, 409)

        # By its exact id, too.
        for other in ("bob", "dave"):
            tries = [await http.get(f"{where}{what}", **of(other)) for what in ("", "/report")]
            tries.append(await http.get(f"{where}/results", **of(other)))
            tries.append(await http.delete(where, **of(other)))
            tries += [
                await http.post(f"{where}/{how}", **of(other))
                for how in ("pause", "resume", "retry")
            ]
            assert [answer.status_code for answer in tries] == [404] * 7
            assert (await http.get("/v1/campaigns", **of(other))).json() == {"campaigns": []}
        assert (await http.get(where, **of("carol"))).status_code == 403
        elsewhere = await http.post("/v1/campaigns?environment=default", content=ROWS, **of("dave"))
        assert elsewhere.status_code == 403

        # Before a worker has it, too.
        assert (await http.post(f"{where}/pause", **of("alice"))).json()["state"] == "paused"
        for impossible in ("pause", "retry"):
            refused = await http.post(f"{where}/{impossible}", **of("alice"))
            assert (refused.status_code, "is paused" in refused.json()["detail"]) == (409, True)
        assert (await http.post(f"{where}/resume", **of("alice"))).json()["state"] == "queued"
        assert (await http.post(f"{where}/end", **of("alice"))).status_code == 422

        worker = await asyncio.to_thread(desk.start_worker)
        ended = await _ended(http, where)
        assert (ended["state"], ended["rows"], ended["total"]) == ("finished", 4, 4)
        assert str(tmp_path) not in json.dumps(ended)
        results = (await http.get(f"{where}/results", **of("alice"))).text
        verdicts = [json.loads(line)["verdict"] for line in results.splitlines()]
        assert verdicts == ["accepted", "rejected", "incomplete", "accepted"]
        report = (await http.get(f"{where}/report", **of("alice"))).json()
        assert report["records"] == 4
        assert {request.code for request in scripted.seen} == set(CODES)
        again = await http.post(named, content=ROWS, **of("alice"))
        assert (again.status_code, again.json()) == (200, ended)

        # Rows without a verdict of Lean's are checked again, and no others.
        crash = json.dumps({"id": 0, "code": "-- crashed"}) + "\n" + ROWS.splitlines()[1]
        again = (await http.post("/v1/campaigns", content=crash, **of("alice"))).headers["Location"]
        assert (await _ended(http, again))["counts"].get("rejected") == 1
        seen = len(scripted.seen)
        scripted.replies = {"-- crashed": reply_with("accepted")}
        await _until_retried(http, again)
        ended = await _ended(http, again)
        assert (ended["state"], ended["counts"]) == ("finished", {"accepted": 1, "rejected": 1})
        assert [request.code for request in scripted.seen[seen:]] == ["-- crashed"]
        await http.delete(again, **of("alice"))

        held = "\n".join(json.dumps({"id": n, "code": f"-- held {n}"}) for n in range(3))
        where = (await http.post("/v1/campaigns", content=held, **of("alice"))).headers["Location"]
        await http.delete(where, **of("alice"))
        assert (await _ended(http, where))["state"] == "cancelled"
        assert (await http.delete(where, **of("alice"))).json()["state"] == "cancelled"
        listed = (await http.get("/v1/campaigns", **of("alice"))).json()["campaigns"]
        assert [each["state"] for each in listed] == ["cancelled", "finished", "finished"]
        await asyncio.to_thread(stop_worker, worker)


async def _ended(http: httpx2.AsyncClient, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(600):
        found = (await http.get(where, **of("alice"))).json()
        if found["state"] in ("finished", "failed", "cancelled"):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(found)


async def _until_retried(http: httpx2.AsyncClient, where: str) -> None:
    # A campaign that is just ending cannot be retried for a moment.
    for _ in range(100):
        answer = await http.post(f"{where}/retry", **of("alice"))
        if answer.is_success:
            return
        assert answer.status_code == 409, answer.text
        await asyncio.sleep(0.1)
    raise AssertionError(answer.text)


@pytest.mark.slow
async def test_a_name_is_one_campaign_of_its_tenant_at_all_gateways(
    settings: Settings, scripted: Scripted, desk: Desk, tmp_path: Path
) -> None:
    keys = KeyFile(key_file(tmp_path, {"secret": "alice"}, {"secret": "bob"}))
    campaigns = TenantCampaigns(desk.campaigns, tmp_path)
    async with (
        new_gateway(settings, keys=keys, campaigns=campaigns) as one,
        new_gateway(settings, keys=keys, campaigns=campaigns) as other,
    ):

        async def start(
            name: str = "sweep", rows: str = ROWS, who: str = "alice", at: Gateway = one, **how: Any
        ) -> httpx2.Response:
            asked = {"request_id": name, **how}
            return await at.http.post("/v1/campaigns", params=asked, content=rows, **of(who))

        gateways = [one, other] * 8
        at_once = await asyncio.gather(*(start(at=gateway) for gateway in gateways))
        assert sorted(answer.status_code for answer in at_once) == [200] * 15 + [201]
        [where] = {answer.headers["Location"] for answer in at_once}
        assert len([*tmp_path.rglob("*.jsonl")]) == 1
        assert desk.campaigns.queue.count == 1

        taken = [
            await start(rows=ROWS + "\n"),
            await start(rows="no rows"),
            *[await start(**{name: value}) for name, value in OTHER_OPTIONS.items()],
        ]
        assert {(answer.status_code, answer.json()["type"]) for answer in taken} == {
            (409, "urn:leanq:conflict")
        }
        assert len([*tmp_path.rglob("*.jsonl")]) == 1
        # However it has ended, and whatever limit the tenant has reached since.
        await one.http.delete(where, **of("alice"))
        assert (await start()).json()["state"] == "cancelled"
        made = [await start(f"more.{number}") for number in range(17)]
        assert [answer.status_code for answer in made] == [201] * 16 + [429]
        assert [(await start(name)).status_code for name in ("sweep", "more.3")] == [200, 200]

        theirs = await start(who="bob")
        assert (theirs.status_code, theirs.headers["Location"] != where) == (201, True)
        for wrong in ("", "a b", "é", "x" * 49, "../sweep"):
            refused = await start(wrong)
            assert (refused.status_code, refused.json()["type"]) == (
                422,
                "urn:leanq:invalid-request",
            )


async def test_a_file_that_goes_while_the_folder_is_read_is_no_error(
    settings: Settings, scripted: Scripted, desk: Desk, tmp_path: Path
) -> None:
    campaigns = TenantCampaigns(desk.campaigns, tmp_path)
    async with new_gateway(settings, campaigns=campaigns) as gateway:
        where = (await gateway.http.post("/v1/campaigns", content=ROWS)).headers["Location"]
        [rows] = tmp_path.rglob("*.jsonl")
        # Listed, and not there: as what another call has removed since.
        rows.with_name("gone.jsonl").symlink_to("nowhere")
        answer = await gateway.http.post("/v1/campaigns", content=ROWS)
        assert (answer.status_code, answer.headers["Location"] != where) == (201, True)


async def test_the_example_of_the_description_starts_a_campaign(
    settings: Settings, scripted: Scripted, desk: Desk, tmp_path: Path
) -> None:
    campaigns = TenantCampaigns(desk.campaigns, tmp_path)
    async with new_gateway(settings, campaigns=campaigns) as gateway:
        described = (await gateway.http.get("/v1/openapi.json")).json()
        operation = described["paths"]["/campaigns"]["post"]
        assert {"200", "201", "409"} <= operation["responses"].keys()
        [rows] = [each["example"] for each in operation["requestBody"]["content"].values()]
        started = await gateway.http.post("/v1/campaigns", content=rows)
        assert (started.status_code, started.json()["state"]) == (201, "queued")


@pytest.mark.slow
async def test_what_is_no_rows_is_said_and_leaves_no_file(
    settings: Settings, scripted: Scripted, desk: Desk, tmp_path: Path
) -> None:
    campaigns = TenantCampaigns(desk.campaigns, tmp_path)
    async with new_gateway(settings, campaigns=campaigns) as gateway:
        http = gateway.http
        for rows in (b"", b"[]", b"{", b'{"id": 1}', b"\xff", b'{"id": 1, "code": "x"}' * 2):
            answer = await http.post("/v1/campaigns", content=rows)
            assert (answer.status_code, answer.json()["type"]) == (422, "urn:leanq:usage"), rows
        for wrong in ("timeout_s=0", "priority=7", "timeout_s=1e9"):
            answer = await http.post(f"/v1/campaigns?{wrong}", content=ROWS)
            assert answer.status_code == 422, answer.text
        assert not [*tmp_path.rglob("*.jsonl")]
        for unknown in ("campaign-0", "%00", "..%2e", "a%0ab"):
            for ask in (http.get, http.delete):
                assert (await ask(f"/v1/campaigns/{unknown}")).status_code == 404, unknown
            answer = await http.post(f"/v1/campaigns/{unknown}/retry")
            assert answer.status_code == 404, unknown
    async with new_gateway(settings) as gateway:
        answer = await gateway.http.get("/v1/campaigns")
        assert (answer.status_code, "--campaigns" in answer.text) == (404, True)


async def test_a_key_without_the_right_is_told_so_where_no_campaigns_are_taken(
    settings: Settings, tmp_path: Path
) -> None:
    watcher = {"secret": "carol", "rights": ["status"]}
    keys = KeyFile(key_file(tmp_path, {"secret": "alice"}, watcher))
    async with new_gateway(settings, keys=keys) as gateway:
        http = gateway.http
        where = "/v1/campaigns/campaign-0"
        for method, path in (
            ("GET", "/v1/campaigns"),
            ("POST", "/v1/campaigns"),
            ("GET", where),
            ("DELETE", where),
            ("POST", f"{where}/pause"),
            ("GET", f"{where}/report"),
            ("GET", f"{where}/results"),
        ):
            for key, status in (("nobody", 401), ("carol", 403), ("alice", 404)):
                answer = await http.request(method, path, **of(key))
                assert answer.status_code == status, (method, path, key)
