"""Servers that take all scripts, and one that does not: who says so, and to whom."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
import redis
from click.testing import CliRunner
from support.fleets import Recorder, hurry
from support.queue.roles import as_role, server_with_roles
from support.servers import own_server
from support.waiting import eventually

import leanq.worker
from leanq.cli import cli
from leanq.client import AsyncLeanQClient
from leanq.commands.doctor import server_findings
from leanq.errors import NoWorkerError
from leanq.queue.scripts import SCRIPTS
from leanq.queue.settings import Settings
from leanq.queue.shard import Shard, refusal
from leanq.queue.trial import try_scripts
from leanq.worker import Worker

# Without this command no worker can enter a fleet.
LACKING = ("--rename-command", "ZADD", "")
# Scripts of clients and operators, which workers may not all run to their ends.
OF_OTHERS = {"submit", "lookup", "cancel", "pause"}


async def test_each_script_runs_once_and_leaves_nothing(settings: Settings) -> None:
    trial = await try_scripts(settings)
    assert sorted(trial.passed) == sorted(SCRIPTS)
    assert (trial.failed, trial.forbidden, trial.full) == ({}, [], False)
    with redis.Redis.from_url(settings.url) as server:
        assert not [*server.scan_iter(f"{{{settings.prefix}:trial-*", count=10_000)]


def test_a_trial_tells_what_a_user_may_not_run() -> None:
    with server_with_roles() as server:
        place = server.folder / "server.sock"
        worker, client = (
            asyncio.run(try_scripts(as_role(place, role))) for role in ("worker", "client")
        )
        with redis.Redis.from_url(as_role(place, "admin").url) as admin:
            assert not admin.keys("*trial*")
    others = {name for name in SCRIPTS if name.startswith("replay_")}
    assert {*worker.forbidden} <= others | OF_OTHERS
    assert {"register", "claim", "exchange", "renew", "reap", "release"} <= {*worker.passed}
    assert {"submit", "lookup", "cancel"} <= {*client.passed}
    assert {"register", "claim"} <= {*client.forbidden}
    assert (worker.failed, client.failed) == ({}, {})


async def test_the_doctor_says_which_scripts_a_server_does_not_run() -> None:
    with own_server(*LACKING) as server:
        first, second = await server_findings(server.settings.url)
        assert (first.what, first.works) == ("server", True)
        assert (second.what, second.works) == ("scripts", False)
        assert re.search(
            r"no worker can serve there, since register, .* fail: the script 'register': "
            r"unix:.* \(\w+ \d+\.\d+\.\d+\) answers with an error: ",
            second.text,
        )


async def test_a_worker_that_is_refused_says_so_to_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hurry(monkeypatch, no_worker_s=0.05)
    monkeypatch.setattr(leanq.worker, "_REJOIN_S", (0.01, 0.05))
    caplog.set_level(logging.WARNING)

    def told() -> list[str]:
        return [text for text in caplog.messages if "cannot join" in text]

    with own_server(*LACKING) as server:
        shard = Shard(server.settings)
        worker = Worker(server.settings, [Recorder()], slots=1)
        running = asyncio.create_task(worker.run())
        try:

            async def is_noted() -> bool:
                return bool(await refusal(shard))

            await eventually(is_noted)
            # It tries again all the time, and says so once a minute.
            with redis.Redis.from_url(server.settings.url) as connection:
                await eventually(lambda: tries(connection) > 5)
            (text,) = told()
            assert f"worker {worker.id} cannot join: the script 'register': unix:" in text
            assert "answers with an error: " in text
            assert "leanq doctor" in text
            async with AsyncLeanQClient(server.settings, no_worker="raise") as lean:
                with pytest.raises(NoWorkerError, match="a worker knocks and is refused: ") as none:
                    await asyncio.wait_for(lean.echo(b"x"), 30)
                assert worker.id in str(none.value)
            status = ["status", "--url", server.settings.url]
            done = await asyncio.to_thread(CliRunner().invoke, cli, status)
            assert f"refused     a worker that would join: {worker.id}: " in done.output
            assert any(
                (found.what, found.works) == ("worker", False) and worker.id in found.text
                for found in await server_findings(server.settings.url)
            )
            # A server that takes the scripts ends it.
            server.stop()
            server.options = ()
            server.start()
            await asyncio.wait_for(worker.joined.wait(), 30)
            assert not await refusal(shard)
        finally:
            worker.stop(0.0)
            await asyncio.wait_for(running, 30)
            await shard.close()


def tries(connection: redis.Redis) -> int:
    """How often scripts were called."""
    found = connection.info("commandstats")
    return int(found.get("cmdstat_fcall", {}).get("calls", 0))


@pytest.mark.parametrize("note", ["", "nonsense", "17 w: long ago", "9" * 30 + " w: never"])
async def test_other_notes_say_nothing(settings: Settings, note: str) -> None:
    shard = Shard(settings)
    with redis.Redis.from_url(settings.url) as server:
        server.hset(f"{{{settings.prefix}:queue}}:shape", "refused", note)
    assert await refusal(shard) == ""
    await shard.close()
