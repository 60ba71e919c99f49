"""The repl driver and its processes: each can fail in every way, and no request is answered wrong.

A stand-in speaks the REPL's protocol here, in a tiny language of its own (``repl_standin_script``),
and misbehaves where a text says so.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.lean.sandboxes import busy, marked
from support.lean.sites import SELDOM, Site, check
from support.lean.tiny import BAD, GOOD, HEAD, verdict
from support.waiting import eventually

from leanq.errors import ReplError, SandboxError, ToolchainError, UsageError
from leanq.lean import lean_driver as lean_module
from leanq.lean.environment import Environment
from leanq.lean.repl import session as session_module
from leanq.lean.repl.program import find_repl
from leanq.lean.repl.session import Recycling, Session, TimedOutError
from leanq.lean.sandbox.sandbox import Sandbox
from leanq.lean.syntax import split_header
from leanq.queue.requests import Request

OPEN = "theorem two := by sorry\n"

# What a process may do with a request; nothing of it changes the verdict.
MISCHIEF = [
    "crash",
    "cut",
    "exit",
    "die-after",
    "noise",
    "fake",
    "late-fake",
    "binary",
    "stderr=2000",
    "slow=20",
    "long=300",
    "leave",
    "flood",
    "bloat=30",
]


async def test_verdicts(site: Site) -> None:
    driver = await site.standin()
    assert await verdict(driver, GOOD) == "unjudged"
    assert await verdict(driver, OPEN) == "incomplete"
    assert await verdict(driver, "theorem two := by silent sorry\n") == "incomplete"
    assert await verdict(driver, "#budget\n") == "exhausted"
    assert await verdict(driver, f"#budget\n{BAD}") == "rejected"
    reply = await driver.run(check(f"{HEAD}\n  {BAD}#noend no\n#info so\n", audit=False))
    assert reply.verdict == "rejected"
    assert [(m.severity, m.line, m.column, m.end_line, m.text) for m in reply.messages] == [
        ("error", 3, 2, 3, "nothing of the kind"),
        ("error", 4, 0, None, "no"),
        ("information", 5, 0, 5, "so"),
    ]
    assert reply.fingerprint == site.core.fingerprint


async def test_both_spellings_of_the_warning(site: Site) -> None:
    driver = await site.standin("--old-quotes")
    # Where only the warning tells: no place is known of what a macro has written.
    assert await verdict(driver, OPEN) == "incomplete"
    assert await verdict(driver, "theorem two := by have := sorry\n") == "incomplete"


@pytest.mark.slow
@pytest.mark.parametrize("what", MISCHIEF)
async def test_mischief_changes_no_verdict(site: Site, what: str) -> None:
    driver = await site.standin()
    for code, expected in ((BAD, "rejected"), (GOOD, "unjudged"), (OPEN, "incomplete")):
        assert await verdict(driver, f"{code}-- standin:{what}\n") == expected
        # And none of what follows.
        for other, same in ((OPEN, "incomplete"), (BAD, "rejected")):
            assert await verdict(driver, other) == same


@pytest.mark.slow
async def test_a_process_that_splits_all_it_writes(site: Site) -> None:
    driver = await site.standin("--split", "--noise", "0.5")
    for _ in range(10):
        assert await verdict(driver, BAD) == "rejected"
        assert await verdict(driver, OPEN) == "incomplete"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "options"), [("hang", {"wall_s": 0.4}), ("spin", {"timeout_s": 0.3})]
)
async def test_budgets_of_time(site: Site, what: str, options: dict[str, float]) -> None:
    driver = await site.standin()
    for _ in range(2):
        assert await verdict(driver, f"{GOOD}-- standin:{what}", **options) == "timeout"
        assert await verdict(driver, BAD) == "rejected"


@pytest.mark.slow
async def test_a_request_that_is_disturbed_is_not_timed_out(site: Site) -> None:
    """A thread that another candidate left in the process has spent the budget."""
    driver = await site.standin()
    assert await verdict(driver, f"{GOOD}-- standin:leave") == "unjudged"
    await eventually(lambda: busy(site.marker) != [])
    assert await verdict(driver, f"{GOOD}-- standin:slow=400", timeout_s=0.2) == "unjudged"
    # It was found out by that.
    assert await verdict(driver, BAD) == "rejected"
    await eventually(lambda: busy(site.marker) == [])


@pytest.mark.slow
async def test_the_limit_of_memory(site: Site) -> None:
    driver = await site.standin()
    # Lean itself, which does not mind these words here, has the last word.
    assert await verdict(driver, f"{BAD}-- standin:eat", memory_mb=100) == "rejected"
    # What the process held before is not counted: 60 MB each time, and 100 allowed.
    for _ in range(4):
        assert await verdict(driver, f"{BAD}-- standin:bloat=60", memory_mb=100) == "rejected"


@pytest.mark.slow
async def test_cancelling_ends_what_runs(site: Site) -> None:
    driver = await site.standin()
    task = asyncio.create_task(driver.run(check(f"{GOOD}-- standin:spin", audit=False)))
    await eventually(lambda: busy(site.marker) != [])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert busy(site.marker) == []
    assert await verdict(driver, BAD) == "rejected"


@pytest.mark.slow
async def test_a_dead_supervisor_costs_one_request(site: Site) -> None:
    driver = await site.standin()
    await eventually(lambda: bool(driver.kept.sessions.idle))
    supervisor = driver.kept.sessions.idle[-1].sandbox.supervisor
    task = asyncio.create_task(driver.run(check(f"{GOOD}-- standin:spin", audit=False)))
    await eventually(lambda: busy(site.marker) != [])
    supervisor.kill()
    with pytest.raises(SandboxError):
        await task
    await eventually(lambda: busy(site.marker) == [])
    assert await verdict(driver, BAD) == "rejected"


@pytest.mark.slow
async def test_a_cancellation_costs_no_process(site: Site) -> None:
    """What has ended is put away, even where the request that finds it is cancelled."""
    driver = await site.standin(slots=3)
    sessions = driver.kept.sessions
    header = split_header(HEAD)
    async with sessions.take(header), sessions.take(header), sessions.take(header):
        pass
    await eventually(lambda: not sessions.starting)
    for session in sessions.idle:
        session.spoiled = True
    for _ in range(3):
        task = asyncio.create_task(driver.run(check(GOOD, audit=False)))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: not (sessions.ending or sessions.starting))
    assert sessions.count == len(sessions.idle) == len(repls(site))
    assert await verdict(driver, BAD) == "rejected"


@pytest.mark.slow
async def test_closing_while_a_process_is_put_away(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = await site.standin()
    clearing, go_on = threading.Event(), threading.Event()
    clear = Sandbox.clear

    def slow(sandbox: Sandbox) -> None:
        clearing.set()
        assert go_on.wait(20)
        clear(sandbox)

    monkeypatch.setattr(Sandbox, "clear", slow)
    task = asyncio.create_task(driver.run(check(f"{GOOD}#eval 1\n", audit=False)))
    await eventually(clearing.is_set)
    closing = asyncio.create_task(driver.kept.sessions.close())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(task, closing)
    # The site looks for processes and folders that are left.
    assert driver.kept.sessions.count == 0


@pytest.mark.slow
async def test_an_answer_belongs_to_the_environment_in_which_it_was_asked_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean_module, "_CHECK_CHANGES_EVERY_S", 0.0)
    prints = ["a" * 64]
    monkeypatch.setattr(Environment, "changed", lambda self: self.fingerprint != prints[0])
    made = replace(site.tiny(), fingerprint=prints[0])
    driver = await site.open_repl(
        lambda: replace(made, fingerprint=prints[0]), site.standin_command(), slots=2
    )
    slow = f"{HEAD}theorem two := by sorry standin:slow=1000\n"
    task = asyncio.create_task(driver.run(check(slow, audit=False)))
    sessions = driver.kept.sessions

    def is_asked() -> bool:
        unasked = [*sessions.idle, *sessions.starting, *sessions.ending]
        return sessions.count > len(unasked)

    await eventually(is_asked)
    prints[0] = "b" * 64
    assert (await driver.run(check(GOOD, audit=False))).fingerprint == prints[0]
    # The answer that came meanwhile is asked for again.
    reply = await task
    assert reply.fingerprint == "b" * 64
    request = Request("step", state=str(reply.sorries[0].state), tactic="skip", audit=False)
    assert (await driver.run(request)).error is None


# The spare, and replacing


def repls(site: Site) -> set[int]:
    """The processes of the REPL."""
    return set(marked(f"--mark\0{site.marker}"))


@pytest.mark.slow
async def test_a_spare_takes_the_place_of_what_ended(site: Site) -> None:
    driver = await site.standin()
    assert await verdict(driver, BAD) == "rejected"
    await eventually(lambda: len(repls(site)) == 2)
    before = repls(site)
    # It may have left something behind, so it is gone, and nothing has to be started for the next.
    assert await verdict(driver, f"{BAD}#eval 1\n") == "rejected"
    (spare,) = repls(site)
    assert spare in before
    assert await verdict(driver, BAD) == "rejected"
    assert spare in repls(site)
    await eventually(lambda: len(repls(site)) == 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "code"),
    [
        (replace(SELDOM, requests=1), BAD),
        (replace(SELDOM, age_s=0.0), BAD),
        (replace(SELDOM, memory_bytes=100 << 20), f"{BAD}-- standin:bloat=120"),
    ],
    ids=["requests", "age", "memory"],
)
async def test_recycling(site: Site, rules: Recycling, code: str) -> None:
    driver = await site.standin(rules=rules)
    for _ in range(3):
        assert await verdict(driver, code) == "rejected"
        assert all(session.requests == 0 for session in driver.kept.sessions.idle)
        assert len(repls(site)) <= 2


@pytest.mark.slow
async def test_nothing_is_replaced_for_nothing(site: Site) -> None:
    driver = await site.standin()
    for count in range(1, 4):
        assert await verdict(driver, f"{BAD}-- standin:bloat=50") == "rejected"
        assert driver.kept.sessions.idle[-1].requests == count


@pytest.mark.slow
async def test_no_request_waits_where_there_are_slots(site: Site) -> None:
    driver = await site.standin(slots=3)
    slow = [verdict(driver, f"{BAD}-- standin:hang", wall_s=20) for _ in range(2)]
    tasks = [asyncio.create_task(each) for each in slow]
    await eventually(lambda: len(repls(site)) >= 2)
    for _ in range(10):
        assert await verdict(driver, BAD) == "rejected"
    assert len(repls(site)) <= 4
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# The program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fail-start"], "cannot start"),
        (["--version", "4.1.0"], "is of Lean 4.1.0"),
        (["--crash", "1"], "SIGABRT"),
    ],
)
async def test_a_repl_that_does_not_serve(site: Site, arguments: list[str], said: str) -> None:
    with pytest.raises(ToolchainError, match=said):
        await site.standin(*arguments)


@pytest.mark.slow
async def test_a_program_that_says_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(session_module.VERSION_LIMITS, wall_s=0.5)
    monkeypatch.setattr(session_module, "VERSION_LIMITS", limits)
    with pytest.raises(ToolchainError, match=r"did not answer within 0\.5 s"):
        await site.standin("--hang", "1")


async def test_an_error_of_spent_time_is_one_line(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate's output must not fill a log, and imports are no request's."""
    limits = replace(session_module.VERSION_LIMITS, wall_s=0.5)
    monkeypatch.setattr(session_module, "_HEADER_LIMITS", limits)
    argv = ["/bin/sh", "-c", "echo one >&2; echo two >&2; exec sleep 60"]
    sandbox = await Sandbox.open()
    try:
        session = await Session.start(sandbox, argv, {"PATH": "/bin:/usr/bin"})
        with pytest.raises(TimedOutError) as spent:
            await session.ask({"cmd": "#check 1"}, limits)
        session = await Session.start(sandbox, argv, {"PATH": "/bin:/usr/bin"})
        with pytest.raises(ReplError, match="its imports do not end") as endless:
            await session.load(split_header("import Library\n"))
    finally:
        await sandbox.close()
    for text in map(str, (spent.value, endless.value)):
        assert "\n" not in text
        assert "the request allows" not in text


async def test_a_banner_is_no_answer(site: Site) -> None:
    driver = await site.standin("--banner", 'Welcome! {"env": ')
    assert await verdict(driver, BAD) == "rejected"


@pytest.mark.parametrize(
    ("command", "error", "said"),
    [
        ("", UsageError, "names no program"),
        ("lake env", UsageError, "names no program"),
        ("'repl", UsageError, "cannot be read"),
        ("lake env no/such/repl", ToolchainError, "no program 'no/such/repl'"),
        ("no-such-repl", ToolchainError, "no program 'no-such-repl'"),
    ],
)
def test_a_command_that_starts_nothing(
    core: Environment, command: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        find_repl(command, core, {"PATH": "/usr/bin:/bin"})


def test_lake_env_is_left_out(core: Environment, tmp_path: Path) -> None:
    program = tmp_path / "repl"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    found = find_repl(f"lake env {program} --flag", core, {})
    assert found.argv == (str(program), "--flag")
    assert tmp_path in found.readable
    inside = replace(core, project=tmp_path)
    assert find_repl("lake env ./repl", inside, {}).argv == (str(program),)
