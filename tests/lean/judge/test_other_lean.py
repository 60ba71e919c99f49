"""An environment of another Lean: the wheel's kernel judges its texts, from kernel images."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.lean.layouts import as_of_4_9
from support.lean.other_lean import CORE, INIT, compile_module, open_other, other_lean
from support.lean.search_paths import with_folders
from support.lean.sites import new_site
from support.paths import ROOT

from leanq.errors import AuditError
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment
from leanq.lean.judge.declarations import ImportedAxioms
from leanq.lean.judge.judge_client import Judgement, Judges
from leanq.lean.judge.judge_lean import judge_lean
from leanq.lean.judge.kernel_images import KernelImages
from leanq.lean.judge.known_names import KERNEL_NAMES
from leanq.lean.run.files import File, hash_bytes
from leanq.lean.run.image import Image
from leanq.lean.run.olean import read_parts
from leanq.lean.run.toolchain import wheel_libraries
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import split_header
from leanq.queue.requests import Reply, Request

pytestmark = pytest.mark.slow
of_module = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_lean(tmp_path_factory.mktemp("other") / "toolchain")


@pytest.fixture(scope="module")
def other(lean: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return open_other(lean, tmp_path_factory.mktemp("cache"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def driver(
    other: Environment, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LeanDriver]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("scratch")
        patch.setattr(tempfile, "tempdir", str(folder))
        async with new_site(other, folder) as site:
            yield await site.driver()


SKIP = "set_option debug.skipKernelTC true\n"


async def check(driver: LeanDriver, code: str, **options: object) -> Reply:
    return await driver.run(Request(op="check", code=code, **options))  # type: ignore[arg-type]


def said(reply: Reply) -> tuple[str, str | None, str | None]:
    assert reply.error is None, reply.error
    return reply.verdict, reply.reason, reply.kernel


async def fault(environment: Environment) -> str:
    judges = Judges(environment, slots=1)
    try:
        return await judges.unavailable()
    finally:
        await judges.close()


@of_module
async def test_a_proof_of_another_lean_is_accepted_by_the_wheels_kernel(driver: LeanDriver) -> None:
    code = "theorem t (a b : Nat) (h : a = b) : b = a := h.symm\n"
    code += "theorem s : \"ab\" = String.ofList ['a', 'b'] := rfl\n"
    code += "theorem n : 2 ^ 10 % 7 = 2 := rfl\n"
    code += "inductive Tree where | leaf | node (l r : Tree)\n"
    reply = await check(driver, code)
    assert said(reply) == ("accepted", None, "4.35.0"), reply.messages
    assert [each.name for each in reply.theorems] == ["t", "s", "n"]


@pytest.mark.parametrize(
    ("code", "verdict", "reason"),
    [
        ("theorem t : 1 = 2 := rfl", "rejected", "lean_error"),
        ("theorem t : 1 = 2 := sorry", "incomplete", "sorry"),
        ("axiom a : 1 = 2\ntheorem t : 1 = 2 := a", "rejected", "forbidden_axiom"),
        ("prelude\nimport Core\ndef String.ofLisp := 1", "accepted", None),
        ("def eagerReduce (n : Nat) : Nat := n", "rejected", "reserved_name"),
    ],
)
@of_module
async def test_what_needs_no_kernel_is_as_ever(
    driver: LeanDriver, code: str, verdict: str, reason: str | None
) -> None:
    reply = await check(driver, code)
    assert said(reply)[:2] == (verdict, reason), reply.messages


# Lean's own kernel is told to take anything, as one with a defect may.
SKIPPED = f"{SKIP}theorem t : False := bad\n"
BAD = "unsafe def bad : False := bad\n"


@of_module
async def test_what_another_kernel_alone_takes_is_unjudged(driver: LeanDriver) -> None:
    reply = await check(driver, BAD + SKIPPED)
    assert said(reply) == ("unjudged", "kernels_disagree", "4.35.0"), reply.messages
    assert "kernel of Lean 4.35.0 does not: " in reply.messages[-1].text
    target = "theorem t : False := sorry\n"
    reply = await driver.run(Request(op="verify", code=BAD + SKIPPED, target=target))
    assert said(reply) == ("unjudged", "kernels_disagree", "4.35.0"), reply.messages


@of_module
async def test_axioms_behind_imports_come_from_the_kernel(
    driver: LeanDriver, other: Environment, lean: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that `Init` declares or imports, as the environment's Lean tells it."""
    opened = driver.opened
    header = split_header("import Init\n")
    names = [
        name
        for module in ("Core", "Init")
        for name in Image(
            read_parts(lean.parents[1] / "lib" / "lean" / f"{module}.olean")
        ).constants()
    ]
    asked = ImportedAxioms(header, opened.lean.ask, other.find_olean)
    told = await opened.auditor.judges.axioms(header, names)
    assert told == await asked.look_up(names)
    assert len({*told.values()}) > 10
    with pytest.raises(AuditError, match=r"no import declares Nat\.odd"):
        await opened.auditor.judges.axioms(header, [("Nat", "odd")])

    async def refused(source: str) -> str:
        raise AssertionError(source)

    monkeypatch.setattr(opened.lean, "ask", refused)
    reply = await check(driver, "theorem t : Nat.le 1 (Nat.succ 4) := Nat.succ_pos 4\n")
    assert said(reply) == ("rejected", "forbidden_axiom", "4.35.0"), reply.messages
    assert reply.axioms == ("Nat.succ_pos",)


@pytest.mark.parametrize(
    ("statement", "limit"),
    [
        ("Eq (Nat.pow 2 16777217) (Nat.mul 2 (Nat.pow 2 16777216))", "no power above 2^24"),
        ("Eq (Nat.pow 2 16777216) (Nat.mul 2 (Nat.pow 2 16777215))", None),
        ("Eq (Nat.add 2 16777217) 16777219", None),
    ],
)
@of_module
async def test_a_known_limit_of_the_kernel_is_named(
    driver: LeanDriver, statement: str, limit: str | None
) -> None:
    reply = await check(driver, f"{BAD}{SKIP}theorem t : {statement} := bad.rec\n")
    assert said(reply) == ("unjudged", "kernels_disagree", "4.35.0"), reply.messages
    text = reply.messages[-1].text
    assert ("(this kernel computes" in text) == (limit is not None)
    assert (limit or "") in text


@of_module
async def test_what_is_wrong_for_other_reasons_is_no_matter_of_kernels(driver: LeanDriver) -> None:
    reply = await check(driver, f"{BAD}axiom a : 1 = 2\n{SKIPPED}")
    assert said(reply)[:2] == ("rejected", "forbidden_axiom"), reply.messages
    target = "theorem t : True := sorry\n"
    reply = await driver.run(Request(op="verify", code=BAD + SKIPPED, target=target))
    assert said(reply)[:2] == ("rejected", "statement_differs"), reply.messages


@pytest.mark.parametrize(
    ("name", "was", "becomes"),
    [
        ("Nat.shiftRight", "fun _ ih => Nat.div ih 2", "fun _ ih => Nat.div ih 3"),
        # On numbers the kernel computes by itself what it is asked to prove.
        (
            "Nat.beq",
            "fun m => Nat.rec (motive := fun _ => Bool) true",
            "fun m => Nat.rec (motive := fun _ => Bool) false",
        ),
        (
            "Nat.ble",
            "(motive := fun _ => Nat → Bool) (fun _ => true)",
            "(motive := fun _ => Nat → Bool) (fun m => m.rec false fun _ _ => true)",
        ),
    ],
)
@of_module
async def test_a_library_that_means_something_else_is_unjudged(
    tmp_path: Path, name: str, was: str, becomes: str
) -> None:
    core = CORE.read_text()
    assert core.count(was) == 1
    program = other_lean(tmp_path / "toolchain", core=core.replace(was, becomes))
    why = await fault(open_other(program, tmp_path / "cache"))
    assert f"may mean something else: {name} (" in why


@of_module
async def test_a_name_that_nothing_settles_makes_the_environment_unjudged(tmp_path: Path) -> None:
    init = INIT.replace("axiom Nat.gcd_succ", "axiom Nat.gcd_suck")
    program = other_lean(tmp_path / "toolchain", init=init)
    why = await fault(open_other(program, tmp_path / "cache"))
    assert "Nat.gcd (not proved of it: Nat.gcd (Nat.succ n) m = " in why


@of_module
async def test_names_that_the_judge_cannot_look_at_are_not_settled(
    other: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Judges._asked  # noqa: SLF001 - no library that Lean takes ends so

    async def denied(*asks: Any) -> Judgement:
        if asks[3]["op"] == "names":
            return Judgement(rule="kernel_refused", text="it is damaged")
        return await asked(*asks)

    monkeypatch.setattr(Judges, "_asked", denied)
    judges = Judges(other, slots=1, prints=False)
    try:
        assert await judges.self_test() == "it is damaged"
    finally:
        await judges.close()


@of_module
async def test_no_module_beside_the_library_gives_names_a_meaning(
    lean: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    compile_module(lean, "Own", "def eagerReduce (n : Nat) : Nat := n\n", folder)
    compile_module(lean, "Plain", "theorem own (p : Prop) (h : p) : p := h\n", folder)
    environment = open_other(lean, tmp_path / "cache", folder)
    images = KernelImages(environment, judge_lean(environment.toolchain))
    assert images.prepare([("Plain",)]).modules == 3
    with pytest.raises(AuditError, match="the module Own declares eagerReduce"):
        images.prepare([("Own",)])


@of_module
async def test_theorems_of_several_modules_do_not_prove_each_other(
    lean: Path, tmp_path: Path
) -> None:
    """Lean takes one proof of each, and no module has both of these."""
    folder, scratch = tmp_path / "modules", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    texts = {
        "A": "axiom q : False\ntheorem a : False := q\n",
        "B": "theorem b : False := sorry\n",
        "OfA": "import A\ntheorem b : False := a\n",
        "OfB": "import B\ntheorem a : False := b\n",
    }
    for name, text in texts.items():
        compile_module(lean, name, text, folder)
    types = "mutual\ninductive T where | t (u : U)\ninductive U where | u | of (t : T)\nend\n"
    unsafe = "unsafe def bad : False := bad\n"
    compile_module(lean, "Honest", f"{types}{unsafe}def c (u : U) : U := u\n", folder)
    async with new_site(open_other(lean, tmp_path / "cache", folder), scratch) as site:
        driver = await site.driver()
        code = "import A\nimport B\nimport OfA\nimport OfB\ntheorem t : False := a\n"
        reply = await check(driver, code)
        assert said(reply) == ("rejected", "kernel_refused", "4.35.0"), reply.messages
        assert "the imports prove a by itself" in reply.messages[-1].text
        code = "import Honest\nunsafe def worse := bad\ndef t (u : U) : T := .t u\n"
        reply = await check(driver, code, trust_programs=True)
        assert said(reply)[0] == "accepted", reply.messages


@of_module
async def test_a_changed_module_is_transcribed_alone(
    lean: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO, "leanq.worker")
    folder = tmp_path / "modules"
    folder.mkdir()
    names = ("A", "B", "C")

    monkeypatch.setattr("leanq.lean.run.files._SETTLED_NS", 0)

    def prepared() -> tuple[Path, int]:
        caplog.clear()
        environment = open_other(lean, tmp_path / "cache", folder)
        images = KernelImages(environment, judge_lean(environment.toolchain))
        found = images.prepare([(each,) for each in names])
        assert found.modules == 2 + len(names)
        made = (re.search(r"made (\d+) in", each.message) for each in caplog.records)
        return found.folder, sum(int(each[1]) for each in made if each)

    for each in names:
        compile_module(lean, each, f"theorem in{each} (p : Prop) (h : p) : p := h\n", folder)
    first, made = prepared()
    assert made == 2 + len(names)
    assert prepared() == (first, 0)
    compile_module(lean, "B", "theorem inB (p q : Prop) (h : q) : q := h\n", folder)
    second, made = prepared()
    assert made == 1
    assert (first / "A.olean").samefile(second / "A.olean")
    environment = open_other(lean, tmp_path / "cache", folder)
    images = KernelImages(environment, judge_lean(environment.toolchain))
    assert images.prepare([("A",)]).folder == second
    kept = (second / "A.olean").stat().st_ino
    shutil.rmtree(second)
    assert images.prepare([("A",)]).folder == second
    assert (second / "A.olean").stat().st_ino == kept
    images.prepare([("B",)])
    assert (first / "B.olean").read_bytes() != (second / "B.olean").read_bytes()


def declared(view: Path, module: str) -> list[str]:
    return [".".join(map(str, each)) for each in Image(read_parts(view / module)).constants()]


@of_module
async def test_no_image_is_served_of_a_module_that_another_folder_hides(
    lean: Path, tmp_path: Path
) -> None:
    """Two projects share their folders, and list them in another order."""
    texts = {
        "good": "def P : Prop := True\ntheorem p : P := True.intro\n",
        "bad": "def P : Prop := False\naxiom p : P\n",
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        compile_module(lean, "M", text, tmp_path / name)
    opened = open_other(lean, tmp_path / "cache", tmp_path / "good")
    good, bad = (tmp_path / name for name in texts)
    verdicts = []
    for folders in ((good, bad), (bad, good)):
        scratch = tmp_path / f"scratch of {folders[0].name}"
        scratch.mkdir()
        async with new_site(with_folders(opened, folders), scratch) as site:
            reply = await check(await site.driver(), "import M\ntheorem t : P := p\n")
        verdicts.append(said(reply))
    assert verdicts == [("accepted", None, "4.35.0"), ("rejected", "forbidden_axiom", "4.35.0")]


@of_module
async def test_no_image_is_served_of_a_file_that_another_one_has_replaced(
    lean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link leads to the next release while a header is prepared, and then back."""
    monkeypatch.setattr("leanq.lean.run.files._SETTLED_NS", 0)
    for release, text in (("v1", "axiom one : Nat\n"), ("v2", "axiom two : Nat\n")):
        (tmp_path / release).mkdir()
        compile_module(lean, "M", text, tmp_path / release)
    link = tmp_path / "current"

    def moved_to(release: str) -> KernelImages:
        link.unlink(missing_ok=True)
        link.symlink_to(release)
        environment = open_other(lean, tmp_path / "cache", link)
        return KernelImages(environment, judge_lean(environment.toolchain))

    moved_to("v1").prepare([("Init",)])
    assert declared(moved_to("v2").prepare([("M",)]).folder, "M.olean") == ["two"]
    first = moved_to("v1")
    first.prepare([("Init",)])
    moved_to("v2")
    with pytest.raises(AuditError, match="its files have changed meanwhile"):
        first.prepare([("M",)])
    assert declared(moved_to("v1").prepare([("M",)]).folder, "M.olean") == ["one"]


@of_module
async def test_no_image_is_served_of_a_file_that_changes_within_a_tick_of_the_clock(
    lean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems note whole seconds; this one's clock stands still."""
    folder = tmp_path / "modules"
    folder.mkdir()
    path = compile_module(lean, "M", "axiom one : Nat\n", folder)
    other = compile_module(lean, "M", "axiom two : Nat\n", tmp_path).read_bytes()
    real, now_ns = File.of.__func__, time.time_ns()  # type: ignore[attr-defined]
    monkeypatch.setattr("leanq.lean.run.files._SETTLED_NS", 3600 * 10**9)
    monkeypatch.setattr(
        File,
        "of",
        classmethod(lambda *how: real(*how)._replace(mtime_ns=now_ns, ctime_ns=now_ns)),
    )

    def made() -> list[str]:
        environment = open_other(lean, tmp_path / "cache", folder)
        images = KernelImages(environment, judge_lean(environment.toolchain))
        return declared(images.prepare([("M",)]).folder, "M.olean")

    before = path.stat()
    assert made() == ["one"]
    path.write_bytes(other)
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)
    assert made() == ["two"]


@of_module
async def test_images_that_were_deleted_are_those_of_the_same_files_again(
    lean: Path, tmp_path: Path
) -> None:
    """The self-test was passed with the library as it was found."""
    folder = tmp_path / "modules"
    folder.mkdir()
    text = f"prelude\nimport Core\n{INIT}"
    path = compile_module(lean, "Init", text, folder)
    environment = open_other(lean, tmp_path / "cache", folder)
    images = KernelImages(environment, judge_lean(environment.toolchain))
    view = images.prepare([("Init",)]).folder
    before = declared(view, "Init.olean")
    path.unlink()
    compile_module(lean, "Init", f"{text}axiom more : Nat\n", folder)
    shutil.rmtree(view)
    assert images.prepare([("Init",)]).folder == view
    assert declared(view, "Init.olean") == before


@of_module
async def test_a_librarys_names_mean_what_they_meant_in_the_self_test(
    lean: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    compile_module(lean, "Core", CORE.read_text(), folder)
    compile_module(lean, "Init", f"prelude\nimport Core\n{INIT}", folder)
    environment = open_other(lean, tmp_path / "cache", folder)
    judges = Judges(environment, slots=1, prints=False)
    limits = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)

    async def judged(text: str) -> Judgement:
        path = compile_module(lean, "T", f"{text}theorem t : True := True.intro\n", tmp_path)
        return await judges.judge(split_header(text), read_parts(path), ("", ""), limits)

    whole, wrong = CORE.read_text(), CORE.read_text().replace("Nat.div ih 2", "Nat.div ih 3")
    try:
        assert await judges.unavailable() == ""
        compile_module(lean, "Core", wrong, folder)
        assert (await judged(whole)).proved
        found = await judged(wrong)
        assert (found.proved, found.rule) == (False, "reserved_name"), found
        assert "Nat.shiftRight" in found.text
    finally:
        await judges.close()


@of_module
async def test_a_library_that_cannot_be_read_any_more_is_named(lean: Path, tmp_path: Path) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    path = compile_module(lean, "Init", f"prelude\nimport Core\n{INIT}", folder)
    environment = open_other(lean, tmp_path / "cache", folder)
    images = KernelImages(environment, judge_lean(environment.toolchain))
    images.prepare([("Init",)])
    path.write_bytes(b"rubbish" * 20)
    with pytest.raises(AuditError, match=f"{path} cannot be read any more: it does not begin like"):
        images.prepare([("Init",)])


@of_module
async def test_names_that_are_not_utf8_cost_no_other_module_its_image(
    lean: Path, tmp_path: Path
) -> None:
    folder = tmp_path / os.fsdecode(b"modules \xff")
    folder.mkdir()
    for name in ("A", "B", "C"):
        made = compile_module(lean, name, f"axiom in{name} : Nat\n", tmp_path)
        made.rename(folder / made.name)
    (folder / "A.olean").rename(folder / os.fsdecode(b"A\xff.olean"))
    environment = open_other(lean, tmp_path / "cache", folder)
    images = KernelImages(environment, judge_lean(environment.toolchain))
    found, faults = images.prepare_all()
    assert faults == {"«A\udcff»": "its name is not UTF-8"}
    assert found.modules == 4


@of_module
async def test_a_pass_of_the_self_test_holds_for_the_same_library(
    lean: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()

    def state() -> str:
        environment = open_other(lean, tmp_path / "cache", folder)
        return KernelImages(environment, judge_lean(environment.toolchain)).library_state()

    compile_module(lean, "A", "theorem inA (p : Prop) (h : p) : p := h\n", folder)
    first = state()
    compile_module(lean, "A", "theorem inA (p q : Prop) (h : q) : q := h\n", folder)
    assert state() == first
    # The folder's own Init comes before the toolchain's.
    init = compile_module(lean, "Init", f"prelude\nimport Core\n{INIT}axiom more : Nat\n", folder)
    second = state()
    assert second != first
    init.unlink()
    assert state() == first


@of_module
async def test_images_in_a_folder_that_others_may_write_to_are_not_used(
    lean: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    environment = open_other(lean, cache)
    assert await fault(environment) == ""
    images = KernelImages(environment, judge_lean(environment.toolchain))
    view = images.prepare([("Init",)]).folder
    for folder in (view, *view.parents[:3]):
        mode = folder.stat().st_mode
        folder.chmod(0o777)
        with pytest.raises(AuditError, match=f"other users can write to {folder}, "):
            images.prepare([("Init",)])
        folder.chmod(mode)
    assert images.prepare([("Init",)]).folder == view
    (cache / "kernel-images").chmod(0o777)
    judges = Judges(environment, slots=1)
    try:
        assert "other users can write to" in await judges.self_test()
    finally:
        await judges.close()


@of_module
@pytest.mark.usefixtures("loose_umask")
async def test_no_umask_lets_others_write_images(lean: Path, tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    environment = open_other(lean, cache)
    images = KernelImages(environment, judge_lean(environment.toolchain))
    images.prepare([("Init",)])
    # Another user who can write to one of these could exchange a folder of images.
    made = [cache.parent, cache, cache / "kernel-images", *(cache / "kernel-images").rglob("*")]
    assert sum(path.suffix == ".olean" for path in made) == 4
    assert [path for path in made if path.stat().st_mode & 0o022] == []


# Prints which rights others have to an image while it is being written.
_WATCHED = """
import io, os, stat, sys
from leanq.lean.judge import transcriber

os.umask(0)
chmod = os.chmod

def watched(path, mode):
    print(oct(stat.S_IMODE(os.stat(path).st_mode) & 0o022), flush=True)
    chmod(path, mode)

os.chmod = watched
sys.stdin = io.StringIO(sys.argv[1])
transcriber.main()
"""


def test_no_umask_lets_others_write_an_image_that_is_being_made(lean: Path, tmp_path: Path) -> None:
    path = lean.parents[1] / "lib" / "lean" / "Init.olean"
    job = {
        "module": ["Init"],
        "path": str(path),
        "hashes": [hash_bytes(path.read_bytes()).hex()],
        "image": str(tmp_path / "image.olean"),
        "adds_of_list": False,
    }
    first = {"libraries": [str(each) for each in wheel_libraries()]}
    rights, answer = said_by_kernel(_WATCHED, "\n".join(map(json.dumps, (first, job)))).splitlines()
    assert (rights, json.loads(answer)["module"]) == ("0o0", ["Init"])


# Reads modules in a process that dies at some of them, as for want of memory.
_DYING = """
import io, json, os, sys
from leanq.lean.judge import transcriber

transcriber._MODULES_OF_A_CHILD = 3
transcribe = transcriber.transcribe

def dying(kernel, job):
    if job["dies"]:
        os.abort()
    return transcribe(kernel, job)

transcriber.transcribe = dying
sys.stdin = io.StringIO(sys.argv[1])
transcriber.main()
"""


def test_a_module_at_which_a_process_dies_costs_no_other_one_its_image(
    lean: Path, tmp_path: Path
) -> None:
    path = lean.parents[1] / "lib" / "lean" / "Init.olean"
    jobs = [
        {
            "module": [f"M{number}"],
            "path": str(path),
            "hashes": [hash_bytes(path.read_bytes()).hex()],
            "image": str(tmp_path / f"M{number}.olean"),
            "adds_of_list": False,
            "dies": number in (1, 2, 6),
        }
        for number in range(8)
    ]
    first = {"libraries": [str(each) for each in wheel_libraries()]}
    answers = said_by_kernel(_DYING, "\n".join(map(json.dumps, (first, *jobs)))).splitlines()
    by_module = {said["module"][0]: said.get("fault") for said in map(json.loads, answers)}
    died = "its process died (exit code -6)"
    assert by_module == {f"M{n}": died if n in (1, 2, 6) else None for n in range(8)}
    assert len([*tmp_path.glob("*.olean")]) == 5


@of_module
async def test_images_that_are_missing_or_damaged_are_made_again(
    lean: Path, tmp_path: Path
) -> None:
    environment = open_other(lean, tmp_path / "cache")

    def prepared() -> Path:
        images = KernelImages(environment, judge_lean(environment.toolchain))
        return images.prepare([("Init",)]).folder / "Core.olean"

    image = prepared()
    whole = image.read_bytes()
    image.chmod(0o644)
    image.write_bytes(whole[: len(whole) // 2])  # the store's copy as well
    assert prepared().read_bytes() == whole
    image.unlink()
    assert prepared().read_bytes() == whole
    # Another user's doing, or a mode that lets one do it.
    image.chmod(0o666)
    image.write_bytes(b"x" + whole[1:])
    assert prepared().read_bytes() == whole
    index = image.with_name(".index.json")
    index.write_bytes(index.read_bytes().replace(b'"Core"', b'"Cure"'))
    assert prepared().read_bytes() == whole


@of_module
async def test_parts_may_be_links_to_files_of_any_name(lean: Path, tmp_path: Path) -> None:
    """As in a store whose files bear the hash of their content."""
    plain, linked, store = (tmp_path / each for each in ("plain", "linked", "store"))
    for each in (plain, linked, store):
        each.mkdir()
    text = "module\nprelude\npublic theorem own (p : Prop) (h : p) : p := h\n"
    compile_module(lean, "M", text, plain)
    for number, path in enumerate(sorted(plain.glob("M.olean*"))):
        shutil.copyfile(path, store / str(number))
        (linked / path.name).symlink_to(store / str(number))
    assert len([*linked.iterdir()]) == 3
    # The name of one part's file is no reason to take the files beside that for the others.
    for part in (".server", ".private"):
        (store / f"0{part}").write_bytes(b"rubbish")
    found = []
    for folder in (plain, linked):
        environment = open_other(lean, tmp_path / f"cache of {folder.name}", folder)
        images = KernelImages(environment, judge_lean(environment.toolchain))
        found.append((images.prepare([("M",)]).folder / "M.olean").read_bytes())
    assert found[0] == found[1]


@of_module
async def test_progress_is_told_while_images_are_made(lean: Path, tmp_path: Path) -> None:
    environment = open_other(lean, tmp_path / "cache")
    images = KernelImages(environment, judge_lean(environment.toolchain))
    told = set()
    making = asyncio.create_task(asyncio.to_thread(images.prepare, [("Init",)]))
    while not making.done():
        told.add(images.progress)
        await asyncio.wait({making}, timeout=0.001)
    await making
    assert {each for each in told if each} <= {
        f"kernel images are being made: {done} of 2" for done in range(3)
    }
    assert len(told) > 1
    assert images.progress == ""


@of_module
async def test_a_trouble_with_images_passes(lean: Path, tmp_path: Path) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    path = compile_module(lean, "M", "theorem own (p : Prop) (h : p) : p := h\n", folder)
    environment = open_other(lean, tmp_path / "cache", folder)
    code = "import M\ntheorem t (p : Prop) (h : p) : p := own p h\n"
    file = compile_module(lean, "T", code, folder)
    judges = Judges(environment, slots=1, prints=False)
    limits = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)

    async def judged() -> Judgement:
        return await judges.judge(split_header(code), read_parts(file), ("", ""), limits)

    try:
        assert await judges.unavailable() == ""
        whole = path.read_bytes()
        path.write_bytes(whole[:-8])
        found = await judged()
        assert not found.proved
        assert "M cannot be read for the judge's kernel" in found.unavailable
        path.write_bytes(whole)
        assert (await judged()).proved
    finally:
        await judges.close()


@of_module
async def test_a_self_test_that_could_not_be_run_is_tried_again(
    lean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leanq.lean.judge.judge_client._AGAIN_S", 0.0)
    cache = tmp_path / "cache"
    judges = Judges(open_other(lean, cache), slots=1, prints=False)
    folder = cache / "kernel-images"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    try:
        assert "could not be run: other users can write to" in await judges.unavailable()
        folder.chmod(0o755)
        assert await judges.unavailable() == ""
    finally:
        await judges.close()


@of_module
async def test_images_are_copied_where_no_links_can_be_made(
    lean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems have none, and Linux allows none to another user's file."""

    def denied(old: object, new: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(old), None, str(new))

    environment = open_other(lean, tmp_path / "cache")
    linked = KernelImages(environment, judge_lean(environment.toolchain))
    view = linked.prepare([("Init",)]).folder
    images = {path.name: path.read_bytes() for path in view.glob("*.olean")}
    shutil.rmtree(view)
    monkeypatch.setattr(os, "link", denied)
    for _ in range(2):  # the second time they are there
        copied = KernelImages(environment, judge_lean(environment.toolchain))
        view = copied.prepare([("Init",)]).folder
        assert {path.name: path.read_bytes() for path in view.glob("*.olean")} == images
        assert {path.stat().st_mode & 0o777 for path in view.glob("*.olean")} == {0o444}
    assert await fault(environment) == ""


@of_module
async def test_a_worker_makes_images_again_that_a_clean_up_has_deleted(
    lean: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    files = {}
    for module in ("M", "N"):
        text = f"theorem in{module} (p : Prop) (h : p) : p := h\n"
        compile_module(lean, module, text, folder)
        code = f"import {module}\ntheorem t (p : Prop) (h : p) : p := in{module} p h\n"
        files[code] = compile_module(lean, f"Of{module}", code, folder)
    environment = open_other(lean, tmp_path / "cache", folder)
    judges = Judges(environment, slots=1, prints=False)
    limits = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)

    async def judged(code: str) -> Judgement:
        return await judges.judge(split_header(code), read_parts(files[code]), ("", ""), limits)

    try:
        first, second = files
        assert (await judged(first)).proved
        for image in (tmp_path / "cache").glob("kernel-images/*/views/*/M.olean"):
            image.unlink()
        # Its process takes the place of the first header's.
        assert (await judged(second)).proved
        found = await judged(first)
        assert (found.proved, found.unavailable) == (True, "")
    finally:
        await judges.close()


@of_module
async def test_a_damaged_module_of_the_library_is_named(lean: Path, tmp_path: Path) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    path = compile_module(lean, "M", "theorem own (p : Prop) (h : p) : p := h\n", folder)
    data = bytearray(path.read_bytes())
    data[5] = 9
    path.write_bytes(data)
    environment = open_other(lean, tmp_path / "cache", folder)
    images = KernelImages(environment, judge_lean(environment.toolchain))
    with pytest.raises(AuditError, match=r"M cannot be read.*version 9 of the format"):
        images.prepare([("M",)])


@of_module
async def test_a_library_without_the_kernels_name_for_texts_gets_one(
    lean: Path, tmp_path: Path
) -> None:
    core = CORE.read_text().replace("String.ofList", "String.ofLines")
    program = other_lean(tmp_path / "toolchain", core=core)
    folder = tmp_path / "modules"
    folder.mkdir()
    compile_module(program, "M", "theorem own (p : Prop) (h : p) : p := h\n", folder)
    environment = open_other(program, tmp_path / "cache", folder)
    judges = Judges(environment, slots=1, prints=False)

    async def judged(code: str) -> Judgement:
        # This kernel cannot read texts without the name, so another library serves to compile.
        path = compile_module(lean, "T", code, tmp_path)
        limits = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)
        return await judges.judge(split_header(code), read_parts(path), ("", ""), limits)

    try:
        assert await judges.unavailable() == ""
        found = await judged("theorem t : \"ab\" = String.mk ['a', 'b'] := rfl")
        assert (found.proved, found.disagrees) == (True, ""), found
        code = f"{SKIP}{BAD}theorem t : \"ab\" = String.mk ['a', 'c'] := bad.rec\n"
        assert (await judged(code)).disagrees
        code = "prelude\ninductive Same (a : Prop) : Prop\ninductive String.ofList : Type\n"
        found = await judged(code)
        assert (found.proved, found.rule) == (False, "reserved_name")
    finally:
        await judges.close()
    # Core stays as it is. It has no second constant of this name once Init declares one.
    init = f"prelude\nimport Core\n{INIT}def String.ofList := String.mk\n"
    compile_module(program, "Init", init, folder)
    assert await fault(open_other(program, tmp_path / "cache", folder)) == ""


@of_module
async def test_types_in_the_layout_of_an_old_lean_are_judged(
    lean: Path, other: Environment, tmp_path: Path
) -> None:
    code = "inductive Tree where | node (children : List Tree)\n"
    code += "inductive Two where | a | b\ntheorem t : Two.a = Two.a := rfl\n"
    path = compile_module(lean, "Old", code, tmp_path)
    old = as_of_4_9(path.read_bytes())
    limits = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)
    judges = Judges(other, slots=1, prints=False)
    try:
        found = await judges.judge(split_header(code), [old], ("", ""), limits)
        assert (found.proved, found.disagrees) == (True, ""), found
        # How many types are nested stands in the recursor alone.
        image = Image([old])
        motives = 8 * (image.constants()["Tree", "rec"].value + 5)
        forged = bytearray(old)
        forged[motives] += 2
        found = await judges.judge(split_header(code), [bytes(forged)], ("", ""), limits)
        assert not found.proved
        assert "another" in found.disagrees
        # A layout that no reader knows says nothing of the proof.
        unknown = old[:5] + b"\x07" + old[6:]
        found = await judges.judge(split_header(code), [unknown], ("", ""), limits)
        assert (found.proved, found.rule) == (False, "unknown_layout")
    finally:
        await judges.close()


@of_module
async def test_types_in_the_layout_of_an_old_lean_are_compared(
    lean: Path, other: Environment, tmp_path: Path
) -> None:
    types = "inductive Two where | a | b\ninductive Tree where | node (children : List Tree)\n"
    target, code = (
        f"{types}theorem t (x : Two) (y : Tree) : x = x := {proof}\n"
        for proof in ("x.casesOn rfl rfl", "rfl")
    )
    stated, given = (
        bytearray(as_of_4_9(compile_module(lean, name, text, tmp_path).read_bytes()))
        for name, text in (("Stated", target), ("Given", code))
    )
    order = {"ending": ("", ""), "target_ending": ("", ""), "theorems": [], "holes": []}
    order |= {"is_whole": False, "unfilled": "", "allowed": [], "op": "verify"}
    limits = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)
    judges = Judges(other, slots=1, prints=False)
    try:
        files = [bytes(stated)], [bytes(given)]
        found = await judges.ask(split_header(code), files, order, limits)
        assert (found.proved, found.rule, found.differences) == (True, "", ()), found
        # Whether types are nested is the last of an inductive type's flags.
        stated[8 * (Image([bytes(stated)]).constants()["Tree",].value + 6) + 3] ^= 1
        files = [bytes(stated)], [bytes(given)]
        found = await judges.ask(split_header(code), files, order, limits)
        [(name, rule, _)] = found.differences
        assert (name, rule) == ("t", "definition_differs")
    finally:
        await judges.close()


# Each equation with something added to one side, which no library can prove.
_WRONG = """
import os, sys
from leanq.lean.judge import known_names
from leanq.lean.judge.kernel import Kernel
view, *libraries = sys.argv[1:]
kernel = Kernel(libraries)
kernel.import_header([("Init",)], [view])
assert known_names.unsettled(kernel) == {}
names = known_names._blocks()
prover = known_names._Prover(kernel)
taken, count = [], 0
for name, ways in names.items():
    for equation in ways[0]:
        right = equation.right
        other = {"Bool.true": "Bool.false", "Bool.false": "Bool.true"}.get(right)
        is_test = equation.left.split()[0] in known_names._TESTS
        other = other or (f"not ({right})" if is_test else f"Nat.succ ({right})")
        count += 1
        if not prover.fails([equation._replace(right=other)]):
            taken.append((name, equation.left, other))
        if equation.hypothesis and not prover.fails([equation._replace(hypothesis="")]):
            taken.append((name, equation.left, "without its hypothesis"))
print(count, taken)
sys.stdout.flush()
os._exit(0)
"""


def said_by_kernel(program: str, *arguments: str) -> str:
    """Returns the output of a program in a process of its own, which loads the wheel's kernel."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, *map(str, wheel_libraries())],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_no_wrong_equation_is_proved(other: Environment) -> None:
    images = KernelImages(other, judge_lean(other.toolchain))
    view = images.prepare([("Init",)]).folder
    count, _, taken = said_by_kernel(_WRONG, str(view)).partition(" ")
    assert (int(count) > 40, taken) == (True, "[]\n")


# The kernel says of any text in quotes that it is a String, so an empty type of this name is false.
_EMPTY = """
import os, sys
from leanq.lean.judge.kernel import Kernel
from leanq.lean.judge.known_names import _Terms, unsettled
kernel = Kernel(sys.argv[1:])
kernel.import_header([], [])
terms = _Terms(kernel)
for each in ("Nat", "Bool", "Eq"):
    kernel.add(terms.declaration(each, {"Eq": ("u",)}))
print(unsettled(kernel))
none = kernel.list([])
type_ = kernel.sort(kernel.level_succ(kernel.level_zero(1)))
block = kernel.list([kernel.construct(0, kernel.name(["String"]), type_, none)])
kernel.add(kernel.inductive_decl(none, kernel.nat(0), block, 0))
print(*unsettled(kernel))
sys.stdout.flush()
os._exit(0)
"""


def test_a_type_of_texts_that_nothing_makes_of_characters_is_unsettled() -> None:
    assert said_by_kernel(_EMPTY).splitlines() == ["{}", "String"]


# The kernel computes with these names wherever one is, and takes the others to be there.
_PARTLY = """
import os, sys
from leanq.lean.judge.kernel import Kernel
from leanq.lean.judge.known_names import _Terms, unsettled
kernel = Kernel(sys.argv[2:])
kernel.import_header([], [])
terms = _Terms(kernel)
given, *names = sys.argv[1].split()
for each in given.split(","):
    kernel.add(terms.declaration(each, {"Eq": ("u",)}))
kernel.mark_persistent(kernel.env)
library = kernel.env
for name in names:
    kernel.env = library
    type_ = kernel.sort(kernel.level_succ(kernel.level_zero(1)))
    made = kernel.axiom_val(kernel.name(name.split(".")), kernel.list([]), type_, 0)
    kernel.add(kernel.construct(0, made))
    print(*unsettled(kernel))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("given", "names", "unsettled"),
    [
        ("Nat,Bool,Eq", ["Quot.mk", "Quot.lift", "Quot", "List.rec"], ["Quot"] * 3 + ["List"]),
        ("Nat,Bool", ["Quot"], ["Eq Quot"]),
    ],
)
def test_a_part_of_a_type_is_unsettled(given: str, names: list[str], unsettled: list[str]) -> None:
    assert said_by_kernel(_PARTLY, " ".join([given, *names])).splitlines() == unsettled


# Asks the kernel, for each word near those that it knows, whether it computes with a function of
# that name which nothing defines.
_COMPUTED = r"""
import os, re, sys
from pathlib import Path
from leanq.lean.judge.kernel import Kernel, RefusedError
from leanq.lean.judge.known_names import KERNEL_NAMES, _Terms

libraries = sys.argv[1:]
kernel = Kernel(libraries)
kernel.import_header([], [])
terms = _Terms(kernel)
for each in ("Nat", "Bool", "Eq"):
    kernel.add(terms.declaration(each, {"Eq": ("u",)}))
library = kernel.env
kernel.mark_persistent(library)
data = Path(libraries[0]).read_bytes()
words = {name[1] for name in KERNEL_NAMES if name[0] == "Nat" and len(name) == 2}
for found in re.finditer(rb"\0eagerReduce\0", data):
    near = data[max(0, found.start() - 16384) : found.end() + 16384]
    for word in re.findall(rb"[A-Za-z][A-Za-z0-9]*(?=\0)", near):
        # A linker keeps one text for all that end alike.
        words |= {word[-size:].decode() for size in {2, 3, 4, len(word)}}
words = {word for word in words if word[0].islower() and len(word) <= 16}
words -= {"zero", "succ", "rec"}

def constant(*name, level=0):
    one = kernel.level_succ(kernel.level_zero(1))
    return kernel.const(kernel.name(name), kernel.list([one] * level))

def applied(function, *arguments):
    for each in arguments:
        function = kernel.app(function, each)
    return function

def true():
    return constant("Bool", "true")

def computes(word, takes, gives):
    kernel.env = library
    type_ = terms.binders([constant("Nat") for _ in range(takes)], constant(gives), is_type=True)
    name = kernel.name(["Nat", word])
    kernel.add(kernel.construct(0, kernel.axiom_val(name, kernel.list([]), type_, 0)))
    value = applied(constant("Nat", word), *(terms.read(str(n), ()) for n in (12, 5, 7)[:takes]))
    # Both cases are the same, and only what the kernel has computed is one of them.
    last = true()
    if gives == "Nat":
        last = terms.binders([constant("Nat"), constant("Bool")], true(), is_type=False)
    motive = terms.binders([constant(gives)], constant("Bool"), is_type=False)
    left = applied(constant(gives, "rec", level=1), motive, true(), last, value)
    statement = applied(constant("Eq", level=1), constant("Bool"), left, true())
    proof = applied(constant("Eq", "refl", level=1), constant("Bool"), true())
    name = kernel.name(["_probe"])
    made = kernel.theorem_val(name, kernel.list([]), statement, proof, kernel.list([name]))
    try:
        kernel.add(kernel.construct(2, made))
    except RefusedError:
        return False
    return True

shapes = [(1, "Nat"), (2, "Nat"), (3, "Nat"), (1, "Bool"), (2, "Bool")]
print(len(words), *sorted(w for w in words if any(computes(w, *shape) for shape in shapes)))
sys.stdout.flush()
os._exit(0)
"""


def test_the_kernel_computes_with_no_other_name() -> None:
    count, *computed = said_by_kernel(_COMPUTED).split()
    assert int(count) > 200
    known = "add beq ble div gcd land lor mod mul pow shiftLeft shiftRight sub xor"
    assert " ".join(computed) == known
    assert {("Nat", each) for each in computed} <= KERNEL_NAMES
