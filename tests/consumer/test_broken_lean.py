"""Workers whose Lean does not work, from the start or from some moment on: no request pays for it.

The stand-in is a toolchain of shell scripts. Its Lean is ``bin/lean``, which reads ``lib/part``
before each text, takes the theorem that a worker tries it with, and rejects all else.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.fleets import counter
from support.lean.sites import SHELL
from support.queue.queues import Queue
from support.terminals import Terminal, ended, wait_for_line
from support.waiting import eventually

from leanq.client import AsyncLeanQClient
from leanq.consumer.consumer import WorkerTimings
from leanq.errors import ToolchainError
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment, open_environment
from leanq.queue.settings import Settings
from leanq.worker import Worker

CODE = "theorem wrong : 1 = 2 := rfl"
QUICK = WorkerTimings(pause_after_failure_s=0.05)

_LEAN = """#!/bin/sh
here={here}
case "$1" in
--version) echo "Lean (version 4.20.0, x86_64-unknown-linux-gnu, commit abc123, Release)"; exit 0;;
--print-prefix) echo $here; exit 0;;
esac
. $here/lib/part
while read -r line; do case "$line" in
*leanq_trial*) : > LeanqSubmission.olean; exit 0;;
*wrong*) echo '{{"severity":"error","pos":{{"line":1,"column":0}},"data":"it is wrong"}}'; exit 1;;
*dies*) kill -SEGV $$;;
esac; done
"""


class Toolchain:
    """The stand-in, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.lean, self.part = folder / "bin" / "lean", folder / "lib" / "part"
        for file in (self.lean, self.part):
            file.parent.mkdir(parents=True)
        self.part.touch()
        self.repair()

    def repair(self) -> None:
        self.part.touch()
        self._replace(_LEAN.format(here=self.lean.parents[1]))

    def replace(self) -> None:
        """With a program that ends without a word."""
        self._replace("#!/bin/sh\nexit 1\n")

    def delete(self) -> None:
        self.lean.unlink()

    def lose_a_library(self) -> None:
        self.part.unlink()

    def open(self) -> Environment:
        return open_environment("default", None, lean=str(self.lean))

    def _replace(self, text: str) -> None:
        new = self.lean.with_name("new")
        new.write_text(text)
        new.chmod(0o755)
        new.rename(self.lean)


WAYS: dict[str, Callable[[Toolchain], None]] = {
    "a replaced program": Toolchain.replace,
    "a deleted program": Toolchain.delete,
    "a deleted library": Toolchain.lose_a_library,
}
NOT_SLOW = "a replaced program"


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    return Toolchain(tmp_path / "toolchain")


@pytest.fixture
def second(tmp_path: Path) -> Toolchain:
    """The same on another machine."""
    return Toolchain(tmp_path / "second")


@contextlib.asynccontextmanager
async def running(
    settings: Settings, toolchain: Toolchain
) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    """A worker in this loop, and the task of its life."""
    worker = Worker(settings, [LeanDriver(toolchain.open, slots=2)], slots=2, timings=QUICK)
    task = asyncio.create_task(worker.run())
    try:
        await eventually(lambda: worker.joined.is_set() or task.done())
        yield worker, task
    finally:
        worker.stop(grace_s=0.0)
        await asyncio.wait([task])


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=() if way == NOT_SLOW else pytest.mark.slow) for way in WAYS],
)
async def test_a_worker_whose_lean_does_not_start_registers_for_nothing(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient, toolchain: Toolchain, way: str
) -> None:
    driver = LeanDriver(toolchain.open, slots=2)
    WAYS[way](toolchain)
    waiting = asyncio.create_task(lean.check(CODE))
    await eventually(lambda: counter(queue, "submitted"))
    with pytest.raises(ToolchainError, match=r"(?s)theorem of one line .*'default'.*doctor"):
        await Worker(settings, [driver], slots=2).run()
    status = await queue.status()
    assert not status.workers
    assert not status.environments
    toolchain.repair()
    async with running(settings, toolchain):
        assert (await waiting).attempts == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_process_whose_lean_does_not_start_says_so_and_ends(
    terminal: Terminal, settings: Settings, toolchain: Toolchain, way: str
) -> None:
    terminal.use(settings)
    if way == "a deleted library":
        toolchain.lose_a_library()
    else:
        WAYS[way](toolchain)
    done = terminal.run("worker", "--lean", str(toolchain.lean))
    assert done.code == 3
    assert "--lean" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_a_lean_that_breaks_in_the_middle_costs_no_request_anything(
    settings: Settings, lean: AsyncLeanQClient, toolchain: Toolchain, second: Toolchain, way: str
) -> None:
    async def batch() -> None:
        texts = [f"{CODE} -- {number}" for number in range(60)]
        replies = await asyncio.gather(*map(lean.check, texts))
        assert {(reply.verdict, reply.reason, reply.attempts) for reply in replies} == {
            ("rejected", "lean_error", 1)
        }

    async with running(settings, toolchain) as (_, broken):
        await batch()
        WAYS[way](toolchain)
        task = asyncio.create_task(batch())
        # It ends by itself; what it has claimed until then belongs to the other one.
        with pytest.raises(ToolchainError, match="lean"):
            await asyncio.wait_for(asyncio.shield(broken), 60)
        assert not task.done()
        async with running(settings, second):
            await task


async def test_a_worker_goes_on_where_lean_works_again(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient, toolchain: Toolchain
) -> None:
    async with running(settings, toolchain) as (worker, task):
        toolchain.lose_a_library()
        # The first ones have a Lean that has started before.
        texts = [f"{CODE} -- {number}" for number in range(10)]
        asked = asyncio.gather(*map(lean.check, texts))

        async def given_back() -> bool:
            return await counter(queue, "released") > 0

        await eventually(given_back)
        await eventually(lambda: worker.slot_pool.breaker.quarantined)
        toolchain.part.touch()
        assert {(reply.verdict, reply.attempts) for reply in await asked} == {("rejected", 1)}
        assert not worker.slot_pool.breaker.quarantined
        assert not task.done()


async def test_a_text_that_ends_a_lean_that_works_is_to_blame(
    settings: Settings, queue: Queue, lean: AsyncLeanQClient, toolchain: Toolchain
) -> None:
    async with running(settings, toolchain) as (_, task):
        for number in range(4):
            reply = await lean.check(f"dies {number}")
            assert (reply.verdict, reply.reason, reply.attempts) == ("crashed", "process_died", 1)
        assert (await lean.check(CODE)).verdict == "rejected"
        assert not task.done()
    assert await counter(queue, "released") == 0


@pytest.mark.slow
def test_real_workers_a_broken_one_among_them(
    terminal: Terminal, settings: Settings, toolchain: Toolchain, second: Toolchain
) -> None:
    terminal.use(settings)
    workers = []
    for each in (toolchain, second):
        worker = terminal.start("worker", "--slots", "2", "--lean", str(each.lean))
        wait_for_line(worker.stderr, "serves")
        workers.append(worker)
    files = [terminal.file(f"f{number}.lean", f"{CODE} -- {number}") for number in range(200)]
    task = terminal.start("submit", "--json", *files)
    wait_for_line(task.stdout, "rejected")
    toolchain.replace()
    done = ended(task)
    assert {(line["verdict"], line["attempts"]) for line in done.lines} == {("rejected", 1)}
    assert len(done.lines) > 150
    assert ended(workers[0]).code == 3
    workers[1].send_signal(signal.SIGTERM)
    assert ended(workers[1]).code == 0


async def test_an_import_that_has_gone_missing_is_looked_at_again(
    settings: Settings, lean: AsyncLeanQClient, core: Environment
) -> None:
    script = """
text=$(cat)
case "$text" in *leanq_trial*) : > LeanqSubmission.olean; exit 0;; esac
echo '{"severity":"error","data":"unknown module prefix '"'Gone'"'"}'; exit 1
"""
    opened: list[Environment] = []

    def opener() -> Environment:
        command = (*SHELL[:2], script, str(core.toolchain.program))
        toolchain = replace(core.toolchain, command=command)
        made = replace(core, toolchain=toolchain, header="", fingerprint=f"{len(opened):064}")
        # The first one looks as if a file had been deleted since it was opened.
        opened.append(made if opened else replace(made, stamp="another"))
        return opened[-1]

    worker = Worker(settings, [LeanDriver(opener, slots=1)], slots=1)
    task = asyncio.create_task(worker.run())
    try:
        reply = await lean.check("import Gone")
    finally:
        worker.stop(grace_s=0.0)
        await task
    assert (reply.verdict, reply.reason) == ("rejected", "unknown_import")
    assert reply.fingerprint == opened[1].fingerprint
