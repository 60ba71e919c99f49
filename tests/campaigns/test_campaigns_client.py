"""A client's campaigns, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.campaigns.campaigns import Desk, stop_worker
from support.gateway.gateways import Scripted, new_gateway
from support.waiting import eventually

from leanq.campaigns.submitted import SubmittedCampaign
from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.errors import (
    ConflictError,
    InvalidRequestError,
    UsageError,
)
from leanq.queue.settings import Settings

CODES = ("-- accepted", "-- rejected", "-- incomplete")
ROWS = [{"id": number, "code": code} for number, code in enumerate(CODES)]
HELD = [{"id": number, "code": f"-- held {number}"} for number in range(3)]

Ask = Callable[..., Awaitable[Any]]


def asking(lean: LeanQClient | AsyncLeanQClient) -> Ask:
    """Calls a method of the client's campaigns by its name, whether it waits or is awaited."""

    async def ask(name: str, *arguments: Any, **options: Any) -> Any:
        method = getattr(lean.campaigns, name)
        if inspect.iscoroutinefunction(method):
            return await method(*arguments, **options)
        return await asyncio.to_thread(method, *arguments, **options)

    return ask


@contextlib.asynccontextmanager
async def new_client(kind: str, place: str | Settings) -> AsyncIterator[Ask]:
    if kind == "asyncio":
        async with AsyncLeanQClient(place) as lean:
            yield asking(lean)
    else:
        lean = await asyncio.to_thread(LeanQClient, place)
        yield asking(lean)
        await asyncio.to_thread(lean.close)


@pytest.fixture(params=["threads", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def ask(
    kind: str,
    settings: Settings,
    scripted: Scripted,
    desk: Desk,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Ask]:
    """The campaigns of a client of either kind."""
    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setenv("LEANQ_CAMPAIGNS", str(folder))
    async with new_client(kind, settings) as made:
        yield made


async def reaches(ask: Ask, id_: str, *states: str) -> SubmittedCampaign:
    found: list[SubmittedCampaign] = []

    async def there() -> bool:
        found[:] = [await ask("show", id_)]
        return found[0].state in states

    await eventually(there)
    return found[0]


@pytest.mark.slow
async def test_one_is_submitted_steered_and_ended_before_any_worker_has_it(ask: Ask) -> None:
    made = await ask("submit", ROWS, timeout_s=5, first_success=True)
    assert isinstance(made, SubmittedCampaign)
    assert (made.state, made.environment, made.rows, made.ended) == ("queued", "default", 0, False)
    assert await ask("show", made.id) == made
    with pytest.raises(UsageError, match="queued"):
        await ask("resume", made.id)
    assert (await ask("pause", made.id)).state == "paused"
    for impossible in ("pause", "retry"):
        with pytest.raises(UsageError, match="is paused"):
            await ask(impossible, made.id)
    assert (await ask("resume", made.id)).state == "queued"
    for early in ("report", "results"):
        with pytest.raises(UsageError, match="once it has finished"):
            await ask(early, made.id)
    other = await ask("submit", iter(ROWS), env="elsewhere", priority=0)
    assert other.environment == "elsewhere"
    assert await ask("list") == [other, await ask("show", made.id)]
    ended = await ask("cancel", made.id)
    assert (ended.state, ended.ended) == ("cancelled", True)
    assert await ask("cancel", made.id) == ended
    assert (await ask("retry", made.id)).state == "queued"


@pytest.mark.slow
async def test_one_that_is_submitted_again_by_its_name_is_the_same(ask: Ask) -> None:
    made = await ask("submit", ROWS, timeout_s=60, request_id="sweep-1")
    assert await ask("submit", iter(ROWS), timeout_s=60.0, request_id="sweep-1") == made
    assert await ask("list") == [made]
    for other in (ROWS[:2], [*ROWS, *HELD], [{"id": 1}]):
        with pytest.raises(ConflictError, match="other rows"):
            await ask("submit", other, request_id="sweep-1")
    with pytest.raises(ConflictError, match=made.id):
        await ask("submit", ROWS, timeout_s=1, request_id="sweep-1")
    for wrong in ("", "a b", "x" * 49):
        with pytest.raises(InvalidRequestError, match="48 letters"):
            await ask("submit", ROWS, request_id=wrong)
    assert (await ask("submit", ROWS, request_id="sweep-2")).id != made.id


@pytest.mark.slow
async def test_what_cannot_be_is_refused_alike(ask: Ask, tmp_path: Path) -> None:
    for rows in ([], [{"id": 1}], ["x"], [{"id": 1, "code": b"x"}], [ROWS[0], {1, 2}]):
        with pytest.raises(UsageError):
            await ask("submit", rows)
    with pytest.raises(InvalidRequestError, match="row 2 cannot be sent as JSON"):
        await ask("submit", [ROWS[0], {"id": 2, "code": object()}])
    for wrong in ({"timeout_s": 0}, {"priority": 7}, {"timeout_s": 1e9}, {"env": "a b"}):
        with pytest.raises(UsageError):
            await ask("submit", ROWS, **wrong)
    for unknown in ("campaign-0", "../v1/status", "", "a\nb", "é?x#y"):
        for name in ("show", "pause", "resume", "cancel", "retry", "report", "results"):
            with pytest.raises(UsageError):
                await ask(name, unknown)
    assert await ask("list") == []
    assert not [*tmp_path.rglob("*.jsonl")]


@pytest.mark.slow
async def test_rows_are_checked_and_reported_on(ask: Ask, desk: Desk) -> None:
    worker = await asyncio.to_thread(desk.start_worker)
    made = await ask("submit", ROWS)
    ended = await reaches(ask, made.id, "finished", "failed")
    assert (ended.state, ended.rows, ended.total) == ("finished", 3, 3)
    assert ended.counts == {"accepted": 1, "rejected": 1, "incomplete": 1}
    results = await ask("results", made.id)
    assert [(each["id"], each["verdict"]) for each in results] == [
        (0, "accepted"),
        (1, "rejected"),
        (2, "incomplete"),
    ]
    assert (await ask("report", made.id))["records"] == 3
    held = await ask("submit", HELD)
    await reaches(ask, held.id, "running")
    await ask("cancel", held.id)
    assert (await reaches(ask, held.id, "cancelled")).rows == 0
    await asyncio.to_thread(stop_worker, worker)


async def test_what_cannot_be_reached_is_said(
    settings: Settings, scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LEANQ_CAMPAIGNS", raising=False)
    async with AsyncLeanQClient(settings) as near, new_gateway(settings) as gateway:
        with pytest.raises(UsageError, match="LEANQ_CAMPAIGNS"):
            await near.campaigns.submit(ROWS)
        monkeypatch.setenv("LEANQ_CAMPAIGNS", str(tmp_path / "file" / "folder"))
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError, match=r"LEANQ_CAMPAIGNS: .*Not a directory"):
            await near.campaigns.submit(ROWS)
        far = AsyncLeanQClient(gateway.url)
        with pytest.raises(UsageError, match=r"is a gateway.*'leanq campaign run'"):
            _ = far.campaigns
    both = AsyncLeanQClient([settings, "unix:///elsewhere"])
    with pytest.raises(UsageError, match="LEANQ_RQ_URL"):
        await both.campaigns.list()
