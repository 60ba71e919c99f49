"""What operators hold back: nothing of it starts, nothing of it is lost, and others go on."""

from __future__ import annotations

import asyncio
import signal
from typing import Literal

import pytest
from support.queue.queues import Queue
from support.queue.shards import Shard
from support.terminals import SAMPLES, Terminal, ended, wait_for_line

from leanq.fleet.stats import environments_of
from leanq.queue.settings import Settings
from leanq.queue.worker_queue import reap


async def test_a_paused_environment_starts_nothing(shard: Shard) -> None:
    await shard.submit("0-1", "0-2")
    running = await shard.job()
    assert await shard.queue.set_paused("environment", "a", paused=True)
    assert not await shard.queue.set_paused("environment", "a", paused=True)
    await shard.submit("0-3", "0-4", environment="b")
    await shard.submit("0-5")
    # What runs goes on, and others' turns come.
    assert await shard.settle(running) == (True,)
    jobs = (await shard.claim(environments=["a", "b"])).jobs
    assert [job.request_id for job in jobs] == ["0-3", "0-4"]
    assert (await shard.claim(environments=["a"])).jobs == ()
    status = await shard.queue.status()
    assert set(status.paused) == {"e:a"}
    environment = environments_of(status)["a"]
    assert (environment.waiting, environment.held) == (2, 2)
    # No worker is to be woken for the age of what is held back.
    shard.advance(7_200_000)
    status = await shard.queue.status()
    assert max(row.oldest_s for row in status.priorities) > 7000
    assert environments_of(status)["a"].oldest_s == 0
    await shard.settle(*jobs)
    assert await shard.queue.set_paused("environment", "a", paused=False)
    assert shard.wakeup() > 0
    jobs = (await shard.claim()).jobs
    assert [job.request_id for job in jobs] == ["0-2", "0-5"]
    await shard.settle(*jobs)


async def test_no_worker_is_woken_for_what_is_held_back(shard: Shard) -> None:
    await shard.queue.set_paused("environment", "a", paused=True)
    await shard.submit("0-1", environment="a")
    assert shard.wakeup("a") == 0
    await shard.queue.set_paused("tenant", "t", paused=True)
    await shard.submit("0-2", environment="b", tenant="t")
    await shard.submit("0-3", environment="b", tenant="u")
    (job,) = (await shard.claim(want=1, environments=["b"])).jobs
    assert job.request_id == "0-3"
    # No token is left that wakes one worker after another for nothing.
    while shard.wakeup("b"):
        shard.server.lpop(f"{shard.tag}:wakeup:b")
    assert (await shard.claim(environments=["a", "b"])).jobs == ()
    assert (shard.wakeup("a"), shard.wakeup("b")) == (0, 0)
    await shard.settle(job)
    await shard.queue.cancel(["0-1", "0-2"])
    await shard.queue.set_paused("environment", "a", paused=False)
    await shard.queue.set_paused("tenant", "t", paused=False)
    assert (await shard.claim(environments=["a", "b"])).jobs == ()


@pytest.mark.parametrize("kind", ["environment", "tenant"])
async def test_what_is_given_back_while_paused_wakes_nobody(
    shard: Shard, kind: Literal["environment", "tenant"]
) -> None:
    name = "a" if kind == "environment" else "t"
    await shard.submit("0-1", "0-2", "0-3", tenant="t", longest_run_ms=1_000)
    released, timed_out, _ = [await shard.job(worker) for worker in ("x", "y", "z")]
    await shard.queue.set_paused(kind, name, paused=True)
    shard.server.delete(f"{shard.tag}:wakeup:a")
    await shard.queue.release("x", [(released.request_id, released.token)], how="requeue")
    shard.advance(2_000)
    assert (await shard.queue.renew("y", ["a"])).timed_out == (timed_out.request_id,)
    await shard.lapse()
    assert (await reap(shard.queue)).requeued == 1
    assert (await shard.queue.status()).priorities[0].waiting == 3
    # Neither a token nor a heartbeat makes a worker claim.
    assert shard.wakeup() == 0
    assert (await shard.queue.renew("y", ["a"])).waiting == 0
    await shard.queue.set_paused(kind, name, paused=False)
    assert shard.wakeup() > 0
    assert (await shard.queue.renew("y", ["a"])).waiting == 3
    jobs = (await shard.claim()).jobs
    assert {job.request_id for job in jobs} == {"0-1", "0-2", "0-3"}
    await shard.settle(*jobs)


async def test_a_quarantined_request_waits_for_its_environment_alone(shard: Shard) -> None:
    await shard.quarantined("0-1", tenant="t")
    await shard.queue.set_paused("tenant", "t", paused=True)
    assert (await shard.queue.renew("w", ["a"])).waiting == 1
    assert environments_of(await shard.queue.status())["a"].due == 1
    await shard.queue.set_paused("environment", "a", paused=True)
    assert shard.wakeup() == 0
    assert (await shard.queue.renew("w", ["a"])).waiting == 0
    seen = environments_of(await shard.queue.status())["a"]
    assert (seen.waiting, seen.held, seen.quarantined, seen.due) == (1, 1, 0, 0)
    # Its tenant goes on, and its environment does not.
    await shard.queue.set_paused("tenant", "t", paused=False)
    assert shard.wakeup() == 0
    await shard.queue.set_paused("environment", "a", paused=False)
    assert shard.wakeup() > 0
    await shard.settle(await shard.job())


async def test_tokens_of_what_was_paused_meanwhile_wake_nobody(shard: Shard) -> None:
    await shard.submit("0-1", "0-2")
    assert shard.wakeup() > 0
    await shard.queue.set_paused("environment", "a", paused=True)
    assert shard.wakeup() == 0
    # A busy worker passes on the token that it took before.
    await shard.queue.notify("a")
    assert shard.wakeup() == 0
    await shard.queue.set_paused("environment", "a", paused=False)
    await shard.settle(*(await shard.claim()).jobs)


async def test_new_requests_wake_workers_for_those_that_may_start(shard: Shard) -> None:
    await shard.queue.set_paused("tenant", "t", paused=True)
    await shard.submit("0-1", "0-2", tenant="t")
    assert shard.wakeup() == 0
    await shard.submit("0-3", tenant="u")
    assert shard.wakeup() == 1
    await shard.queue.cancel(["0-1", "0-2"])
    await shard.settle(await shard.job())


async def test_a_paused_tenant_keeps_its_line_and_gets_its_turn_back(shard: Shard) -> None:
    for number in range(3):
        await shard.submit(f"0-t{number}", tenant="t")
        await shard.submit(f"0-u{number}", tenant="u", priority=number)
    (first,) = (await shard.claim(want=1)).jobs
    assert await shard.queue.set_paused("tenant", "t", paused=True)
    # What is given back stands in front of the line again, and waits there.
    held = first if first.request_id == "0-t0" else await shard.job()
    await shard.queue.release("w", [(held.request_id, held.token)], how="requeue")
    await shard.submit("0-t3", tenant="t")
    status = await shard.queue.status()
    assert sum(row.held for row in status.priorities) >= 3
    jobs = (await shard.claim()).jobs
    assert all(job.request_id.startswith("0-u") for job in jobs)
    await shard.settle(*jobs)
    assert await shard.queue.set_paused("tenant", "t", paused=False)
    jobs = (await shard.claim()).jobs
    assert [job.request_id for job in jobs if "t" in job.request_id] == [
        "0-t0",
        "0-t1",
        "0-t2",
        "0-t3",
    ]
    await shard.settle(*jobs)


def offer(settings: Settings, *environments: str) -> None:
    """A worker that offered these environments and left."""

    async def come_and_go() -> None:
        async with Queue.every(settings) as queues:
            for queue in queues:
                await queue.register("w", b"", dict.fromkeys(environments, b""))
                await queue.release("w", [], leave=True)

    asyncio.run(come_and_go())


@pytest.mark.slow
@pytest.mark.usefixtures("swept")
def test_from_the_command_line(terminal: Terminal, settings: Settings) -> None:
    terminal.use(settings)
    done = terminal.run("pause", "--env", "core")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        "leanq: no worker has ever offered the environment 'core'; no environment is known\n"
    )
    offer(settings, "core", "default")
    done = terminal.run("resume", "--env", "cor")
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("'cor'; known: core, default\n")
    done = terminal.run("pause", "--env", "core")
    assert (done.code, done.out) == (
        0,
        "environment core is paused: its requests wait, what runs goes on\n",
    )
    assert terminal.run("pause", "--tenant", "me", "--json").lines == [
        {"tenant": "me", "paused": True, "changed": True}
    ]
    shown = terminal.run("status")
    assert "paused      environment core for " in shown.out
    assert "paused      tenant me for " in shown.out
    submit = terminal.start("submit", str(SAMPLES / "wrong.lean"), "--tenant", "me")
    said = wait_for_line(submit.stderr, "the tenant 'me' is paused; the requests wait")
    assert said.endswith("(leanq resume)\n")
    shown = terminal.run("status")
    assert ["default", "1", "1", "1", "–", "1"] in map(str.split, shown.out.splitlines())
    submit.send_signal(signal.SIGINT)
    ended(submit)
    assert terminal.run("resume", "--env", "core").out == "environment core goes on\n"
    # The name of what is resumed may have been mistyped.
    assert terminal.run("resume", "--env", "core").out == (
        "environment core goes on, as before\nstill paused: tenant me\n"
    )
    assert terminal.run("resume", "--tenant", "me").code == 0
    (record,) = terminal.run("status", "--json").lines
    assert record["paused"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--env", "a", "--tenant", "b"], ["--env", "a b"]])
def test_what_is_nothing_to_pause(
    terminal: Terminal, settings: Settings, queue: Queue, options: list[str]
) -> None:
    terminal.use(settings)
    done = terminal.run("pause", *options)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("leanq: ")
