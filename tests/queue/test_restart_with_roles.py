"""Servers with roles keep what scripts wrote: over a restart, and on a replica."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.cluster import free_ports
from support.fleets import until
from support.queue.queues import Queue
from support.queue.roles import ROLES, USERS, as_role
from support.queue.shards import LARGE, settlement, submission
from support.required import missing
from support.servers import find_server
from support.waiting import eventually

from leanq.commands.doctor import server_findings

# The user as whom a replica asks, which no file of leanq's has, and a test's own.
_ADMIN = "user leanq-admin on >admin ~* &* +@all\n"


@pytest.fixture(params=["redis-server", "wheel"])
def program(request: pytest.FixtureRequest) -> str:
    """Debian's Redis, and the Valkey of the wheel, or what ``LEANQ_TEST_SERVER`` names."""
    found = shutil.which("redis-server") if request.param == "redis-server" else find_server()
    if found is None:
        missing(request.param)
    return str(found)


def _users(folder: Path, default: str = "") -> Path:
    rules = USERS.read_text()
    for role in ROLES:
        rules = rules.replace(f">{role.upper()}-PASSWORD", f">{role}")
    first, _, rest = rules.partition("\n")
    file = folder / "users.acl"
    file.write_text(f"{default or first}\n{rest}{_ADMIN}")
    return file


class _Server:
    def __init__(self, program: str, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self.socket = folder / "s"
        self._arguments = [program, "--unixsocket", str(self.socket), "--dir", str(folder)]
        self._arguments += ["--save", "", *options]
        if not (folder / "users.acl").exists():
            _users(folder)
        self._arguments += ["--aclfile", str(folder / "users.acl")]

    def start(self) -> None:
        self._process = subprocess.Popen(self._arguments, stdout=subprocess.DEVNULL)
        until(self._answers)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def _answers(self) -> bool:
        try:
            return bool(self.call("PING"))
        except redis.exceptions.ConnectionError:
            return False

    @contextlib.contextmanager
    def admin(self) -> Iterator[redis.Redis]:
        url = as_role(self.socket, "admin").url
        with redis.Redis.from_url(url) as connection:
            yield connection

    def call(self, *words: str | int) -> object:
        with self.admin() as admin:
            return admin.execute_command(*words)

    def contents(self) -> dict[bytes, Any]:
        reads = {
            b"hash": ("HGETALL",),
            b"list": ("LRANGE", 0, -1),
            b"set": ("SMEMBERS",),
            b"zset": ("ZRANGE", 0, -1, "WITHSCORES"),
            b"stream": ("XRANGE", "-", "+"),
            b"string": ("GET",),
        }
        found = {}
        with self.admin() as admin:
            for key in admin.scan_iter():
                command, *rest = reads[admin.type(key)]
                found[key] = admin.execute_command(command, key, *rest)
        return found


async def _work(server: _Server, name: str) -> None:
    """Requests that wait, run, have ended, were given back and are dead; some are large."""
    client, worker = (Queue(as_role(server.socket, role)) for role in ("client", "worker"))
    await worker.register("w", b"", {"a": b""})
    for n in range(40):
        small = submission(f"0-{name}{n}", digest=f"{n % 7}")
        await client.submit("c", [small, submission(f"0-{name}l{n}", body=LARGE)])
    jobs = (await worker.claim("w", ["a"], 30, busy=0, token=f"{name}:")).jobs
    await worker.claim("w", [], 0, busy=0, token="-", settlements=[*map(settlement, jobs[:10])])
    await worker.release("w", [(job.request_id, job.token) for job in jobs[10:20]], how="retry")
    await client.cancel([f"0-{name}39"])
    for queue in (client, worker):
        await queue.close()


async def test_a_killed_server_replays_what_scripts_wrote(tmp_path: Path, program: str) -> None:
    options = ("--port", "0", "--appendonly", "yes", "--appendfsync", "always")
    server = _Server(program, tmp_path, *options)
    server.start()
    try:
        await _work(server, "r")
        before = server.contents()
        server.kill()
        server.start()
        assert server.contents() == before
        assert not server.call("ACL", "LOG")
        await _work(server, "again")
    finally:
        server.kill()


async def test_a_replica_gets_what_scripts_wrote(tmp_path: Path, program: str) -> None:
    """At first all of it, and after its connection was cut the part that it lacks."""
    (port,) = free_ports(1)
    master = _Server(program, tmp_path / "m", "--port", str(port))
    replica = _Server(
        *(program, tmp_path / "r", "--port", "0", "--masteruser", "leanq-admin"),
        *("--masterauth", "admin", "--replicaof", f"127.0.0.1 {port}"),
    )

    def in_step() -> bool:
        with master.admin() as ours, replica.admin() as theirs:
            here, there = ours.info("replication"), theirs.info("replication")
        return bool(
            there.get("master_link_status") == "up"
            and there["slave_repl_offset"] == here["master_repl_offset"]
        )

    master.start()
    try:
        await _work(master, "before")
        replica.start()
        await eventually(in_step)
        assert replica.contents() == master.contents()
        master.call("CLIENT", "KILL", "TYPE", "replica")
        await _work(master, "cut")
        await eventually(in_step)
        with master.admin() as admin:
            stats = admin.info("stats")
        assert (stats["sync_full"], stats["sync_partial_ok"]) == (1, 1)
        assert replica.contents() == master.contents()
        # What took over goes on with all that was acknowledged.
        expected = master.contents()
        master.kill()
        replica.call("REPLICAOF", "NO", "ONE")
        assert replica.contents() == expected
        await _work(replica, "after")
    finally:
        master.kill()
        replica.kill()


@pytest.mark.parametrize("default", ["", "user default off"])
async def test_doctor_names_a_default_user_as_whom_no_restart_replays(
    tmp_path: Path, program: str, default: str
) -> None:
    """It warns of exactly the servers that lose what scripts wrote."""
    _users(tmp_path, default)
    options = ("--port", "0", "--appendonly", "yes", "--appendfsync", "always")
    server = _Server(program, tmp_path, *options)
    server.start()
    try:
        found = await server_findings(as_role(server.socket, "observer").url)
        await _work(server, "r")
        before = server.contents()
        server.kill()
        server.start()
        is_lost = server.contents() != before
    finally:
        server.kill()
    told = [each for each in found if each.what == "restart"]
    assert len(told) == is_lost
    for finding in told:
        assert finding.warns
        assert "user default off resetpass ~* &* +@all" in finding.text
    assert not (is_lost and not default)
