"""Lean behind a preloaded header: the same bytes, the same limits, and Lean anew where it must."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis.strategies import lists, sampled_from
from support.lean.forks import (
    COMPILE,
    LIMITS,
    RULES,
    compared,
    everything,
    forked_once,
    opened,
    was_forked,
)
from support.lean.lean_texts import lean_texts
from support.lean.sandboxes import children, running
from support.lean.sites import Site
from support.paths import SAMPLES
from support.waiting import eventually

from leanq.errors import SandboxError
from leanq.lean.environment import Environment, python_folders
from leanq.lean.run import pass_memory
from leanq.lean.run.fork_server import ForkRules, ForkServer
from leanq.lean.run.headers import forkable_header
from leanq.lean.run.headers_memory import HeadersMemory
from leanq.lean.run.preloaded import Preloaded, PreloadError, letters
from leanq.lean.run.process import Lean, _is_doubtful
from leanq.lean.run.proof import (
    BARE_HEADER,
    Key,
    Prover,
    RunBytes,
    compiled_by,
    memory_of,
)
from leanq.lean.run.toolchain import LAUNCHER
from leanq.lean.run.zygote_client import Zygote
from leanq.lean.sandbox.sandbox import PACKAGE, Exit, Finished, bare_python
from leanq.queue.metrics import COUNTS
from leanq.queue.requests import Request

HEADER = "prelude\nimport Core\n"
PROOF = "theorem t (p : Prop) (h : p) : p := h\n"
# It has a thousand objects made.
COSTLY = (
    f"theorem u (p : Prop) (h : p) : {'And p (' * 9}p{')' * 9} := {'.intro h (' * 9}h{')' * 9}\n"
)
# Of headers, and of what may be taken for one.
PIECES = [
    *("module", "prelude", "public", "meta", "import", "all", "Core", "«Core»", ".", "«", "»"),
    *(" ", "\n", "\r\n", "\t", "--", "/-", "-/", "/--", "/-!", '"', "#eval 1", "é", "\ufeff"),
]
PARTS = 4


@contextlib.asynccontextmanager
async def preloaded(environment: Environment) -> AsyncIterator[Lean]:
    """A Lean whose fork server has imported the environment's own header."""
    async with opened(environment, forked=True) as lean:
        await forked_once(lean, HEADER + PROOF)
        yield lean


@pytest.mark.slow
async def test_a_trial_that_is_to_end_lean_is_no_death(core: Environment) -> None:
    before = COUNTS.copy()
    await Prover(core, hidden=(), nice=0).prove_machine(anew=True)
    assert not [name for name in COUNTS - before if name[0] == "leanq_lean_deaths_total"]


@pytest.mark.slow
async def test_texts_come_out_as_from_a_lean_that_starts_anew(core: Environment) -> None:
    assert await compared(core, lean_texts()[::120]) > 2


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
        pytest.param(f"prelude\nimport Missing\n{PROOF}", marks=pytest.mark.slow),
        pytest.param(f"prelude\nimport «Core»\n{PROOF}", marks=pytest.mark.slow),
        pytest.param(f"{HEADER}#eval Std.Internal.UV.Loop.alive\n{PROOF}", marks=pytest.mark.slow),
        f"{HEADER}#eval IO.sleep 1000\n{PROOF}",
    ],
)
async def test_lean_starts_anew_for(core: Environment, text: str) -> None:
    async with preloaded(core) as lean, lean.slot() as slot:
        await lean.run(slot, text, LIMITS)
        assert not was_forked(slot)


ODD_HEADERS = [
    f"\n  \r\n\n{HEADER}",
    f"-- a remark\n{HEADER}",
    "/- one /- in another -/ é -/prelude--x\n/-/ /- -/ -/import/- y -/Core\n/- -/",
    "prelude import Core ",
    f"{HEADER}\r\n/-! of the module -/\r\n",
    "prelude\timport Core\n",
    f"\ufeff{HEADER}",
]


@pytest.mark.slow
@pytest.mark.parametrize("header", ODD_HEADERS)
async def test_blanks_and_comments_may_stand_in_a_header(core: Environment, header: str) -> None:
    """Texts with the same imports share a process, and say what Lean says that starts anew."""
    assert await compared(core, [header + PROOF, header + "theorem (\n", header]) >= 2


def test_headers_with_the_same_imports_have_one_key(core: Environment) -> None:
    keys = {forkable_header(core, f"{header}{PROOF}") for header in ODD_HEADERS[:5]}
    assert keys == {HEADER}


@pytest.mark.parametrize(
    "header",
    [
        "/-! of the module -/\nprelude\nimport Core\n",
        "/-- of nothing -/ prelude\n",
        "- prelude\n",
        "/- prelude\nimport Core\n",
        "#eval 1 prelude\nimport Core\n",
        '"-/" prelude\n',
    ],
)
def test_what_is_no_header_is_no_key(core: Environment, header: str) -> None:
    """Lean imports Init for it, which is not there."""
    assert forkable_header(core, header + PROOF) is None


@given(pieces=lists(sampled_from(PIECES), max_size=12))
def test_a_preloaded_header_has_imports_alone(core: Environment, pieces: list[str]) -> None:
    """Whatever stands in a text, nothing that it chooses is run outside its own walls."""
    found = forkable_header(core, "".join(pieces))
    if found is not None:
        words = {"module", "prelude", "public", "meta", "import", "all", "Core"}
        assert set(found.split()) <= words
        assert forkable_header(core, found) == found


@pytest.mark.slow
async def test_a_fork_reads_the_header_that_it_is_given(core: Environment) -> None:
    """It imports for itself where the preloaded header is another."""
    command = core.command(COMPILE)
    forks = ForkServer(core, RULES)
    try:
        await forks.preload("prelude\n")
        sandbox = await forks.take("prelude\n", command)
        assert sandbox is not None
        for text in (HEADER + PROOF, f"-- x\n{HEADER}#check Nat\n", f"module\n{HEADER}{PROOF}"):
            sandbox.clear()
            env = core.sandbox_env(sandbox.scratch)
            done = await sandbox.run(command, env=env, limits=LIMITS, stdin=text.encode())
            async with opened(core, forked=False) as plain, plain.slot() as slot:
                expected = await everything(plain, slot, text)
                seen = RunBytes.of(done, compiled_by(COMPILE, sandbox.left))
                assert seen.difference(expected) == ""
        await forks.give_back("prelude\n", sandbox, command)
    finally:
        await forks.close()


@pytest.mark.parametrize("name", ["uv_comm", "asyncSignal", "timer_http"])
def test_names_that_speak_of_timers_cost_no_fork(core: Environment, name: str) -> None:
    text = f"{HEADER}-- http://example.org\n{PROOF.replace(' t ', f' {name} ')}"
    assert forkable_header(core, text) == HEADER
    assert forkable_header(core, f"{text}run_cmd do {name}\n") is None


def test_a_text_without_a_header_has_none_of_blanks(core: Environment) -> None:
    assert forkable_header(core, f"\n\n{PROOF}") is None


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
    lines = "prelude\n" + "import all public import Core\n" * 200
    began_s = time.process_time()
    assert forkable_header(core, f"{lines}import «Core»\n{PROOF}") is None
    assert time.process_time() - began_s < 5.0


@pytest.mark.slow
async def test_a_long_header_costs_no_other_its_fork_server(core: Environment) -> None:
    """Whoever sends it often enough would have Lean start for everybody."""
    imports = "import Core\n"
    longest = "prelude\n" + imports * ((64 << 10) // len(imports) - 1)
    async with opened(core, forked=True) as lean:
        assert forkable_header(core, longest + imports * 2 + PROOF) is None
        await forked_once(lean, longest + PROOF)
        assert lean.forks is not None
        assert not lean.forks.unavailable


def test_a_long_text_is_looked_through_at_once(core: Environment) -> None:
    text = f"{HEADER}/- {'x' * (8 << 20)} -/\n{PROOF}"
    began_s = time.process_time()
    assert forkable_header(core, text) == HEADER
    assert time.process_time() - began_s < 0.5
    assert forkable_header(core, text + "-- IO.Sleep\n") is None


async def test_a_worker_preloads_nothing_for_its_own_trial(core: Environment) -> None:
    async with opened(core, forked=True) as lean:
        assert lean.forks is not None
        assert not lean.forks.pids()
        await lean.prove()
        assert not lean.forks.pids()


async def test_runs_with_other_arguments_share_a_process(core: Environment) -> None:
    unfinished = f"{HEADER}theorem t (p : Prop) : p := sorry\n"
    async with preloaded(core) as lean:
        assert lean.forks is not None
        for options, compiles, code in (
            ((), False, 0),
            (("-Dweak.maxErrors=1000000",), False, 0),
            (("-DwarningAsError=true",), False, 1),
            (("-DwarningAsError=true", "-i", "notes.ilean"), True, 1),
            (("-i", "notes.ilean"), True, 0),
            ((), True, 0),
        ):
            async with lean.slot() as slot:
                run = await lean.run(slot, unfinished, LIMITS, options=options, compile_=compiles)
                assert was_forked(slot)
                assert run.done.exit.code == code
                has_notes = "notes.ilean" in options and code == 0
                assert (slot.left / "notes.ilean").exists() == has_notes
                assert (slot.left / "LeanqSubmission.olean").exists() == (compiles and code == 0)
        assert len(lean.forks.pids()) == 1


def test_a_fork_takes_files_and_options_alone() -> None:
    assert letters([]) == []
    own = ["-o", "a", "-DmaxErrors=1", "-i", "b"]
    assert letters(own) == [("o", "a"), ("D", "maxErrors=1"), ("i", "b")]
    for other in ("--incr", "-Tx", "a", "-", "--root=x"):
        assert letters([*own, other]) is None


def proved_headers(core: Environment, number: int) -> list[Key]:
    """Headers that differ by blanks, and are taken for proved."""
    keys = [f"prelude{' ' * n}\nimport Core\n" for n in range(1, number + 1)]
    for key in keys:
        memory_of(core, key).keep()
    return keys


async def took(forks: ForkServer, key: Key, patience_s: float = 60.0) -> bool:
    """Whether a text with this header comes to a fork."""
    command = forks.environment.command(COMPILE)
    sandbox = await forks.take(key, command, patience_s=patience_s)
    if sandbox is not None:
        await forks.give_back(key, sandbox, command)
    return sandbox is not None


@contextlib.asynccontextmanager
async def fork_server(
    environment: Environment, rules: ForkRules = RULES, slots: int = 1
) -> AsyncIterator[ForkServer]:
    forks = ForkServer(environment, rules, slots=slots)
    try:
        yield forks
    finally:
        await forks.close()


async def test_texts_wait_for_the_one_import_of_their_header(core: Environment) -> None:
    async with fork_server(core) as forks:
        expected: list[Key] = []
        forks.expects = expected.append
        [key] = proved_headers(core, 1)
        assert await asyncio.gather(*(took(forks, key) for _ in range(4))) == [True] * 4
        assert expected == [key]
        assert len(forks.pids()) == 1


async def test_the_first_header_is_preloaded_with_its_first_text_and_others_with_a_later_one(
    core: Environment,
) -> None:
    memory_of(core, BARE_HEADER).keep()
    first, second = (f"prelude {' ' * n}\nimport Core\n" for n in range(30, 32))
    async with fork_server(core, replace(RULES, preload_after=3)) as forks:
        assert await took(forks, first)
        assert [await took(forks, second) for _ in range(3)] == [False, False, True]
    async with fork_server(core, replace(RULES, preload_after=3)) as forks:
        # Their proofs are remembered.
        assert [await took(forks, key) for key in (first, second)] == [True, True]


async def test_texts_do_not_wait_for_the_proof_of_the_machine(
    core: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_memory, "_passed", set())
    async with fork_server(replace(core, cache=tmp_path)) as forks:
        assert not await took(forks, HEADER)
        assert not forks.pids()
        assert await forks.is_ready(HEADER)
        assert await took(forks, HEADER)


async def test_no_text_waits_longer_than_it_may(
    core: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a header that never ends."""

    async def never(prover: Prover, key: Key) -> Zygote:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Prover, "new_zygote", never)
    [key, other] = proved_headers(core, 2)
    async with fork_server(core) as forks:
        began_s = time.monotonic()
        assert not await took(forks, key, patience_s=0.2)
        assert 0.2 <= time.monotonic() - began_s < 5.0
        # One that may not wait has nothing preloaded, and nor has one for which there is no slot.
        assert not await took(forks, other, patience_s=0.0)
        assert not await took(forks, other)
        assert not forks.pids()


async def test_as_many_headers_are_preloaded_at_once_as_there_are_slots(core: Environment) -> None:
    keys = proved_headers(core, 3)
    async with fork_server(core, slots=2) as forks:
        found = await asyncio.gather(*(took(forks, key) for key in keys))
        assert sorted(found) == [False, True, True]


async def test_headers_that_come_once_are_not_preloaded_however_many(core: Environment) -> None:
    memory_of(core, BARE_HEADER).keep()
    async with fork_server(core, ForkRules(compare_every=0), slots=2) as forks:
        expected: list[Key] = []
        forks.expects = expected.append
        [hot] = proved_headers(core, 1)
        assert await took(forks, hot)
        for number in range(200):
            assert not await took(forks, "prelude\n" + "import Core\n" * (2 + number))
        assert expected == [hot]
        assert await took(forks, hot)


async def test_a_text_that_stops_waiting_costs_the_others_nothing(core: Environment) -> None:
    [key] = proved_headers(core, 1)
    async with fork_server(core) as forks:
        texts = [asyncio.create_task(took(forks, key)) for _ in range(2)]
        assert not (await asyncio.wait(texts, timeout=0.05))[0]
        texts[0].cancel()
        assert await texts[1]


async def test_a_text_that_waits_for_its_header_outlives_the_fork_server(
    core: Environment,
) -> None:
    forks = ForkServer(core, RULES)
    try:
        waits = asyncio.create_task(forks.is_ready(proved_headers(core, 1)[0]))
        assert not (await asyncio.wait({waits}, timeout=0.01))[0]
        await forks.give_up("another header differs")
        assert not await asyncio.wait_for(waits, 60.0)
    finally:
        await forks.close()


@pytest.mark.slow
async def test_a_header_that_made_room_for_another_is_preloaded_again(core: Environment) -> None:
    forks = ForkServer(core, RULES, memory=HeadersMemory(1))
    try:
        for key in 3 * proved_headers(core, 2):
            await eventually(partial(took, forks, key), deadline_s=60.0)
            await eventually(lambda: len(forks.pids()) == 1)
    finally:
        await forks.close()


@pytest.mark.slow
async def test_a_proof_outlives_a_run_that_is_killed(
    core: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the machine is short of memory for a moment."""
    left = 1

    def once_killed(done: Finished, compiled: Path | None) -> RunBytes:
        nonlocal left
        left -= 1
        seen = RunBytes.of(done, compiled)
        return replace(seen, code=None, signal=signal.SIGKILL) if left == 0 else seen

    proof = "leanq.lean.run.proof"
    monkeypatch.setattr(f"{proof}.RunBytes", SimpleNamespace(of=once_killed))
    [key] = proved_headers(core, 1)
    forks = ForkServer(core, RULES)
    try:
        await forks.preload(key, anew=True)
    finally:
        await forks.close()
    assert left < 0


@pytest.mark.slow
async def test_two_may_end_the_same_headers(core: Environment) -> None:
    """As where one makes room, while the environment is closed."""
    forks = ForkServer(core, RULES)
    try:
        for key in proved_headers(core, 2):
            await eventually(partial(took, forks, key), deadline_s=60.0)
    finally:
        await asyncio.gather(forks.close(), forks.close())
    assert not forks.pids()


@pytest.mark.slow
async def test_a_header_by_which_lean_says_something_else_costs_no_other(site: Site) -> None:
    """Whoever sends a text chooses its header."""
    odd, fine = f"{HEADER}import Core\n", HEADER
    async with opened(talkative(site, "import Core*import Core"), forked=True) as lean:
        forks = lean.forks
        assert forks is not None
        refused = COUNTS["leanq_fork_server_total", "header_refused"]

        async def is_refused() -> bool:
            async with lean.slot() as slot:
                assert (await lean.run(slot, odd + PROOF, LIMITS)).done.exit.code == 0
                assert not was_forked(slot)
            return COUNTS["leanq_fork_server_total", "header_refused"] > refused

        await eventually(is_refused, deadline_s=100.0)
        assert not forks.unavailable
        await forked_once(lean, fine + PROOF)
        assert await is_refused()


@pytest.mark.slow
async def test_few_sandboxes_wait_behind_any_number_of_headers(core: Environment) -> None:
    forks = ForkServer(core, RULES)
    try:
        for key in proved_headers(core, 6):
            await eventually(partial(took, forks, key), deadline_s=60.0)
        zygotes = [children(pid)[0] for pid in forks.pids()]
        assert len(zygotes) == 6
        await eventually(lambda: sum(len(children(pid)) for pid in zygotes) <= 4)
        assert await took(forks, proved_headers(core, 1)[0])
    finally:
        await forks.close()


async def test_no_code_of_leans_can_be_written_to_in_a_zygote(core: Environment) -> None:
    async with preloaded(core) as lean:
        assert lean.forks is not None
        [zygote] = children(lean.forks.pids()[0])
        maps = Path(f"/proc/{zygote}/maps").read_text().splitlines()
    own = [number for number, line in enumerate(maps) if line.endswith("/libleanshared.so")]
    # Its code lies between its constants.
    rights = [line.split()[1] for line in maps[own[0] : own[-1]]]
    assert "r-xp" in rights
    assert "rwxp" not in rights


async def test_a_text_knows_nothing_of_those_before_it(core: Environment) -> None:
    async with preloaded(core) as lean, lean.slot() as slot:
        for _ in range(2):
            assert (await lean.run(slot, HEADER + PROOF, LIMITS)).done.exit.code == 0
            assert was_forked(slot)
        run = await lean.run(slot, HEADER + "theorem u (p : Prop) (h : p) : p := t p h\n", LIMITS)
        assert run.outcome.verdict == "rejected"


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "stopped"), [("cpu_s", "cpu"), ("memory_bytes", "memory")])
async def test_limits_hold_in_a_fork(core: Environment, limit: str, stopped: str) -> None:
    text = (SAMPLES / "stack_overflow.lean").read_text()
    low = replace(LIMITS, **{limit: 1.0 if limit == "cpu_s" else 20 << 20})
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
async def test_a_proof_is_remembered(
    core: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_memory, "_passed", set())
    environment = replace(core, cache=tmp_path)
    # They are of this machine, of the header, and of its forks that serve several texts.
    async with opened(environment, forked=True) as lean:
        await forked_once(lean, HEADER + PROOF)
        await eventually(lambda: len(list(tmp_path.rglob("*.passed"))) == 3)
    monkeypatch.setattr(pass_memory, "_passed", set())  # as in another process
    passed: list[pass_memory.PassMemory] = []
    monkeypatch.setattr(pass_memory.PassMemory, "keep", lambda memory: passed.append(memory))
    async with opened(environment, forked=True) as lean:
        await forked_once(lean, HEADER + PROOF)
        assert not passed
        await forked_once(lean, "module\nprelude\n")
        # The header's alone: of its forks, and of those that several share.
        await eventually(lambda: len(passed) == 2)


def talkative(site: Site, about: str = "") -> Environment:
    """One whose Lean says an empty line more where it starts for a text with these words, in which
    a star stands for any."""
    script = '/bin/cat > text; case "$(/bin/cat text)" in *$0*) echo;; esac; exec "$@" < text'
    return site.behind("/bin/sh", "-c", script, about)


@pytest.mark.slow
async def test_a_share_of_texts_is_run_both_ways_and_a_difference_ends_it(site: Site) -> None:
    environment = talkative(site)
    memory = memory_of(environment, HEADER)
    memory.keep()
    driver = await site.driver(environment, forks=replace(RULES, compare_every=1, shares=False))

    async def is_given_up() -> bool:
        assert (await driver.run(Request("check", code=PROOF))).verdict == "accepted"
        return "degraded" in driver.about

    compared = COUNTS["leanq_fork_server_total", "compared"]
    await eventually(is_given_up, deadline_s=60.0)
    assert COUNTS["leanq_fork_server_total", "compared"] > compared
    assert "says something else: stdout" in str(driver.about["degraded"])
    assert not memory.is_kept()
    forks = driver.opened.lean.forks
    assert forks is not None
    await eventually(lambda: not forks.pids())  # they would hold their memory for nothing


@pytest.mark.slow
async def test_a_text_that_can_tell_a_fork_only_has_the_header_proved_again(site: Site) -> None:
    """Else one candidate could end the fork server for all."""
    about = "set_option maxHeartbeats 1 in\n"
    rules = replace(RULES, compare_every=1)
    driver = await site.driver(talkative(site, about.split()[1]), forks=rules)
    told_apart = COUNTS["leanq_fork_server_total", "told_apart"]

    async def is_told_apart() -> bool:
        await driver.run(Request("check", code=f"{PROOF}{about}{COSTLY}"))
        return COUNTS["leanq_fork_server_total", "told_apart"] > told_apart

    await eventually(is_told_apart, deadline_s=60.0)
    assert "degraded" not in driver.about
    driver = await site.driver(talkative(site, "of course"), forks=replace(RULES, compare_every=1))

    async def is_given_up() -> bool:
        await driver.run(Request("check", code=f"{PROOF}-- of course\n"))
        return "degraded" in driver.about

    await eventually(is_given_up, deadline_s=60.0)


async def test_a_fork_that_is_refused_costs_only_a_start(
    core: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise SandboxError("no process is left")

    async with preloaded(core) as lean:
        assert lean.forks is not None
        for _ in range(2):  # the first has a sandbox that was opened before
            with monkeypatch.context() as patched:
                patched.setattr(Zygote, "fork", refuse)
                async with lean.slot() as busy, lean.slot() as slot:
                    for each in (busy, slot):
                        run = await lean.run(each, HEADER + PROOF, LIMITS)
                        assert run.done.exit.code == 0
                    assert not was_forked(slot)
        assert not lean.forks.unavailable
        await forked_once(lean, HEADER + PROOF)


@pytest.mark.parametrize(
    ("end", "doubtful"),
    [
        (Exit(0, None, None, 1.0, 1.0, 0), False),
        (Exit(None, 11, None, 1.0, 1.0, 0), True),
        (Exit(None, 9, "cpu", 1.0, 1.0, 0), False),
        (Exit(None, 9, "wall", 0.1, 10.0, 0), False),
        (Exit(None, 9, "wall", 0.1, 10.0, 0, waited_s=4.0), False),
        (Exit(None, 9, "wall", 0.1, 10.0, 0, waited_s=9.0), True),
    ],
)
def test_what_a_fork_that_ended_badly_is_believed(end: Exit, doubtful: bool) -> None:
    assert _is_doubtful(end) == doubtful


@pytest.mark.slow
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


@pytest.fixture
def split(core: Environment, tmp_path: Path) -> Environment:
    """The environment with its Lean in several libraries, as official toolchains have it: what is
    loaded first, and leads to the others, has none of the functions itself."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no compiler here (cc), so no library can be made")
    folder = tmp_path / "lib" / "lean"
    folder.mkdir(parents=True)
    (tmp_path / "bin").mkdir()  # Lean looks for its library from there
    [whole, *_] = core.toolchain.shared_libraries
    (folder / "libleanshared_1.so").symlink_to(whole)
    thin = folder / "libleanshared.so"
    made = [compiler, "-shared", "-nostdlib", "-Wl,-soname,thin", "-x", "c", "/dev/null"]
    subprocess.run([*made, "-o", str(thin)], check=True, timeout=60)
    toolchain = replace(core.toolchain, source="PATH", prefix=tmp_path)
    assert toolchain.shared_libraries[0] == thin
    # The wheel's launcher is what starts Lean here, too.
    started = (*python_folders(), LAUNCHER.parent, whole.parent)
    return replace(core, toolchain=toolchain, search_path=(*core.search_path, *started))


@pytest.mark.slow
async def test_functions_are_found_in_whichever_library_has_them(split: Environment) -> None:
    async with opened(split, forked=True) as lean:
        await forked_once(lean, HEADER + PROOF)


_MODULES = """
import sys, types
leanq = sys.modules["leanq"] = types.ModuleType("leanq")
leanq.__path__ = [sys.argv[1]]
from leanq.lean.run import zygote
print(*sys.modules)
"""


def test_a_fork_carries_no_library_that_it_does_not_need() -> None:
    # Each is mapped in each fork, and cleans up at each end.
    command = [sys.executable, "-I", "-S", "-c", _MODULES, str(PACKAGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    found = set(done.stdout.split())
    assert "leanq.lean.run.preloaded" in found
    assert found.isdisjoint({"_hashlib", "_ssl", "_bz2", "_lzma", "zlib", "random"})


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_no_jump_is_written_for_other_machines(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    uname = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*uname[:4], machine)))
    with pytest.raises(PreloadError, match=f"no jump is written for {machine}"):
        Preloaded("", [], [], b"", lambda _: os._exit(1))


_ELSEWHERE = """
import os, sys, types
leanq = sys.modules["leanq"] = types.ModuleType("leanq")
leanq.__path__ = [sys.argv[1]]
from leanq.lean.run import preloaded
from leanq.lean.run import zygote
uname = os.uname()
os.uname = lambda: os.uname_result((*uname[:4], "aarch64"))
zygote.main()
"""


@pytest.mark.slow
async def test_lean_starts_anew_on_other_machines(
    core: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(module: str) -> list[str]:
        if not module.endswith(".zygote"):
            return bare_python(module)
        return [sys.executable, "-I", "-S", "-c", _ELSEWHERE, str(PACKAGE)]

    monkeypatch.setattr("leanq.lean.sandbox.sandbox.bare_python", elsewhere)
    async with opened(core, forked=True) as lean:
        forks = lean.forks
        assert forks is not None

        async def is_given_up() -> bool:
            async with lean.slot() as slot:
                assert (await lean.run(slot, HEADER + PROOF, LIMITS)).done.exit.code == 0
                assert not was_forked(slot)
            return bool(forks.unavailable)

        await eventually(is_given_up, deadline_s=60.0)
        assert await is_given_up()
    assert "no jump is written for aarch64" in forks.unavailable


_WORKER = """
import asyncio, sys
from leanq.lean.environment import open_environment
from leanq.lean.run.fork_server import ForkRules, ForkServer

async def main():
    environment = open_environment("default", None)
    forks = ForkServer(environment, ForkRules())
    key = sys.argv[1]
    await forks.preload(key)
    sandbox = await forks.lend(key)
    print(sandbox.supervisor.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_killed_worker_leaves_no_folder(tmp_path: Path) -> None:
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _WORKER, HEADER), stdout=subprocess.PIPE, env=variables
    )
    try:
        assert worker.stdout is not None
        async with asyncio.timeout(100.0):
            fork = int(await worker.stdout.readline())
        assert running(fork)
        assert list(tmp_path.glob("leanq-*"))
    finally:
        worker.kill()
        await worker.wait()
    await eventually(lambda: not list(tmp_path.glob("leanq-*")), deadline_s=60.0)
    assert not running(fork)


@pytest.mark.slow
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
