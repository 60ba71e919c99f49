"""Verification: a candidate is held against a target that was compiled apart from it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
from support.lean.search_paths import with_folders
from support.lean.sites import Site

from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment, open_environment
from leanq.queue.requests import Reply, Request, Rule

PRELUDE = "prelude\nimport Core\n"
TARGET = f"""{PRELUDE}
def Both (p q : Prop) : Prop := And p q
theorem swap (p q : Prop) (h : Both p q) : Both q p := sorry
"""
PROOF = "theorem swap (p q : Prop) (h : Both p q) : Both q p := And.intro h.right h.left\n"
BOTH = "def Both (p q : Prop) : Prop := And p q\n"


def compile_text(environment: Environment, source: Path, result: Path) -> None:
    command = (*environment.toolchain.command, "-o", result, source.name)
    variables = environment.process_env()
    subprocess.run(command, env=variables, cwd=source.parent, check=True, timeout=60)


async def verify(driver: LeanDriver, code: str, target: str = TARGET, **how: Any) -> Reply:
    request = Request(op="verify", code=code, target=target, **how)
    return await driver.run(request)


@pytest.mark.slow
async def test_a_proof_of_the_target_is_accepted(either: Site) -> None:
    driver = await either.one()
    for code in (
        f"{PRELUDE}{BOTH}{PROOF}",
        # Whatever else it declares, and however its variables are named.
        f"{PRELUDE}{BOTH}theorem more (p : Prop) (h : p) : p := h\n"
        "theorem swap (a b : Prop) (both : Both a b) : Both b a := "
        "And.intro both.right both.left\n",
    ):
        reply = await verify(driver, code)
        assert (reply.verdict, reply.reason, reply.failed) == ("accepted", None, ())
        # The names of variables are the candidate's.
        [theorem] = reply.theorems
        assert theorem.name == "swap"
        assert theorem.statement.startswith("∀ (")
        assert "Both" in theorem.statement


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "rule"),
    [
        (f"{BOTH}theorem other (p q : Prop) (h : Both p q) : Both q p := ⟨h.right, h.left⟩", None),
        (f"{BOTH}theorem swap (p : Prop) (h : Both p p) : Both p p := h", "type_differs"),
        (f"{BOTH}theorem other (p : Prop) (h : p) : p := h", "missing"),
        (f"def Both (p _q : Prop) : Prop := p\n{PROOF.split(':=')[0]}:= sorry", None),
        (
            "def Both (_p _q : Prop) : Prop := True\n"
            "theorem swap (p q : Prop) (_h : Both p q) : Both q p := True.intro",
            "definition_differs",
        ),
        (
            "axiom Both (p q : Prop) : Prop\naxiom given (p q : Prop) : Both p q\n"
            "theorem swap (p q : Prop) (_h : Both p q) : Both q p := given q p",
            "kind_differs",
        ),
        (
            f"{BOTH}def swap (p q : Prop) (h : Both p q) : Both q p := And.intro h.right h.left",
            "kind_differs",
        ),
        (f"namespace Mine\n{BOTH}{PROOF}end Mine", "missing"),
        (f"{BOTH}axiom swap (p q : Prop) (h : Both p q) : Both q p", "kind_differs"),
        (
            f"{BOTH}theorem swap.{{u}} (p q : Prop) (h : Both p q) (_ : PUnit.{{u}} = PUnit.unit)"
            " : Both q p := And.intro h.right h.left",
            None,
        ),
    ],
)
async def test_another_statement_is_not(site: Site, code: str, rule: str | None) -> None:
    driver = await site.driver()
    reply = await verify(driver, f"{PRELUDE}{code}\n")
    assert reply.verdict != "accepted"
    if rule is not None:
        assert (reply.verdict, reply.reason) == ("rejected", "statement_differs")
        assert reply.failed
        assert (reply.failed[0].name, reply.failed[0].rule) == ("swap", rule)
        assert rule in get_args(Rule)


@pytest.mark.slow
async def test_axioms_sorries_and_errors_are_what_they_are_in_a_check(site: Site) -> None:
    driver = await site.driver()
    head = PROOF.split(":=")[0]
    for proof, verdict, reason in (
        (f"axiom cheat : False\n{head}:= False.elim cheat", "rejected", "forbidden_axiom"),
        (f"{head}:= sorry", "incomplete", "sorry"),
        (f"set_option warn.sorry false\n{head}:= sorryAx _ false", "incomplete", "sorry"),
        (f"{head}:= nonsense", "rejected", "lean_error"),
        (f"{PROOF}#exit\ntheorem more : False := nonsense", "rejected", "not_read_to_end"),
    ):
        reply = await verify(driver, f"{PRELUDE}{BOTH}{proof}\n")
        assert (reply.verdict, reply.reason) == (verdict, reason), proof


@pytest.mark.slow
async def test_programs_of_a_candidate_matter_nothing(site: Site) -> None:
    driver = await site.driver()
    code = f'{PRELUDE}{BOTH}{PROOF}syntax "another" : term\n'
    assert (await driver.run(Request(op="check", code=code))).verdict == "unverified"
    assert (await verify(driver, code)).verdict == "accepted"


@pytest.mark.slow
async def test_no_theorem_of_a_target_is_left_out_for_its_name(site: Site) -> None:
    driver = await site.driver()
    for name in ("inj", "Both.inj", "_hidden", "match_1", "Both.mk.sizeOf_spec", "eq_def"):
        target = f"{TARGET}theorem {name} (p : Prop) (h : p) : p := sorry\n"
        reply = await verify(driver, f"{PRELUDE}{BOTH}{PROOF}", target)
        assert (reply.verdict, reply.reason) == ("rejected", "statement_differs"), name
        assert reply.failed[0].name == name
        proved = f"{PRELUDE}{BOTH}{PROOF}theorem {name} (p : Prop) (h : p) : p := h\n"
        assert (await verify(driver, proved, target)).verdict == "accepted", name


@pytest.mark.slow
async def test_holes_are_named_by_the_caller(site: Site) -> None:
    driver = await site.driver()
    target = (
        f"{PRELUDE}noncomputable def answer : Nat := sorry\n"
        "theorem right : Eq answer Nat.zero := sorry\n"
    )
    filled = f"{PRELUDE}def answer : Nat := Nat.zero\ntheorem right : Eq answer Nat.zero := rfl\n"
    reply = await verify(driver, filled, target)
    assert (reply.verdict, reply.reason) == ("rejected", "statement_differs")
    assert reply.failed[0].rule == "hole_not_named"
    assert (await verify(driver, filled, target, holes=("answer",))).verdict == "accepted"


@pytest.mark.slow
async def test_a_target_with_nothing_to_prove_is_the_callers_mistake(site: Site) -> None:
    driver = await site.driver()
    whole = f"{PRELUDE}{BOTH}"
    reply = await verify(driver, whole, whole)
    assert (reply.verdict, reply.failed) == (None, ())
    assert "declares no theorem" in (reply.error or "")
    open_ = f"{PRELUDE}noncomputable def answer : Nat := sorry\n"
    filled = f"{PRELUDE}def answer : Nat := 3\n"
    reply = await verify(driver, filled, open_)
    assert "name as holes: answer" in (reply.error or "")
    reply = await verify(driver, filled, open_, holes=("answers",))
    assert "answers is no definition that it leaves open; these are: answer" in (reply.error or "")


@pytest.mark.slow
async def test_holes_alone_are_filled(site: Site) -> None:
    driver = await site.driver()
    target = f"{PRELUDE}noncomputable def answer : Nat := sorry\n"
    for code, verdict, rules in (
        ("def answer : Nat := 3", "accepted", []),
        ("noncomputable def answer : Nat := sorry", "incomplete", []),
        ("def answer : Bool := true", "rejected", ["type_differs"]),
        ("def other : Nat := 3", "rejected", ["missing"]),
        ("theorem answer : True := True.intro", "rejected", ["kind_differs"]),
    ):
        reply = await verify(driver, f"{PRELUDE}{code}\n", target, holes=("answer",))
        assert (reply.verdict, [each.rule for each in reply.failed]) == (verdict, rules), code


@pytest.mark.slow
async def test_a_target_that_does_not_compile_is_the_callers_mistake(site: Site) -> None:
    driver = await site.driver()
    reply = await verify(driver, f"{PRELUDE}{PROOF}", f"{PRELUDE}theorem swap : nonsense := sorry")
    assert reply.verdict is None
    assert "the target does not compile" in (reply.error or "")
    reply = await verify(driver, f"{PRELUDE}{BOTH}{PROOF}", f"{TARGET}#exit\n")
    assert (reply.verdict, reply.reason) == ("rejected", "statement_differs")
    assert reply.failed[0].rule == "target_unread"
    assert "not read the target to its end" in reply.failed[0].text
    missing = await verify(driver, f"{PRELUDE}{PROOF}", "prelude\nimport Nowhere.At.All\n")
    assert missing.verdict is None
    assert "lacks Nowhere.At.All; it has Core" in (missing.error or "")


@pytest.mark.slow
async def test_a_theorem_of_the_environment_is_proved_again(site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "library"
    folder.mkdir()
    source = (
        "prelude\nimport Core\ndef Both (p q : Prop) : Prop := p ∧ q\n"
        "theorem swap (p q : Prop) (h : Both p q) : Both q p := ⟨h.right, h.left⟩\n"
        "theorem both (p : Prop) (h : p) : Both p p := ⟨h, h⟩\n"
    )
    (tmp_path / "Theory.lean").write_text(source)
    compile_text(site.core, tmp_path / "Theory.lean", folder / "Theory.olean")
    environment = with_folders(site.core, (folder, *site.core.search_path))
    driver = await site.driver(environment)
    for theorems, code, failed in (
        (("swap", "both"), source, []),
        (("both",), f"{PRELUDE}{BOTH}theorem both (p : Prop) (h : p) : Both p p := ⟨h, h⟩\n", []),
        (("swap", "both"), f"{PRELUDE}{BOTH}{PROOF}", [("both", "missing")]),
        (
            ("swap",),
            f"{PRELUDE}def Both (p q : Prop) : Prop := q ∧ p\n{PROOF}",
            [("swap", "definition_differs")],
        ),
    ):
        reply = await driver.run(Request(op="verify", code=code, theorems=theorems))
        assert [(each.name, each.rule) for each in reply.failed] == failed
        assert reply.verdict == ("rejected" if failed else "accepted"), reply.messages
    # A text that imports the theorem need not prove it.
    code = "prelude\nimport Theory\ntheorem more (p : Prop) (h : p) : p := h\n"
    reply = await driver.run(Request(op="verify", code=code, theorems=("swap",)))
    assert (reply.verdict, reply.failed[0].rule) == ("rejected", "import_missing")


@pytest.mark.slow
async def test_a_theorem_is_that_of_the_module_that_lean_finds(site: Site, tmp_path: Path) -> None:
    texts = {
        "first/Theory": "theorem one : True := True.intro\n",
        "second/Theory": "theorem one : False := sorry\ntheorem hidden : True := True.intro\n",
        "elsewhere/Part": "theorem linked : True := True.intro\n",
        "second/More": "theorem twice : True := True.intro\n",
        "second/Other": "theorem twice : False := sorry\n",
    }
    for name, text in texts.items():
        path = tmp_path / f"{name}.lean"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"prelude\nimport Core\n{text}")
        compile_text(site.core, path, path.with_suffix(".olean"))
    (tmp_path / "second" / "Linked").symlink_to(tmp_path / "elsewhere")
    folders = (tmp_path / "first", tmp_path / "second", *site.core.search_path)
    driver = await site.driver(with_folders(site.core, folders))
    code = "prelude\nimport Core\ntheorem {} : True := True.intro\n"
    for name, error in (
        ("one", None),
        ("linked", None),
        ("hidden", "no module of the environment 'default' declares hidden"),
        ("twice", "2 modules of the environment 'default' declare twice, such as More and Other; "),
    ):
        request = Request(op="verify", code=code.format(name), theorems=(name,))
        reply = await driver.run(request)
        assert (reply.error or "").startswith(error or ""), reply.error
        assert reply.verdict == (None if error else "accepted"), reply.messages


@pytest.mark.slow
async def test_a_target_of_files_that_changed_is_not_kept(site: Site, tmp_path: Path) -> None:
    """What it states depends on which of two names the library exports."""
    folder = tmp_path / "library"
    folder.mkdir()

    def compile_own(meaning: str) -> None:
        text = "prelude\nimport Core\ndef A.word : Prop := False\ndef B.word : Prop := True\n"
        text += f"export {meaning} (word)\n"
        (tmp_path / "Own.lean").write_text(text)
        compile_text(site.core, tmp_path / "Own.lean", folder / "Own.olean")

    async def verdict(meaning: str) -> str | None:
        def opener() -> Environment:
            return open_environment("own", folder, cache=site.core.cache, environ={})

        compile_own("A")
        opened = [opener()]
        compile_own(meaning)
        # Its first reading is by the files as they were.
        driver = await site.open(lambda: opened.pop() if opened else opener())
        code = "prelude\nimport Own\ntheorem t : B.word := True.intro\n"
        target = "prelude\nimport Own\ntheorem t : word := sorry\n"
        return (await verify(driver, code, target)).verdict

    assert await verdict("B") == "accepted"  # as the files are
    assert await verdict("A") == "rejected"


async def test_theorems_of_the_environment(site: Site) -> None:
    driver = await site.driver()
    code = f"{PRELUDE}{BOTH}{PROOF}"
    request = Request(op="verify", code=code, theorems=("Eq.symm",))
    reply = await driver.run(request)
    assert (reply.verdict, reply.failed[0].name) == ("rejected", "Eq.symm")
    reply = await driver.run(Request(op="verify", code=code, theorems=("no.such",)))
    assert "no module of the environment" in (reply.error or "")


# What a check says of texts that end early


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    ["#exit\ntheorem more : False := nonsense", "#exit", "#exit theorem"],
)
async def test_what_is_not_read_to_its_end_is_not_accepted(either: Site, end: str) -> None:
    driver = await either.one()
    reply = await driver.run(Request(op="check", code=f"{PRELUDE}{BOTH}{PROOF}{end}"))
    assert (reply.verdict, reply.reason) == ("rejected", "not_read_to_end")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        ("", "accepted"),
        ("-- a comment", "accepted"),
        ("namespace Open section variable (n : Nat)", "accepted"),
        ("/- a comment without an end", "rejected"),
        ("/-- of nothing -/", "rejected"),
        ("@[reducible]", "rejected"),
        ("open Nat in", "rejected"),
        ("theorem late : True := by", "rejected"),
        ("theorem late : True :=", "rejected"),
    ],
)
async def test_how_a_text_ends_is_leans_to_judge(site: Site, end: str, verdict: str) -> None:
    driver = await site.driver()
    code = f"{PRELUDE}{BOTH}{PROOF}{end}"
    reply = await driver.run(Request(op="check", code=code))
    assert reply.verdict == verdict
    lines = code.count("\n") + 1
    assert all(message.line <= lines for message in reply.messages)
    assert all("leanqEnd" not in message.text for message in reply.messages)
