"""A fork that serves several texts of one tenant: the same answers, and nothing is left for the
next one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from support.lean.forks import COMPILE, LIMITS, RULES, everything, forked_once, opened
from support.lean.python_zygote import forked, python_zygote
from support.lean.sandboxes import GENEROUS, children
from support.waiting import eventually

from leanq.lean.environment import Environment
from leanq.lean.run.process import Lean, Run
from leanq.lean.run.proof import RunBytes, compiled_by
from leanq.lean.sandbox.sandbox import Finished, Limits, Sandbox

HEADER = "prelude\nimport Core\n"
RIGHT = "theorem t (p : Prop) (h : p) : p := h\n"
WRONG = "theorem t (p : Prop) : p := p\n"
# Three times the same name, each with another meaning, and what must not be known behind it.
TEXTS = (
    RIGHT,
    WRONG,
    "def t : Nat := 1\ntheorem one : t = 1 := rfl\n",
    "def t : Nat := 2\ntheorem one : t = 1 := rfl\n",
    "theorem u (p : Prop) (h : p) : p := t p h\n",
    "instance : Inhabited Nat := ⟨7⟩\ntheorem s : (default : Nat) = 7 := rfl\n",
    "theorem s : (default : Nat) = 7 := rfl\n",
    "attribute [simp] Nat.add\nset_option maxRecDepth 17\nsection\nvariable (p : Prop)\n",
    "theorem v : p := sorry\n",
    "theorem w (p q : Prop) : p ∧ q → q ∧ p := fun h => ⟨h.2, h.1⟩\n#print axioms w\n",
    "theorem x : := by (\n",
    f"theorem deep (p : Prop) (h : p) : p := {'(' * 300}h{')' * 300}\n",
    "inductive T where | a | b (t : T)\ntheorem y : T.a = T.a := rfl\n",
    "open Nat in\n#check add\nend nothing\n",
    "-- é 𝔸 \x01\r\ntheorem «∀ é» (p : Prop) (h : p) : p := h\n#check 𝔸\n",
    f"/- {'𝔸' * 7_000} -/\n{RIGHT}",
    f"/- {'a' * 40_000} -/\n{RIGHT}",
)
RUNS_PROGRAMS = 'syntax "another" : term\n'
PROFILES = f"set_option profiler true\n{RIGHT}"
MOST = 8


@contextlib.asynccontextmanager
async def sharing(environment: Environment, *, shares: bool = True) -> AsyncIterator[Lean]:
    """A Lean whose forks may serve several texts."""
    async with opened(environment, forked=True, rules=replace(RULES, shares=shares)) as lean:
        await forked_once(lean, HEADER + RIGHT)
        assert lean.forks is not None
        key = lean.forks.key(HEADER + RIGHT, lean.command(COMPILE))
        assert key is not None

        async def may_share() -> bool:
            return not shares or await lean.forks.may_share(key, RIGHT)

        await eventually(may_share, deadline_s=60.0)
        # The fork that waited for a text meanwhile serves one alone.
        await ran(lean, RIGHT, None)
        yield lean


async def ran(lean: Lean, text: str, tenant: str | None, limits: Limits = LIMITS) -> Run:
    async with lean.slot() as slot:
        return await lean.run(slot, HEADER + text, limits, tenant=tenant)


async def earlier(lean: Lean, text: str, tenant: str | None) -> int:
    return (await ran(lean, text, tenant)).done.exit.earlier


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_texts_in_any_order_say_what_a_new_lean_says(core: Environment) -> None:
    rng, shared = random.Random(0), 0
    async with sharing(core) as lean, opened(core, forked=False) as plain:
        async with plain.slot() as slot:
            expected = [await everything(plain, slot, HEADER + text) for text in TEXTS]
        for _ in range(6):
            for number in rng.sample(range(len(TEXTS)), len(TEXTS)):
                async with lean.slot() as slot:
                    run = await lean.run(slot, HEADER + TEXTS[number], LIMITS, tenant="a")
                    seen = RunBytes.of(run.done, compiled_by(COMPILE, slot.left))
                assert seen.difference(expected[number]) == "", TEXTS[number]
                shared += run.done.exit.earlier > 0
    assert shared > 6 * len(TEXTS) // 2


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_fork_serves_one_tenants_texts_that_run_no_programs(core: Environment) -> None:
    async with sharing(core) as lean:
        assert [await earlier(lean, RIGHT, "a") for _ in range(MOST + 1)] == [*range(MOST), 0]
        assert [await earlier(lean, RIGHT, "b") for _ in range(2)] == [0, 1]
        # A text without a tenant's name is nobody's.
        assert await earlier(lean, RIGHT, None) == 0
        assert [await earlier(lean, text, "c") for text in (RIGHT, WRONG)] == [0, 1]
        # A text with such words has a fork of its own, which is another one.
        assert [await earlier(lean, text, "c") for text in (RUNS_PROGRAMS, RIGHT)] == [0, 2]
        # So has one after which Lean would go on to print times.
        assert [await earlier(lean, text, "c") for text in (PROFILES, RIGHT)] == [0, 3]
        # A fork ends if Lean evaluates something of a text.
        notation = 'notation "⟪" a "⟫" => a\n'
        run = await ran(lean, notation, "c")
        assert run.done.exit.earlier == 4
        assert run.evaluated is not None
        assert run.evaluated.first
        assert await earlier(lean, RIGHT, "c") == 0
        # Behind a text that imports something else.
        async with lean.slot() as slot:
            await lean.run(slot, f"prelude\n{RIGHT}", LIMITS, tenant="c")
        assert await earlier(lean, RIGHT, "c") == 1
    async with sharing(core, shares=False) as lean:
        assert [await earlier(lean, RIGHT, "a") for _ in range(3)] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_limits_are_of_each_text(core: Environment) -> None:
    slow = (
        f"theorem u (p : Prop) (h : p) : {'And p (' * 100}p{')' * 100} := "
        f"{'.intro h (' * 100}h{')' * 100}\n"
    )
    async with sharing(core) as lean:
        first, second = await ran(lean, slow, "a"), await ran(lean, slow, "a")
        assert (first.done.exit.earlier, second.done.exit.earlier) == (0, 1)
        cpu_s = second.done.exit.cpu_s
        assert 0.2 * first.done.exit.cpu_s < cpu_s < 2 * first.done.exit.cpu_s
        small = replace(LIMITS, cpu_s=2.5 * cpu_s)
        for number in range(2, 6):
            run = await ran(lean, slow, "a", small)
            assert (run.done.exit.stopped, run.done.exit.earlier) == (None, number)
        over = await ran(lean, slow, "a", replace(LIMITS, cpu_s=cpu_s / 10))
        assert over.done.exit.stopped == "cpu"
        assert await earlier(lean, RIGHT, "a") == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_death_behind_others_is_no_outcome(core: Environment) -> None:
    async with sharing(core) as lean:
        async with lean.slot() as slot:
            await lean.run(slot, HEADER + RIGHT, LIMITS, tenant="a")
            sandbox = slot.sandbox
        assert sandbox is not None
        assert sandbox.waits_for("a")
        # A fork that waits is killed, as where memory is short.
        os.kill(max(children(sandbox.supervisor.pid)), signal.SIGKILL)
        run = await ran(lean, RIGHT, "a")
        assert run.outcome.verdict == "accepted"
        assert [await earlier(lean, RIGHT, "a") for _ in range(2)] == [0, 1]


# What a fork of Python does in Lean's place. It says that its text has ended, and that it waits.
SAYS = "import os, time\nos.write(reports, b'x7')\n"
WAITS = "os.write(reports, b'w')\ntime.sleep(60)\n"
LEFT_BEHIND = {
    "a thread": "import threading\nthreading.Thread(target=time.sleep, args=(60,)).start()\n",
    "a process": "if os.fork() == 0: time.sleep(60)\n",
    "memory": "held = bytearray(os.urandom(1 << 20) * 100)\n",
    "a report": "os.write(reports, b'emine')\n",
    "no end": "time.sleep(60)\n",
}


async def run(sandbox: Sandbox, program: str, tenant: str) -> Finished:
    sandbox.clear()
    return await sandbox.run(
        ["python"], env={}, limits=GENEROUS, stdin=program.encode(), tenant=tenant
    )


@pytest.mark.timeout(120)
async def test_a_fork_that_leaves_something_behind_ends() -> None:
    async with python_zygote() as zygote, forked(zygote) as sandbox:
        sandbox.shares = True
        done = await run(sandbox, SAYS + WAITS, "a")
        assert (done.exit.code, done.exit.stopped, sandbox.waits) == (7, None, True)
        for what, left in LEFT_BEHIND.items():
            done = await run(sandbox, SAYS + left + WAITS, what)
            assert (what, done.exit.code, sandbox.waits) == (what, 7, False)
        # A program says nothing else once it has been reported.
        claims = "import os, time\nos.write(reports, b'emine')\n" + SAYS + "os._exit(3)\n"
        done = await run(sandbox, claims, "b")
        assert (done.exit.code, done.exit.reports[0], sandbox.waits) == (3, "emine", False)


@pytest.mark.timeout(120)
async def test_a_fork_that_waits_ends_with_its_sandbox_and_for_another_tenant() -> None:
    async with python_zygote() as zygote, forked(zygote) as sandbox:
        sandbox.shares = True
        for tenant in ("a", "b") * 40:  # nothing of them is kept open
            done = await run(sandbox, SAYS + WAITS, tenant)
            assert (done.exit.code, done.exit.earlier) == (7, 0)
            assert sandbox.waits_for(tenant)
        assert not sandbox.waits_for("a")
        assert not sandbox.waits_for(None)
