"""Files that one fork of the judge takes one after another: none may change another's answer."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.lean.images import Lean
from support.lean.trees import PRELUDE, TREES
from support.paths import ROOT
from support.waiting import eventually

from leanq.lean.environment import Environment
from leanq.lean.judge.judge_client import Judgement, Judges
from leanq.lean.judge.judge_lean import HONEST, forged
from leanq.lean.run.olean import read_parts
from leanq.lean.sandbox.cgroup import descendants
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import split_header
from leanq.queue.metrics import COUNTS

LIMITS = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)
# What a fork takes at most.
MOST_FILES = 8
SWAP = f"{PRELUDE}theorem swap (p q : Prop) (h : p ∧ q) : q ∧ p := ⟨h.right, h.left⟩\n"
SAME_NAME = f"{PRELUDE}theorem swap (n : Nat) : n = n := rfl\n"
OWN = f"""{PRELUDE}
def double (n : Nat) : Nat := n + n
theorem doubled : double 3 = 6 := rfl
"""
OTHER = OWN.replace("n + n", "n + n + 0")
# Its statements are printed with all arguments, or with notation that hides an instance.
INSTANCE = f"""{PRELUDE}
@[instance] def mine : LE Nat := ⟨fun _ _ => True⟩
theorem below (n : Nat) : 5 ≤ n := True.intro
theorem over (n : Nat) : LE.le (α := Nat) (self := instLENat) n n := Nat.le_refl n
"""
VARIABLE = f"{PRELUDE}theorem any (α : Type) [LE α] (a : α) (h : a ≤ a) : a ≤ a := h\n"
AXIOM = f"""{PRELUDE}{TREES}axiom assumed : False
theorem cheat (p : Prop) : p := False.elim assumed
"""
pytestmark = pytest.mark.asyncio(loop_scope="module")
Ask = Callable[[Judges, str | None], Awaitable[Judgement]]
Forks = Callable[[], list[int]]


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(core, tmp_path_factory.mktemp("lean"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judges(core: Environment, forks: Forks) -> AsyncIterator[Judges]:
    made = Judges(core, slots=1)
    yield made
    await made.close()


def compiled(lean: Lean, code: str) -> Sequence[bytes]:
    return read_parts(lean.compile(code))


def judging(parts: Sequence[bytes], header: str = PRELUDE) -> Ask:
    return lambda judges, tenant: judges.judge(
        split_header(header), parts, ("none", "here"), LIMITS, tenant
    )


def verifying(target: Sequence[bytes], candidate: Sequence[bytes]) -> Ask:
    order: dict[str, Any] = {
        "op": "verify",
        "ending": ("", ""),
        "target_ending": ("", ""),
        "theorems": (),
        "holes": (),
        "allowed": (),
        "is_whole": True,
        "unfilled": "",
    }
    return lambda judges, tenant: judges.ask(
        split_header(PRELUDE), [target, candidate], {**order, "tenant": tenant}, LIMITS
    )


@pytest.fixture(scope="module")
def forks() -> Forks:
    """The forks that wait for a further file, but those of other modules' judges."""

    def found() -> list[int]:
        parents = [pid for pid in descendants() if b"judge_process" in arguments(pid)]
        below = [each for pid in parents for each in children(pid)]
        return [
            each for each in below if b"judge_process" in arguments(each) and each not in others
        ]

    others: list[int] = []
    others = found()
    return found


def arguments(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:
        return []


@pytest.fixture(scope="module")
def files(lean: Lean) -> dict[str, Ask]:
    """Honest, odd and hostile files, by what they are."""
    own = compiled(lean, OWN)
    plain = compiled(lean, HONEST)[0]
    rng = random.Random(5)
    damaged = bytearray(own[0])
    for _ in range(4):
        damaged[rng.randrange(2000, len(damaged))] ^= 1 << rng.randrange(8)
    return {
        "swap": judging(compiled(lean, SWAP)),
        "the same name": judging(compiled(lean, SAME_NAME)),
        "own": judging(own),
        "another definition": judging(compiled(lean, OTHER)),
        "instance": judging(compiled(lean, INSTANCE)),
        "variable": judging(compiled(lean, VARIABLE)),
        "axiom": judging(compiled(lean, AXIOM)),
        "damaged": judging([bytes(damaged)]),
        "cut short": judging([own[0][:-64]]),
        "empty": judging([b""]),
        "another header": judging([plain]),
        "forged": judging([forged(plain)[1]], "prelude\n"),
        "verified": verifying(own, own),
        "verified against another": verifying(own, compiled(lean, OTHER)),
        "verified against one with more": verifying(compiled(lean, AXIOM), own),
    }


async def answered(ask: Ask, judges: Judges, tenant: str | None) -> Judgement:
    return replace(await ask(judges, tenant), cpu_s=0.0, peak_bytes=0)


@pytest.mark.slow
async def test_in_any_order_and_company_a_file_gets_the_answer_that_it_gets_alone(
    judges: Judges, files: dict[str, Ask], forks: Forks
) -> None:
    alone = {name: await answered(ask, judges, None) for name, ask in files.items()}
    assert {name for name, found in alone.items() if found.proved} == {
        *("swap", "the same name", "own", "another definition", "instance", "variable", "axiom"),
        *("verified", "verified against another", "verified against one with more"),
    }
    assert alone["own"].statements == ("double 3 = 6",)
    assert alone["verified against another"].differences
    rng = random.Random(20)
    went_on = 0
    for _ in range(300):
        name, tenant = rng.choice([*files]), rng.choice(["alice", "alice", "alice", "bob", None])
        before = forks()
        found = await answered(files[name], judges, tenant)
        assert found == alone[name], name
        went_on += bool(before) and before == forks()
    assert went_on > 30


@pytest.mark.slow
async def test_only_clean_files_of_one_tenant_follow_one_another(
    judges: Judges, files: dict[str, Ask], forks: Forks
) -> None:
    swap = files["swap"]

    async def fork_behind(ask: Ask, tenant: str | None) -> int:
        await ask(judges, tenant)
        return next(iter(forks()), 0)

    assert await fork_behind(swap, None) == 0
    alices = await fork_behind(swap, "alice")
    assert alices == await fork_behind(files["own"], "alice") != 0
    bobs = await fork_behind(swap, "bob")
    assert bobs not in (0, alices)
    assert await fork_behind(files["damaged"], "bob") == 0
    assert await fork_behind(swap, "") != 0
    assert await fork_behind(swap, None) == 0
    seen = [await fork_behind(swap, "alice") for _ in range(2 * MOST_FILES)]
    one, other = seen[0], seen[MOST_FILES]
    assert seen == [one] * (MOST_FILES - 1) + [0] + [other] * (MOST_FILES - 1) + [0]
    assert one != other


@pytest.mark.slow
async def test_a_fork_that_dies_between_two_files_costs_neither(
    judges: Judges, files: dict[str, Ask], forks: Forks
) -> None:
    await files["swap"](judges, "alice")
    started = COUNTS["leanq_lean_starts_total", "server"]
    [fork] = forks()
    os.kill(fork, signal.SIGKILL)
    await eventually(lambda: state(fork) == "Z")
    found = await files["own"](judges, "alice")
    assert (found.proved, found.statements) == (True, ("double 3 = 6",))
    assert COUNTS["leanq_lean_starts_total", "server"] == started


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
async def test_whoever_wants_it_has_a_fork_for_each_file(
    core: Environment, files: dict[str, Ask], forks: Forks
) -> None:
    alone = Judges(core, slots=1, alone=True)
    try:
        before = forks()
        for _ in range(2):
            assert (await files["swap"](alone, "alice")).proved
            assert forks() == before
    finally:
        await alone.close()


ODD = ("refuses", "disagrees", "dies", "dies as it prints", "has threads")


def forked(orders: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The answers of a process that forks, to such orders."""
    done = subprocess.run(
        [sys.executable, "-m", "support.lean.judge_bench"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))},
        input=json.dumps(orders),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found: list[Any] = json.loads(done.stdout)
    return found


def expected(orders: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """What a model of the forks answers."""
    tenant, number = None, 0
    for order in orders:
        kind = order["kind"]
        if order["tenant"] != tenant or kind in ("refuses", "disagrees", "dies"):
            # A new fork is asked, for the first time or once more.
            number = 0
        tenant, number = order["tenant"], number + 1
        printed = ["a"] if kind == "dies as it prints" else [] if kind == "refuses" else ["a", "b"]
        if kind == "dies":
            yield {"limit": "its process died (exit code 3)"}, []
        elif kind == "refuses":
            yield {"rule": "kernel_refused", "number": number, "file": order["file"]}, printed
        else:
            is_proved = kind != "disagrees"
            yield {"proved": is_proved, "number": number, "file": order["file"]}, printed
        if kind in ODD or number == MOST_FILES or tenant is None:
            tenant, number = None, 0


async def test_a_fork_goes_on_for_one_tenant_and_only_when_clean() -> None:
    asked = ["alice", "alice", "bob", "alice", "", "", None, None, "alice"]
    orders = [{"tenant": tenant, "kind": "goes on", "file": "a"} for tenant in asked]
    for kind in ODD:
        orders += [{**orders[0], "kind": each} for each in ("goes on", kind, "goes on")]
    found = await asyncio.to_thread(forked, orders)
    assert [(each["answer"], each["statements"]) for each in found] == [*expected(orders)]


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "tenant": st.sampled_from(["", "alice", "alice", "bob", None]),
                "kind": st.sampled_from([*["goes on"] * 12, *ODD]),
                "file": st.sampled_from(["", "a", "b" * 300_000]),
            }
        ),
        max_size=60,
    )
)
async def test_forks_do_as_their_model(orders: list[dict[str, Any]]) -> None:
    found = forked(orders)
    assert [(each["answer"], each["statements"]) for each in found] == [*expected(orders)]


@pytest.mark.slow
async def test_a_further_file_gets_all_of_its_time() -> None:
    first = {"tenant": "alice", "kind": "goes on", "file": ""}
    slow = {**first, "spins_s": 4.0}
    found = forked([first, slow, first])
    assert [each["answer"]["number"] for each in found] == [1, 1, 1]
    # Both attempts count.
    assert found[1]["cpu_s"] > 5.0
    quick = {**slow, "spins_s": 0.5}
    assert [each["answer"]["number"] for each in forked([first, quick, first])] == [1, 2, 3]


@pytest.mark.slow
async def test_a_further_files_printing_gets_all_of_its_time() -> None:
    first = {"tenant": "alice", "kind": "goes on", "file": ""}
    # Alone, both statements are printed, within a second.
    slow = {**first, "spins_s": 2.5, "prints_s": 0.3}
    found = forked([first, slow])
    assert [each["answer"]["number"] for each in found] == [1, 2]
    assert [each["statements"] for each in found] == [["a", "b"]] * 2


@pytest.mark.slow
async def test_tenants_that_take_turns_keep_their_forks(
    core: Environment, files: dict[str, Ask], forks: Forks
) -> None:
    judges = Judges(core, slots=2)
    others = {*forks()}  # of the tests before this one

    def own() -> set[int]:
        return {*forks()} - others

    try:
        tenants = ("alice", "bob")
        # Files wait for the first process until that has taken as long as the start of a second.
        async with asyncio.timeout(60):
            while len(own()) < 2:
                await asyncio.gather(*(files["swap"](judges, each) for each in 4 * tenants))
        # A fork ends after a few files, so these begin with new ones.
        for pair in (("carol", "dave"), tenants):
            await asyncio.gather(*(files["swap"](judges, each) for each in pair))
        await eventually(lambda: len(own()) == 2)  # those of other tenants have ended
        seen = [own()]
        for tenant in ("alice", "bob", "alice", "bob"):
            assert (await files["own"](judges, tenant)).proved
            seen.append(own())
        assert seen == seen[:1] * 5
    finally:
        await judges.close()
