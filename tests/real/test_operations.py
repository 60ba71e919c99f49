"""The lean driver's operations on a full library."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.lean.libraries import Library, has_modules
from support.lean.sites import Site, check, new_site
from support.waiting import eventually

from leanq.errors import ToolchainError
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import open_environment
from leanq.queue.requests import Reply, Request

RIGHT = "import Std\ntheorem t (x y : Nat) (h : x < y) : x + 1 ≤ y := by omega\n"


def said(reply: Reply) -> str:
    assert reply.error is None, reply.error
    return " ".join(filter(None, (reply.verdict, reply.reason)))


@pytest.fixture
async def driver(real_site: Site) -> LeanDriver:
    return await real_site.driver()


async def test_a_check_tells_theorems_axioms_and_messages(driver: LeanDriver) -> None:
    text = (
        "import Std\n"
        "theorem by_cases' (p : Prop) : p ∨ ¬ p := Classical.em p\n"
        "theorem plain (n : Nat) : n + 0 = n := rfl\n"
        "theorem unused (n m : Nat) : n = n := rfl\n"
    )
    reply = await driver.run(check(text))
    assert said(reply) == "accepted", reply.messages
    assert [(each.name, each.statement) for each in reply.theorems] == [
        ("by_cases'", "∀ (p : Prop), p ∨ ¬p"),
        ("plain", "∀ (n : Nat), n + 0 = n"),
        ("unused", "∀ (n m : Nat), n = n"),
    ]
    assert reply.axioms is not None
    assert set(reply.axioms) <= {"propext", "Classical.choice", "Quot.sound"}
    [message] = reply.messages
    assert (message.severity, message.line, message.column) == ("warning", 4, 18)


async def test_a_profile_names_the_heaviest_declaration(driver: LeanDriver) -> None:
    text = (
        "import Std\nnamespace A\ntheorem easy (p : Prop) (h : p) : p := h\n"
        "set_option maxRecDepth 100000 in\n"
        "theorem hard : (List.range 2000).foldl (· + ·) 0 = 1999000 := by decide\nend A\n"
    )
    reply = await driver.run(check(text, profile=True))
    assert said(reply) == "unjudged not_audited", reply.messages
    assert reply.messages == ()
    assert reply.profile
    assert reply.profile.import_ms
    heaviest = reply.profile.declarations[0]
    assert (heaviest.name, heaviest.line) == ("A.hard", 5)
    assert {"A.easy": 3, "end A": 6}.items() <= {
        (each.name, each.line) for each in reply.profile.declarations
    }


async def test_errors_stand_where_lean_finds_them(driver: LeanDriver) -> None:
    text = "import Std\n\ntheorem t (x : Nat) : x < x := by\n  skip\n  omega\n"
    reply = await driver.run(check(text))
    assert said(reply) == "rejected lean_error"
    [message] = [each for each in reply.messages if each.severity == "error"]
    assert (message.line, message.column) == (5, 2)
    assert "omega could not" in message.text


TARGET = """import Std
def double (n : Nat) : Nat := n + n
theorem double_le (n m : Nat) (h : n ≤ m) : double n ≤ double m := sorry
"""
DOUBLE = "import Std\ndef double (n : Nat) : Nat := n + n\n"
CANDIDATES = {
    "a proof": (
        DOUBLE + "theorem double_le (n m : Nat) (h : n ≤ m) : double n ≤ double m := by\n"
        "  unfold double\n  omega\n",
        "accepted",
    ),
    "a proof with a lemma of its own": (
        DOUBLE + "@[simp] theorem double_eq (n : Nat) : double n = 2 * n := by\n"
        "  unfold double; omega\n"
        "theorem double_le (n m : Nat) (h : n ≤ m) : double n ≤ double m := by\n"
        "  simp only [double_eq]\n  exact Nat.mul_le_mul_left 2 h\n",
        "accepted",
    ),
    "a stronger hypothesis": (
        DOUBLE + "theorem double_le (n m : Nat) (h : n = m) : double n ≤ double m := by\n"
        "  simp [h]\n",
        "rejected statement_differs",
    ),
    "another definition": (
        "import Std\ndef double (n : Nat) : Nat := n - n\n"
        "theorem double_le (n m : Nat) (h : n ≤ m) : double n ≤ double m := by simp [double]\n",
        "rejected statement_differs",
    ),
    "another theorem": (
        DOUBLE + "theorem other : 1 = 1 := rfl\n",
        "rejected statement_differs",
    ),
    "a sorry": (
        DOUBLE + "theorem double_le (n m : Nat) (h : n ≤ m) : double n ≤ double m := by sorry\n",
        "incomplete sorry",
    ),
    "a wrong proof": (
        DOUBLE + "theorem double_le (n m : Nat) (h : n ≤ m) : double n ≤ double m := by simp\n",
        "rejected lean_error",
    ),
    "an axiom": (
        DOUBLE + "axiom cheat (p : Prop) : p\n"
        "theorem double_le (n m : Nat) (h : n ≤ m) : double n ≤ double m := cheat _\n",
        "rejected forbidden_axiom",
    ),
}


async def test_candidates_are_held_against_a_target(driver: LeanDriver) -> None:
    found = {}
    for name, (code, _) in CANDIDATES.items():
        found[name] = said(await driver.run(Request("verify", code=code, target=TARGET)))
    assert found == {name: wanted for name, (_, wanted) in CANDIDATES.items()}


async def step(driver: LeanDriver, state: str | None, tactic: str) -> Reply:
    assert state is not None
    return await driver.run(Request("step", state=state, tactic=tactic))


# A goal, and tactics that prove it one by one.
PROOFS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bullets": (
        "theorem t (p q : Prop) : p ∧ q → q ∧ p",
        ("rintro ⟨hp, hq⟩", "constructor", "· exact hq", "· exact hp"),
    ),
    "cases": (
        "theorem t (p q : Prop) (h : p ∨ q) : q ∨ p",
        ("cases h", "case inl h => exact Or.inr h", "case inr h => exact Or.inl h"),
    ),
    "induction": (
        "theorem t (n : Nat) : 0 + n = n",
        ("induction n with\n| zero => rfl\n| succ n ih => ?_", "rw [← Nat.add_assoc, ih]"),
    ),
    "calc and rw": (
        "theorem t (a b c : Nat) (h : a = b) (k : b = c) : a = c",
        ("have e : b = a := by rw [h]", "calc a = b := e.symm\n  _ = c := k"),
    ),
    "suffices and omega": (
        "theorem t (a b : Nat) (h : a < b) : a + a < b + b",
        ("suffices k : a + 1 ≤ b by omega", "exact h"),
    ),
    "simp": (
        "theorem t (xs : List Nat) : (xs ++ []).length = xs.length",
        ("simp",),
    ),
    "conv": (
        "theorem t (a b c : Nat) : a + b + c = b + a + c",
        ("conv => lhs; rw [Nat.add_comm a b]",),
    ),
}


async def test_tactics_prove_goals_step_by_step(library: Library, driver: LeanDriver) -> None:
    chosen = ("bullets", "induction") if library.layout == "modular" else PROOFS
    for name in chosen:
        statement, tactics = PROOFS[name]
        checked = await driver.run(check(f"import Std\n{statement} := by\n  sorry\n"))
        assert said(checked) == "incomplete sorry", (name, checked.messages)
        [hole] = checked.sorries
        state, goals = hole.state, (hole.goal,)
        for tactic in tactics[:-1]:
            reply = await step(driver, state, tactic)
            assert said(reply) == "incomplete goals_remain", (name, tactic, reply.messages)
            state, goals = reply.state, reply.goals
        wrong = await step(driver, state, "exact no_such_proof")
        assert said(wrong) == "rejected lean_error", (name, goals)
        reply = await step(driver, state, tactics[-1])
        assert said(reply) == "accepted", (name, goals, reply.messages)
        assert (reply.state, reply.goals) == (None, ())


async def test_a_step_leaves_another_hole_no_more_recursion_to_end(driver: LeanDriver) -> None:
    code = """import Std
theorem t (p : Prop) (n : Nat) (_ : n ≠ 0) : p := by
  have h : n - 1 ≠ 0 → True := fun k => t True (n - 1) k
  sorry
termination_by n
decreasing_by all_goals sorry
"""
    body, ends = (await driver.run(check(code))).sorries
    for recursion in ("exact t p (n + 1) (by omega)", "exact t p n ‹_›"):
        reply = await step(driver, body.state, recursion)
        assert said(reply) == "rejected hole_open", (recursion, reply.messages)
        assert {failure.rule for failure in reply.failed} == {"hole_open"}
    assert said(await step(driver, ends.state, "omega")) == "accepted"


async def test_a_state_means_the_same_in_another_worker(
    real_site: Site, tmp_path: Path, driver: LeanDriver
) -> None:
    code = "import Std\ntheorem t (a b : Nat) (h : a < b) : a ≠ b ∧ a + 1 ≤ b := by\n  sorry\n"
    [hole] = (await driver.run(check(code))).sorries
    assert hole.goal == "a b : Nat\nh : a < b\n⊢ a ≠ b ∧ a + 1 ≤ b"
    reply = await step(driver, hole.state, "constructor")
    assert len(reply.goals) == 2
    assert reply.state is not None
    exported = await driver.run(Request("export", state=reply.state))
    there = await real_site.driver()
    imported = await there.run(Request("import", payload=exported.payload))
    assert imported.state == reply.state
    assert said(await step(there, imported.state, "all_goals omega")) == "accepted"
    # A state belongs to its environment: with other options it is another one.
    other = replace(real_site.core, fingerprint="0" * 64)
    async with new_site(other, tmp_path / "other") as elsewhere:
        refused = await (await elsewhere.driver()).run(Request("import", payload=exported.payload))
    assert refused.error is not None


# Printed statements


STATEMENTS = {
    "(xs ys : List Nat) : (xs ++ ys).length = xs.length + ys.length := by simp": (
        "∀ (xs ys : List Nat), (xs ++ ys).length = xs.length + ys.length"
    ),
    "(p : Nat → Prop) (h : ∃ n, p n) : ¬ ∀ n, ¬ p n := fun k => h.elim k": (
        "∀ (p : Nat → Prop), (∃ (n : Nat), p n) → ¬∀ (n : Nat), ¬p n"
    ),
    "(a b : Int) (h : a ≤ b) : a - b ≤ 0 := by omega": "∀ (a b : Int), a ≤ b → a - b ≤ 0",
    "(n : Nat) (h : n ∈ [1, 2]) : n ≤ 2 := by simp at h; omega": (
        "∀ (n : Nat), n ∈ [1, 2] → n ≤ 2"
    ),
}


async def test_statements_are_printed_with_the_librarys_notation(driver: LeanDriver) -> None:
    code = "import Std\n" + "".join(
        f"theorem t{number} {statement}\n" for number, statement in enumerate(STATEMENTS)
    )
    reply = await driver.run(check(code))
    assert said(reply) == "accepted", reply.messages
    assert [each.statement for each in reply.theorems] == list(STATEMENTS.values())


# A Lake project


async def lake_driver(library: Library, site: Site, cache: Path, project: Path) -> LeanDriver:
    lake = shutil.which("lake", path=str(library.lean.parent))
    if lake is None:
        pytest.skip("the toolchain has no lake")
    (project / "lakefile.toml").write_text('name = "site"\n[[lean_lib]]\nname = "Site"\n')
    return await site.open(
        lambda: open_environment(
            "site", project, lean=str(library.lean), cache=cache, environ={"PATH": "/usr/bin:/bin"}
        ),
        slots=1,
    )


def build(library: Library, project: Path, code: str) -> None:
    """Compiles the project's one module, as ``lake build`` does."""
    results = project / ".lake" / "build" / "lib" / "lean"
    results.mkdir(parents=True, exist_ok=True)
    (project / "Site.lean").write_text(code)
    made = results / "Site.olean.new"
    command = [str(library.lean), "-o", str(made), "Site.lean"]
    subprocess.run(command, cwd=project, env={"PATH": "/usr/bin:/bin"}, check=True, timeout=120)
    made.rename(results / "Site.olean")


async def test_a_lake_projects_library_is_imported_and_replaced(
    library: Library, real_site: Site, cache: Path, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    build(library, project, "import Std\ntheorem site (n : Nat) : n < n + 1 := by omega\n")
    driver = await lake_driver(library, real_site, cache, project)
    text = "import Site\ntheorem t (n : Nat) : n < n + 1 := site n\n"
    first = await driver.run(check(text))
    assert said(first) == "accepted", first.messages
    absent = await driver.run(check("import Site.Other\n"))
    assert said(absent) == "rejected unknown_import"
    build(library, project, "import Std\ntheorem moved (n : Nat) : n < n + 1 := by omega\n")

    async def is_replaced() -> bool:
        return (await driver.run(check(text))).fingerprint != first.fingerprint

    await eventually(is_replaced, 300)
    second = await driver.run(check(text))
    assert said(second) == "rejected lean_error", second.messages


# A machine that loses a part of Lean's own library


async def test_a_lost_module_of_leans_own_rejects_no_text(
    library: Library, real_site: Site, cache: Path, tmp_path: Path
) -> None:
    toolchain = library.lean.parents[1]
    with contextlib.ExitStack() as stack:
        # A copy, since a link would change the files that other tests' judges look at.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=toolchain.parent)))
        shutil.copytree(toolchain, folder, symlinks=True, dirs_exist_ok=True)
        own = replace(library, lean=folder / "bin" / library.lean.name)
        driver = await real_site.open(lambda: own.open(cache))
        file = own.folder / "Std" / "Data" / "HashMap" / "Lemmas.olean"
        file.rename(folder / "lost")
        direct = f"import Std.Data.HashMap.Lemmas\n{RIGHT.removeprefix('import Std')}"
        for text in (RIGHT, direct):
            with pytest.raises(ToolchainError, match=r"has lost Std\.Data\.HashMap\.Lemmas"):
                await driver.run(check(text))
        # A worker that starts later has not seen it.
        late = await real_site.open(lambda: own.open(cache))
        for text in (RIGHT, direct):
            assert said(await late.run(check(text))) == "unjudged judge_unavailable"
        (folder / "lost").rename(file)
        await driver.prove()
        absent = RIGHT.replace("Std", "Std.Data.Nothing")
        assert said(await driver.run(check(absent))) == "rejected unknown_import"
        assert said(await driver.run(check(RIGHT))) == "accepted"


# The module system


MODULE = """module
public import Std

public section

def twice (n : Nat) : Nat := n + n

theorem twice_eq (n : Nat) : twice n = 2 * n := by
  unfold twice
  omega

end
"""


@pytest.fixture
def modules(library: Library) -> Library:
    """A toolchain with files of the module system."""
    if not has_modules(library.layout):
        pytest.skip("this layout has no files of the module system")
    return library


async def test_a_module_is_checked_verified_and_stepped(
    modules: Library, driver: LeanDriver
) -> None:
    assert said(await driver.run(check(MODULE))) == "accepted"
    target = MODULE.replace("by\n  unfold twice\n  omega", "sorry")
    verified = await driver.run(Request("verify", code=MODULE, target=target))
    assert said(verified) == "accepted", verified.failed
    other = MODULE.replace("n + n", "n + 0 + n")
    verified = await driver.run(Request("verify", code=other, target=target))
    assert said(verified) == "rejected statement_differs", verified.messages
    checked = await driver.run(check(target.replace(":= sorry", ":= by\n  sorry")))
    [hole] = checked.sorries
    assert said(await step(driver, hole.state, "unfold twice; omega")) == "accepted"


async def test_the_judge_refuses_what_the_kernel_would(real_site: Site) -> None:
    """Forged files are refused by this library's kernel: the judge's own test of itself."""
    driver = await real_site.driver()
    assert await driver.opened.auditor.judges.self_test() == ""


OPTIONS: dict[str, Any] = {"timeout_s": 5.0}
ENDLESS = """import Std
set_option maxRecDepth 1000000
set_option maxHeartbeats 0
theorem t : ∀ n : Nat, n < 40000 → n * n % 7 ≤ 4 := by decide
"""


async def test_a_text_that_takes_too_long_is_ended(driver: LeanDriver) -> None:
    reply = await driver.run(check(ENDLESS, **OPTIONS))
    assert reply.verdict in ("timeout", "memory"), reply
    after = await driver.run(check(RIGHT))
    assert said(after) == "accepted", after.messages
