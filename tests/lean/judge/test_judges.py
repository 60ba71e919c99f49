"""The judge with real Lean: what it takes for proved, and what it does not."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import signal
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from support.lean.images import Image as Writer
from support.lean.images import Lean
from support.lean.trees import PRELUDE, TREES
from support.waiting import eventually

from leanq.lean.environment import Environment
from leanq.lean.judge import judge_client, judge_lean
from leanq.lean.judge.judge_client import Judgement, Judges
from leanq.lean.run.headers_memory import HeadersMemory
from leanq.lean.run.image import Image
from leanq.lean.run.olean import places, read_parts
from leanq.lean.sandbox.cgroup import descendants
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import split_header
from leanq.queue.metrics import COUNTS

LIMITS = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)
HONEST = f"""{PRELUDE}
{TREES}axiom assumed : False
theorem cheat (p : Prop) : p := False.elim assumed
theorem late (p : Prop) (h : p) : p := h
"""


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    return Lean(core, tmp_path_factory.mktemp("lean"))


@pytest.fixture(scope="module")
def honest(lean: Lean) -> bytes:
    return lean.compile(HONEST).read_bytes()


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judges(core: Environment) -> AsyncIterator[Judges]:
    made = Judges(core, slots=1)
    yield made
    await made.close()


async def judged(
    judges: Judges, parts: list[bytes], header: str = PRELUDE, *, statements: bool = True
) -> Judgement:
    ending = ("none", "here")
    return await judges.judge(split_header(header), parts, ending, LIMITS, statements=statements)


@pytest.mark.slow
async def test_honest_files_are_proved(judges: Judges, lean: Lean, honest: bytes) -> None:
    found = await judged(judges, [honest])
    assert (found.proved, found.rule, found.limit, found.unavailable) == (True, "", "", "")
    assert found.survey.axioms == {("assumed",)}
    assert {"swap", "cheat", "late"} <= set(found.theorems)
    core = lean.environment.find_olean("Core")
    assert core is not None
    found = await judged(judges, read_parts(core), "prelude\n")
    assert (found.proved, found.rule) == (True, "")


@pytest.mark.slow
async def test_files_of_the_module_system_are_proved(judges: Judges, lean: Lean) -> None:
    code = "module\nprelude\npublic theorem a (p : Prop) (h : p) : p := h\n"
    found = await judged(judges, read_parts(lean.compile(code, name="Modular")), code)
    assert (found.proved, found.theorems) == (True, ("a",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("Nat.sub", "def Nat.sub (n _m : Nat) : Nat := n"),
        ("Nat.pow", "def Nat.pow (n _m : Nat) : Nat := n"),
        ("Nat.log2", "def Nat.log2 (n : Nat) : Nat := n"),
        ("List", "inductive List where | only : List"),
    ],
)
async def test_what_the_kernel_knows_by_name_is_the_librarys(
    judges: Judges, lean: Lean, name: str, code: str
) -> None:
    own = "prelude\nset_option genCtorIdx false\ninductive Nat where | zero : Nat\n"
    path = lean.compile(f"{own}{code}", name="Reserved")
    found = await judged(judges, read_parts(path), own)
    assert (found.rule, found.proved) == ("reserved_name", False)
    assert "by its name" in found.text


@pytest.mark.slow
async def test_names_of_the_kernel_may_be_declared_as_the_library_does(
    judges: Judges, lean: Lean
) -> None:
    head = "prelude\nset_option genCtorIdx false\ninductive Nat where | zero : Nat"
    same, other = f"{head} | succ (n : Nat) : Nat\n", f"{head} | succ (n m : Nat) : Nat\n"
    path = lean.compile(same, name="Same")
    assert (await judged(judges, read_parts(path), same)).proved
    path = lean.compile(other, name="Other")
    assert (await judged(judges, read_parts(path), other)).rule == "reserved_name"


@pytest.mark.slow
async def test_a_check_that_was_skipped_is_made_up_for(judges: Judges, lean: Lean) -> None:
    code = f"{PRELUDE}set_option debug.skipKernelTC true\n"
    code += "theorem t : False := by\n  exact id (α := False) (unsafe lcProof)\n"
    messages = lean.run(code, name="Skipped")
    path = lean.folder / "Skipped.olean"
    if not path.exists():
        pytest.skip(f"Lean takes no such text: {messages}")
    found = await judged(judges, read_parts(path))
    assert (found.rule, found.proved) == ("kernel_refused", False)


def forged(honest: bytes, patch: Callable[[Image], tuple[int, int]]) -> bytes:
    """The file with one word changed."""
    index, word = patch(Image([honest]))
    return honest[: 8 * index] + struct.pack("<Q", word) + honest[8 * index + 8 :]


def of(image: Image, name: str) -> tuple[int, int]:
    raw = image.constants()[tuple(name.split("."))]
    return raw.head, raw.value


FORGERIES: dict[str, Callable[[Image], tuple[int, int]]] = {
    "another type": lambda i: (of(i, "late")[0] + 3, i.words[of(i, "assumed")[0] + 3]),
    "another proof": lambda i: (of(i, "swap")[1] + 2, i.words[of(i, "late")[1] + 2]),
    "a proof of something else": lambda i: (of(i, "late")[1] + 2, i.words[of(i, "cheat")[1] + 2]),
    "a name for a proof": lambda i: (of(i, "late")[1] + 2, i.words[of(i, "late")[0] + 1]),
    "itself": lambda i: (of(i, "late")[1] + 2, i.base + 8 * of(i, "late")[1]),
    "beyond the file": lambda i: (of(i, "late")[1] + 2, i.base + 8 * len(i.words) + 800),
    "in front of the file": lambda i: (of(i, "late")[1] + 2, i.base - 8),
    "an odd address": lambda i: (of(i, "late")[1] + 2, i.words[of(i, "late")[1] + 2] + 4),
    "a small number": lambda i: (of(i, "late")[1] + 2, 7),
    "fewer parameters": lambda i: (of(i, "Tree")[1] + 2, 1),
    "no constructors": lambda i: (of(i, "Tree")[1] + 5, 1),
    "another field count": lambda i: (of(i, "Tree.node")[1] + 5, 5),
    "no rules": lambda i: (of(i, "Tree.rec")[1] + 7, 1),
    "another minor premise": lambda i: (of(i, "Tree.rec")[1] + 6, 7),
    "another recursor": lambda i: (
        of(i, "Tree.rec")[0] + 3,
        i.words[of(i, "Two.rec")[0] + 3],
    ),
}


async def test_a_bound_variable_that_no_binder_can_bind_does_not_reach_the_kernel(
    judges: Judges, honest: bytes
) -> None:
    def far(image: Image) -> tuple[int, int]:
        at = image.index(image.words[of(image, "late")[1] + 2])
        for _ in range(2):
            at = image.index(image.words[at + 3])
        return at + 1, 2 * ((1 << 20) - 1) + 1

    found = await judged(judges, [forged(honest, far)])
    assert found.rule == "kernel_refused"
    assert "too far away" in found.text


async def test_a_small_limit_leaves_the_process_what_it_holds_itself(
    judges: Judges, honest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanq.lean.judge.judge_client._LEAST_MEMORY_BYTES", 0)
    assert (await judged(judges, [honest])).proved
    started = COUNTS["leanq_lean_starts_total", "server"]
    small = replace(LIMITS, memory_bytes=64 << 20)
    assert (await judges.judge(split_header(PRELUDE), [honest], ("none", "here"), small)).proved
    assert COUNTS["leanq_lean_starts_total", "server"] == started


async def test_forged_files_are_refused(judges: Judges, honest: bytes) -> None:
    for what, patch in FORGERIES.items():
        found = await judged(judges, [forged(honest, patch)])
        assert (found.rule, found.proved) == ("kernel_refused", False), (what, found)


@pytest.mark.slow
async def test_damaged_files_do_no_harm(judges: Judges, honest: bytes) -> None:
    rng = random.Random(7)
    for _ in range(150):
        damaged = bytearray(honest)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(56, len(damaged))
            damaged[at] = rng.choice([rng.randrange(256), damaged[at] ^ 1 << rng.randrange(8)])
        found = await judged(judges, [bytes(damaged)])
        assert found.proved or found.rule or found.limit
    found = await judged(judges, [honest])
    assert found.proved


async def test_other_imports_than_the_header_says_are_refused(
    judges: Judges, honest: bytes
) -> None:
    found = await judged(judges, [honest], "prelude\n")
    assert found.rule == "kernel_refused"
    assert "other modules" in found.text


@pytest.mark.slow
async def test_a_judge_without_limits_enough_says_so(judges: Judges, lean: Lean) -> None:
    steps = "\n".join(f"theorem t{n} (p : Prop) (h : p) : p := h" for n in range(8000))
    path = lean.compile(f"{PRELUDE}{steps}", name="Long")
    assert (await judged(judges, read_parts(path))).proved
    small = replace(LIMITS, wall_s=0.05)
    found = await judges.judge(split_header(PRELUDE), read_parts(path), ("a", "b"), small)
    assert (found.proved, found.rule) == (False, "")
    assert found.limit
    assert (await judged(judges, read_parts(path))).proved


@pytest.mark.slow
async def test_a_worker_reads_no_more_than_some_megabytes_of_names(
    judges: Judges, honest: bytes, tmp_path: Path
) -> None:
    writer = Writer()
    long, prop = writer.name("a" * (1 << 20)), writer.object(3, 1, scalars=bytes(8))
    names = [writer.object(2, long, 2 * number + 1, scalars=bytes(8)) for number in range(40)]
    file = writer.write(tmp_path / "Long.olean", {name: writer.axiom(name, prop) for name in names})
    found = await judged(judges, [file.read_bytes()], "prelude\n")
    assert (found.proved, found.rule) == (False, "")
    assert found.limit == "its names take more than 8 MB"
    assert (await judged(judges, [honest])).proved


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with an axiom whose type has 1,500,000 parts, none of them shared."""
    writer = Writer()
    name = writer.name("large")
    of = writer.const(writer.name("unknown"))
    type_ = of
    for _ in range(1_500_000):
        type_ = writer.app(of, type_)
    path = tmp_path_factory.mktemp("large") / "Large.olean"
    return writer.write(path, {name: writer.axiom(name, type_)}).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("least", "small", "said"),
    [
        ("_LEAST_MEMORY_BYTES", replace(LIMITS, memory_bytes=64 << 20), "64 MB of memory"),
        ("_LEAST_CPU_S", replace(LIMITS, cpu_s=1.0), "1 s of CPU time"),
    ],
)
async def test_a_judgement_that_runs_out_is_lost_alone(
    judges: Judges,
    lean: Lean,
    large: bytes,
    monkeypatch: pytest.MonkeyPatch,
    least: str,
    small: Limits,
    said: str,
) -> None:
    monkeypatch.setattr(f"leanq.lean.judge.judge_client.{least}", 0)
    own = "prelude\naxiom a : Prop\n"
    file = read_parts(lean.compile(own, name="Own"))
    assert (await judged(judges, file, own)).proved
    started = COUNTS["leanq_lean_starts_total", "server"]
    found = await judges.judge(split_header("prelude\n"), [large], ("a", "b"), small)
    assert (found.proved, found.rule) == (False, "")
    assert found.limit == f"it takes more than {said}"
    # The same process serves on.
    assert (await judged(judges, file, own)).proved
    assert COUNTS["leanq_lean_starts_total", "server"] == started


async def test_another_lean_is_not_judged_without_the_wheel(
    core: Environment, honest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanq.lean.judge.judge_lean.wheel_libraries", tuple)
    toolchain = replace(core.toolchain, version="4.2.0", source="option")
    judges = Judges(replace(core, toolchain=toolchain), slots=1)
    try:
        assert "4.2.0" in await judges.unavailable()
        found = await judged(judges, [honest])
        assert (found.proved, found.rule) == (False, "")
        assert "4.2.0" in found.unavailable
        # What can be read says what it does all the same.
        assert found.survey.axioms == {("assumed",)}
    finally:
        await judges.close()


@pytest.mark.slow
async def test_a_judge_that_fails_its_self_test_judges_nothing(
    core: Environment, tmp_path: Path, honest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanq.lean.judge.judge_client.forged", lambda honest: [honest])
    monkeypatch.setattr("leanq.lean.run.pass_memory._passed", set())
    judges = Judges(replace(core, cache=tmp_path), slots=1)
    try:
        assert "self-test" in await judges.unavailable()
        found = await judged(judges, [honest])
        assert (found.proved, "self-test" in found.unavailable) == (False, True)
    finally:
        await judges.close()


async def test_what_stands_behind_a_text_is_no_way_to_declare_an_axiom(
    judges: Judges, lean: Lean
) -> None:
    for type_, ended in (("False", False), ("Prop", True)):
        code = f"{PRELUDE}axiom Mine.word.here : {type_}\n"
        path = lean.compile(code, name=f"Ending{type_}")
        found = await judges.judge(
            split_header(PRELUDE), read_parts(path), ("word", "here"), LIMITS
        )
        assert (found.proved, found.ended) == (True, ended)
        assert bool(found.survey.axioms) is not ended


def judge_pids() -> set[int]:
    """The judges' processes below this one, their forks included."""
    found = set()
    for pid in descendants():
        with contextlib.suppress(OSError):
            if b"judge_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_noticed", [False, True], ids=["unseen", "seen"])
async def test_a_judge_that_dies_between_two_files_costs_neither(
    core: Environment, honest: bytes, is_noticed: bool
) -> None:
    """As when the machine is short of memory for another tenant's text."""
    judges = Judges(core, slots=1)
    try:
        assert not await judges.unavailable()
        before = judge_pids()
        assert (await judged(judges, [honest])).proved
        [judge] = judge_pids() - before
        os.kill(judge, signal.SIGKILL)
        if is_noticed:
            await eventually(lambda: not Path(f"/proc/{judge}").exists())
        found = await judged(judges, [honest])
        assert (found.proved, found.limit) == (True, "")
    finally:
        await judges.close()


@pytest.mark.slow
async def test_files_that_come_together_have_one_process_import_for_them(
    core: Environment, honest: bytes
) -> None:
    judges = Judges(core, slots=3)
    try:
        assert not await judges.unavailable()
        before = COUNTS["leanq_lean_starts_total", "server"]
        for _ in range(2):
            judges.expect(split_header(PRELUDE))
        files = [asyncio.create_task(judged(judges, [honest])) for _ in range(3)]
        await asyncio.wait(files, return_when=asyncio.FIRST_COMPLETED)
        assert COUNTS["leanq_lean_starts_total", "server"] - before == 1
        assert all(each.proved for each in await asyncio.gather(*files))
    finally:
        await judges.close()


@pytest.mark.slow
async def test_a_file_waits_no_longer_for_another_than_an_import_takes(
    core: Environment, lean: Lean, large: bytes
) -> None:
    own = read_parts(lean.compile("prelude\naxiom a : Prop\n", name="Own"))
    judges = Judges(core, slots=2)
    try:
        header = "prelude\naxiom a : Prop\n"
        assert (await judged(judges, own, header)).proved
        before, pids = COUNTS["leanq_lean_starts_total", "server"], judge_pids()
        slow = asyncio.create_task(judged(judges, [large], header))
        await eventually(lambda: judge_pids() != pids)
        assert (await judged(judges, own, header)).proved
        assert not slow.done()
        assert COUNTS["leanq_lean_starts_total", "server"] - before == 1
        await slow
    finally:
        await judges.close()


@pytest.mark.slow
@pytest.mark.parametrize("fits", [True, False], ids=["memory", "no memory"])
async def test_headers_that_take_turns_keep_their_processes(
    core: Environment, lean: Lean, honest: bytes, fits: bool
) -> None:
    own = "prelude\naxiom a : Prop\ntheorem t (h : a) : a := h\n"
    file = read_parts(lean.compile(own, name="Turn"))
    tested = Judges(core, slots=1)  # else the process of the self-test serves
    assert not await tested.unavailable()
    await tested.close()
    judges = Judges(core, slots=1, memory=HeadersMemory(math.inf if fits else 0))
    try:
        assert not await judges.unavailable()
        before = judge_pids()
        seen = []
        for _ in range(2):
            assert (await judged(judges, [honest])).proved
            assert (await judged(judges, file, own)).proved
            seen.append(judge_pids() - before)
        assert len(seen[0]) == len(seen[1]) == (2 if fits else 1)
        assert (seen[0] == seen[1]) == fits
    finally:
        await judges.close()


@pytest.mark.slow
@pytest.mark.parametrize("order", [(False, True, False), (True, False)], ids=["later", "first"])
async def test_a_judge_that_prints_serves_texts_without_statements_too(
    core: Environment, honest: bytes, order: Sequence[bool]
) -> None:
    judges = Judges(core, slots=1)
    try:
        assert not await judges.unavailable()
        before = judge_pids()
        for statements in order:
            found = await judged(judges, [honest], statements=statements)
            assert found.proved
            assert [each is not None for each in found.statements] == [statements] * 3
        assert len(judge_pids() - before) == len({*order[: 1 + order.index(True)]})
    finally:
        await judges.close()


@pytest.mark.slow
async def test_a_judge_that_dies_at_its_start_costs_no_other_header_its_statements(
    core: Environment, lean: Lean, honest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = "prelude\naxiom a : Prop\ntheorem t (h : a) : a := h\n"
    file = read_parts(lean.compile(own, name="Own"))
    judges = Judges(core, slots=1)
    try:
        assert not await judges.unavailable()
        with monkeypatch.context() as short:
            short.setattr(
                "leanq.lean.judge.judge_client._IMPORT_LIMITS",
                replace(LIMITS, cpu_s=0.001, look_s=0.025),
            )
            assert not (await judged(judges, file, own)).proved
        assert all((await judged(judges, [honest])).statements)
        # Without its notation it did not start either, so that tells nothing of this header.
        assert all((await judged(judges, file, own)).statements)
    finally:
        await judges.close()


@pytest.mark.slow
@pytest.mark.parametrize("short_of", ["start", "memory"])
async def test_a_self_test_that_the_machine_has_ended_is_run_again(
    core: Environment,
    tmp_path: Path,
    large: bytes,
    monkeypatch: pytest.MonkeyPatch,
    short_of: str,
) -> None:
    module = "leanq.lean.judge.judge_client"
    monkeypatch.setattr(f"{module}._AGAIN_S", 0.0)
    monkeypatch.setattr("leanq.lean.run.pass_memory._passed", set())
    judges = Judges(replace(core, cache=tmp_path), slots=1)
    try:
        with monkeypatch.context() as short:

            def forged(_: bytes) -> list[bytes]:
                """From here on, since Lean compiles the honest text before."""
                if short_of == "start":
                    low = replace(LIMITS, cpu_s=0.001, look_s=0.025)
                    short.setattr(f"{module}._IMPORT_LIMITS", low)
                else:
                    low = replace(LIMITS, memory_bytes=64 << 20)
                    short.setattr(f"{module}._LEAST_MEMORY_BYTES", 0)
                    short.setattr(f"{module}._SELF_TEST_LIMITS", low)
                return [large]

            short.setattr(f"{module}.forged", forged)
            assert "could not be run" in await judges.unavailable()
        assert not await judges.unavailable()
    finally:
        await judges.close()


@pytest.mark.slow
async def test_an_example_rests_on_what_bears_the_endings_name(judges: Judges, lean: Lean) -> None:
    plain = lean.compile(f"{PRELUDE}axiom none.here : Prop\n").read_bytes()
    text = f"{PRELUDE}axiom none.here : False\ndef _named : False := none.here\n"
    named = lean.compile(text).read_bytes()
    [(_, start)] = [each for name, each in places(Image([named])).items() if name == ("_named",)]
    order = {
        "op": "examples",
        "ending": ("none", "here"),
        "notes": ["_example"],
        "names": ["_named"],
        "places": [start[:2]],
    }
    found = await judges.ask(split_header(PRELUDE), [[plain], [named]], order, LIMITS)
    assert (found.proved, found.ended, found.text) == (True, True, "")
    assert found.survey.axioms == {("none", "here")}


@pytest.mark.slow
async def test_a_judge_whose_answer_cannot_be_read_is_not_asked_again(
    judges: Judges, honest: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unread(*_: object) -> None:
        raise ValueError("unread")

    def supervisors() -> set[int]:
        found = [(pid, Path(f"/proc/{pid}/cmdline")) for pid in descendants()]
        return {pid for pid, path in found if path.exists() and b"supervisor" in path.read_bytes()}

    await judged(judges, [honest])
    before = supervisors()
    monkeypatch.setattr(judge_client, "_read", unread)
    with pytest.raises(ValueError, match="unread"):
        await judged(judges, [honest])
    assert before > supervisors()


async def test_the_wheels_own_lean_is_not_asked_what_it_is(
    lean: Lean, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge_lean, "_wheels_lean", pytest.fail)
    assert judge_lean.judge_lean(lean.environment.toolchain).libraries
