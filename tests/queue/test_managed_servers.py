"""Servers of a cloud, which refuse what only the cloud's operators may do, and some more."""

from __future__ import annotations

import asyncio

import pytest
import redis
from click.testing import CliRunner
from support.fleets import working
from support.queue.queues import Queue
from support.servers import own_server

from leanq.cli import cli
from leanq.client import AsyncLeanQClient
from leanq.commands.doctor import Finding, server_findings
from leanq.queue.scripts import SCRIPTS
from leanq.queue.settings import Settings
from leanq.trainers.replay import ReplayMemory
from leanq.trainers.replay_entry import ReplayEntry

# Memorystore's list.
OPERATORS = (
    "ACL BGREWRITEAOF BGSAVE CLIENT CLUSTER COMMAND CONFIG DEBUG LASTSAVE MIGRATE MODULE MONITOR "
    "OBJECT REPLICAOF SAVE SHUTDOWN"
)
# With these, scripts take the place of functions.
FUNCTIONS = "FUNCTION FCALL FCALL_RO"
RUNS_ALL = f"runs all {len(SCRIPTS)} scripts"
# What some proxies know nothing of. redis-py 8 would greet a server by it.
HELLO = "HELLO"
UNASKED = "this user may not ask for its eviction policy and its workers"


def without(commands: str) -> list[str]:
    """A server's options that leave these commands out."""
    return [part for name in commands.split() for part in ("--rename-command", name, "")]


async def served(settings: Settings) -> Finding:
    """What doctor says of a server on which a worker joins, and answers what clients ask."""
    async with working(settings), AsyncLeanQClient(settings) as lean:
        assert await lean.echo(b"x" * 100_000) == b"x" * 100_000
        assert await lean.echo(b"small") == b"small"
        (found,) = await server_findings(settings.url)
        assert found.works
    return found


@pytest.mark.parametrize(
    "commands", [OPERATORS, f"{FUNCTIONS} {HELLO}", f"{OPERATORS} {FUNCTIONS}"]
)
async def test_a_server_without_commands_of_its_operators_serves(commands: str) -> None:
    with own_server(*without(commands)) as server:
        found = await served(server.settings)
        assert RUNS_ALL in found.text
        assert "maxmemory-policy noeviction" in found.text


@pytest.mark.parametrize("more", ["INFO", f"INFO {HELLO}"])
async def test_the_doctor_says_what_it_may_not_look_at(more: str) -> None:
    with own_server(*without(f"{OPERATORS} {more}")) as server:
        found = await served(server.settings)
        assert RUNS_ALL in found.text
        assert UNASKED in found.text
        status = ["status", "--url", server.settings.url]
        done = await asyncio.to_thread(CliRunner().invoke, cli, status)
        assert done.exit_code == 0, done.output
        async with ReplayMemory("m", server.settings) as memory:
            assert await memory.write([ReplayEntry("accepted", "t")]) == 1


async def test_a_user_without_dangerous_commands_is_served() -> None:
    """As clouds make them: INFO is one of these."""
    with own_server() as server:
        with redis.Redis.from_url(server.settings.url) as admin:
            rules = ["+@all", "-@admin", "-@dangerous", "-acl", "-config", "-client"]
            admin.acl_setuser("cloud", True, passwords="+secret", keys="*", channels="*")
            admin.execute_command("ACL", "SETUSER", "cloud", *rules)
        place = server.folder / "server.sock"
        found = await served(Settings(url=f"unix://cloud:secret@{place}"))
        assert RUNS_ALL in found.text
        assert UNASKED in found.text
        async with Queue.every(server.settings) as (queue,):
            assert (await queue.status()).counters["settled"] == 2
