"""Lean behind a preloaded header: the same bytes, the same limits, and Lean anew where it must."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.lean_texts import lean_texts
from support.paths import SAMPLES
from support.sandboxes import children, running
from support.sites import Site
from support.waiting import eventually

from leanq.lean import pass_memory
from leanq.lean.environment import Environment
from leanq.lean.fork_server.proof import RunBytes, compiled_by
from leanq.lean.fork_server.server import ForkRules, ForkServer, forkable_header, memory_of
from leanq.lean.process import Lean, Slot
from leanq.lean.sandbox.sandbox import Exit, Finished, Limits
from leanq.queue.metrics import COUNTS
from leanq.queue.requests import Request

HEADER = "prelude\nimport Core\n"
PROOF = "theorem t (p : Prop) (h : p) : p := h\n"
LIMITS = Limits(cpu_s=60.0, wall_s=100.0, memory_bytes=4 << 30)
RULES = ForkRules(preload_after=1, prove_after=2, compare_every=0)
COMPILE = ("-o", "LeanqSubmission.olean", "--json", "--stdin")
# A few texts take longer, such as those whose stack overflows: they are not compared.
SHORT = replace(LIMITS, cpu_s=5.0)
PARTS = 4


@contextlib.asynccontextmanager
async def opened(
    environment: Environment, *, forked: bool, rules: ForkRules = RULES
) -> AsyncIterator[Lean]:
    forks = ForkServer(environment, rules) if forked else None
    lean = Lean(environment, slots=1, forks=forks)
    try:
        await lean.open()
        yield lean
    finally:
        await lean.close()


@contextlib.asynccontextmanager
async def preloaded(environment: Environment) -> AsyncIterator[Lean]:
    """A Lean whose fork server has imported the environment's own header."""
    async with opened(environment, forked=True) as lean:
        await forked_once(lean, HEADER + PROOF)
        yield lean


async def forked_once(lean: Lean, text: str) -> None:
    """Runs a text until it is a fork that does it."""

    async def is_forked() -> bool:
        async with lean.slot() as slot:
            assert (await lean.run(slot, text, LIMITS)).done.exit.code == 0
            return was_forked(slot)

    await eventually(is_forked, deadline_s=60.0)


def was_forked(slot: Slot) -> bool:
    return slot.sandbox in slot.forked.values()


async def everything(lean: Lean, slot: Slot, text: str) -> RunBytes:
    run = await lean.run(slot, text, SHORT)
    return RunBytes.of(run.done, compiled_by(COMPILE, slot.left))


async def compared(core: Environment, texts: Sequence[str]) -> int:
    """How many of the texts came out of forks; each as from a Lean that starts anew."""
    headers: dict[str, list[str]] = {}
    for text in texts:
        whole = core.header_for(text) + text
        if header := forkable_header(core, whole):
            headers.setdefault(header, []).append(whole)
    count = 0
    async with opened(core, forked=True) as lean, opened(core, forked=False) as plain:
        for header, wholes in headers.items():
            async with plain.slot() as other:
                if (await everything(plain, other, header)).code != 0:
                    continue  # nothing can be behind it
            await forked_once(lean, header)
            for whole in wholes:
                async with lean.slot() as slot, plain.slot() as other:
                    forked = await everything(lean, slot, whole)
                    expected = await everything(plain, other, whole)
                    if forked.stopped or expected.stopped:
                        continue
                    assert was_forked(slot), whole
                    assert forked.difference(expected) == "", whole
                    count += 1
    return count


async def test_texts_come_out_as_from_a_lean_that_starts_anew(core: Environment) -> None:
    assert await compared(core, lean_texts()[::40]) > 8


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("part", range(PARTS))
async def test_every_text_of_the_repository_comes_out_the_same(
    core: Environment, part: int
) -> None:
    assert await compared(core, lean_texts()[part::PARTS]) > 90


@pytest.mark.parametrize(
    "text",
    [
        f"-- first a remark\n{HEADER}{PROOF}",
        pytest.param(f"/- -/ {HEADER}{PROOF}", marks=pytest.mark.slow),
        pytest.param(f"prelude\nimport Missing\n{PROOF}", marks=pytest.mark.slow),
        pytest.param(f"prelude\nimport «Core»\n{PROOF}", marks=pytest.mark.slow),
        pytest.param(f"{HEADER}open Std.Internal.UV\n{PROOF}", marks=pytest.mark.slow),
        f"{HEADER}#eval IO.sleep 1000\n{PROOF}",
    ],
)
async def test_lean_starts_anew_for(core: Environment, text: str) -> None:
    async with preloaded(core) as lean, lean.slot() as slot:
        await lean.run(slot, text, LIMITS)
        assert not was_forked(slot)


@pytest.mark.parametrize("kind", ["a hole", "a link", "a folder", "a pipe"])
def test_what_stands_in_a_compiled_files_place_is_not_read_whole(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "LeanqSubmission.olean"
    done = Finished(Exit(0, None, None, 0.1, 0.1, 0), b"", b"")
    match kind:
        case "a hole":
            with path.open("wb") as file:
                file.truncate(8 << 30)
        case "a link":
            path.symlink_to("/etc/passwd")
        case "a folder":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = RunBytes.of(done, path)
    assert (seen.compiled == b"") == (kind != "a hole")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # of 1 KiB


def test_a_header_with_two_readings_a_line_is_read_once(core: Environment) -> None:
    """A worker reads nothing else meanwhile, and whoever gets the request after it neither."""
    lines = "import all public import Core\n" * 200
    began_s = time.monotonic()
    assert forkable_header(core, f"{lines}import «Core»\n{PROOF}") is None
    assert time.monotonic() - began_s < 1.0


async def test_a_header_that_comes_again_is_preloaded(core: Environment) -> None:
    async with opened(core, forked=True) as lean:
        async with lean.slot() as slot:
            await lean.run(slot, "prelude\n", LIMITS)
            assert not was_forked(slot)
        await forked_once(lean, "prelude\n")


async def test_a_text_knows_nothing_of_those_before_it(core: Environment) -> None:
    async with preloaded(core) as lean, lean.slot() as slot:
        for _ in range(2):
            assert (await lean.run(slot, HEADER + PROOF, LIMITS)).done.exit.code == 0
            assert was_forked(slot)
        run = await lean.run(slot, HEADER + "theorem u (p : Prop) (h : p) : p := t p h\n", LIMITS)
        assert run.outcome.verdict == "rejected"


@pytest.mark.parametrize(("limit", "stopped"), [("cpu_s", "cpu"), ("memory_bytes", "memory")])
async def test_limits_hold_in_a_fork(core: Environment, limit: str, stopped: str) -> None:
    text = (SAMPLES / "stack_overflow.lean").read_text()
    low = replace(LIMITS, **{limit: 2.0 if limit == "cpu_s" else 20 << 20})
    async with preloaded(core) as lean, lean.slot() as slot:
        run = await lean.run(slot, HEADER + text.partition(HEADER)[2], low)
        assert was_forked(slot)
        assert run.done.exit.stopped == stopped
        assert (await lean.run(slot, HEADER + PROOF, LIMITS)).done.exit.code == 0


async def test_a_zygote_that_died_costs_no_text(core: Environment) -> None:
    async with preloaded(core) as lean:
        assert lean.forks is not None
        for pid in lean.forks.pids():
            os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            async with lean.slot() as slot:
                assert (await lean.run(slot, HEADER + PROOF, LIMITS)).done.exit.code == 0


@pytest.mark.slow
async def test_a_proof_is_remembered_and_what_is_not_proved_waits_for_it(
    core: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_memory, "_passed", set())
    environment = replace(core, cache=tmp_path)
    seldom = replace(RULES, prove_after=1000)
    text = "prelude\n"
    async with opened(environment, forked=True, rules=seldom) as lean:
        for _ in range(3):
            async with lean.slot() as slot:
                await lean.run(slot, text, LIMITS)
        assert lean.forks is not None
        assert not lean.forks.pids()
        assert not list(tmp_path.rglob("*.passed"))
    async with opened(environment, forked=True) as lean:
        await forked_once(lean, text)
    assert len(list(tmp_path.rglob("*.passed"))) == 1
    monkeypatch.setattr(pass_memory, "_passed", set())  # as in another process
    async with opened(environment, forked=True, rules=seldom) as lean:
        await forked_once(lean, text)
    # Behind another header nothing is known.
    async with opened(environment, forked=True, rules=seldom) as lean:
        for _ in range(3):
            async with lean.slot() as slot:
                await lean.run(slot, HEADER + PROOF, LIMITS)
        assert lean.forks is not None
        assert not lean.forks.pids()


def talkative(site: Site) -> Environment:
    """One whose Lean says an empty line more where it starts."""
    return site.behind("/bin/sh", "-c", 'echo; exec "$@"', "sh")


async def test_a_share_of_texts_is_run_both_ways_and_a_difference_ends_it(site: Site) -> None:
    environment = talkative(site)
    command = (*environment.toolchain.command, *environment.options, *COMPILE)
    memory = memory_of(environment, HEADER, command)
    memory.keep()
    driver = await site.driver(environment, forks=replace(RULES, compare_every=1))

    async def is_given_up() -> bool:
        assert (await driver.run(Request("check", code=PROOF))).verdict == "accepted"
        return "degraded" in driver.about

    compared = COUNTS["leanq_fork_server_total", "compared"]
    await eventually(is_given_up, deadline_s=60.0)
    assert COUNTS["leanq_fork_server_total", "compared"] > compared
    assert "says something else: stdout" in str(driver.about["degraded"])
    assert not memory.is_kept()


async def test_one_that_says_something_else_is_given_up(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "leanq.worker"):
        async with opened(talkative(site), forked=True) as lean:
            forks = lean.forks
            assert forks is not None
            for _ in range(2):
                async with lean.slot() as slot:
                    await lean.run(slot, HEADER + PROOF, LIMITS)
            await eventually(lambda: bool(forks.unavailable), deadline_s=60.0)
            async with lean.slot() as slot:
                assert (await lean.run(slot, HEADER + PROOF, LIMITS)).done.exit.code == 0
                assert not was_forked(slot)
    assert "says something else: stdout" in caplog.text


async def test_a_fork_that_is_killed_costs_no_text(core: Environment) -> None:
    text = HEADER + (SAMPLES / "stack_overflow.lean").read_text().partition(HEADER)[2]
    async with preloaded(core) as lean, lean.slot() as slot:
        assert lean.forks is not None
        run = asyncio.create_task(lean.run(slot, text, replace(LIMITS, cpu_s=2.0)))
        [zygote] = children(lean.forks.pids()[0])

        def working() -> list[int]:
            found = [zygote]
            for pid in found:  # which grows meanwhile
                found += children(pid) if running(pid) else []
            return [pid for pid in found if cpu_s(pid) > 0.5 and pid != zygote]

        await eventually(lambda: working() != [])
        os.kill(working()[-1], signal.SIGKILL)
        assert (await run).done.exit.stopped == "cpu"
        assert not was_forked(slot)


def cpu_s(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return sum(map(int, fields[11:13])) / 100
    return 0.0
