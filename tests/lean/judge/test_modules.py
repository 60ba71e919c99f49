"""Texts of the module system before the judge, whose imports hide something from them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from support.lean.images import Lean

from leanq.lean.environment import Environment
from leanq.lean.judge.judge_client import Judgement, Judges
from leanq.lean.run.olean import read_parts
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import split_header

LIMITS = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)
ENDING = ("no", "ending")
MODULES = {
    "Base": """module
prelude
set_option genCtorIdx false
public axiom lcErased : Type
public inductive No : Prop
public inductive Bit where | off | on
public inductive Same : {α : Sort u} → α → α → Prop where | refl (a : α) : Same a a
@[expose] public def IsOn (b : Bit) : Prop := Bit.rec (motive := fun _ => Prop) No (Same b b) b
""",
    # What `Uses` hides from those that import it.
    "Hidden": """module
prelude
public import Base
@[expose] public def value : Bit := Bit.off
public theorem fact (b : Bit) : Same b b := Same.refl b
""",
    "Uses": """module
prelude
public import Base
import Hidden
public theorem useful (b : Bit) : Same b b := fact b
public def closed : Bit := value
public theorem closedIs : Same closed Bit.off := Same.refl Bit.off
""",
    # Another meaning for a name that `Hidden` has.
    "Other": """module
prelude
public import Base
@[expose] public def value : Bit := Bit.on
""",
    "Public": """module
prelude
public import Hidden
""",
}


@pytest.fixture(scope="module")
def lean(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Lean:
    made = Lean(core, tmp_path_factory.mktemp("lean"))
    for name, text in MODULES.items():
        made.compile(text, name=name)
    return made


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judges(lean: Lean) -> AsyncIterator[Judges]:
    path = (lean.folder, *lean.environment.search_path)
    made = Judges(replace(lean.environment, search_path=path), slots=2, prints=False)
    yield made
    await made.close()


def parts(lean: Lean, code: str, name: str = "Candidate") -> list[bytes]:
    for each in lean.folder.glob(f"{name}.olean*"):
        each.unlink()
    return read_parts(lean.compile(code, name=name))


async def judged(judges: Judges, lean: Lean, code: str) -> Judgement:
    return await judges.judge(split_header(code), parts(lean, code), ENDING, LIMITS)


def module(imports: str, body: str) -> str:
    return f"module\nprelude\npublic import Base\n{imports}\npublic section\n{body}\n"


async def test_a_hidden_name_is_free(judges: Judges, lean: Lean) -> None:
    for body in (
        "theorem fact (b : Bit) : Same b b := Same.refl b",
        "theorem fact (b c : Bit) (h : Same b c) : Same b c := h",
        "@[expose] def value : Bit := Bit.on\ntheorem on : Same value Bit.on := Same.refl Bit.on",
        "inductive value where | one | two\n"
        "noncomputable def value.other (v : value) : value := value.rec value.two value.one v",
        "theorem mine (b : Bit) : Same b b := useful b",
    ):
        found = await judged(judges, lean, module("import Uses", body))
        assert (found.proved, found.rule, found.unavailable) == (True, "", ""), (body, found.text)


async def test_a_hidden_value_does_not_change_what_a_text_declares(
    judges: Judges, lean: Lean
) -> None:
    """Nothing that the text says of its own constant is said of the hidden one."""
    body = "@[expose] def value : Bit := Bit.on\ntheorem on : IsOn value := Same.refl Bit.on"
    code = module("import Uses", body)
    found = await judged(judges, lean, code)
    assert found.proved
    target = "prelude\nimport Base\nimport Uses\naxiom sorryAx (α : Sort u) (synthetic : Bit) : α\n"
    target += "theorem on : IsOn value := sorryAx _ Bit.off\n"
    found = await verified(judges, lean, code, target)
    assert ("on", "redeclared") in {(name, rule) for name, rule, _ in found.differences}


async def test_no_constant_stands_in_for_an_unsafe_one(judges: Judges, lean: Lean) -> None:
    """The judge's own name for `value` is declared, too, and safe."""
    body = "set_option debug.skipKernelTC true\n@[expose] unsafe def value : Bit := Bit.on\n"
    body += "@[expose] def _candidate.value : Bit := Bit.on\n"
    body += "theorem t : Same value Bit.on := Same.refl value"
    found = await judged(judges, lean, module("import Uses", body))
    assert (found.proved, found.rule) == (False, "kernel_refused")
    assert "t: it uses value, which is unsafe or partial" in found.text


async def verified(judges: Judges, lean: Lean, code: str, target: str) -> Judgement:
    order = {
        "op": "verify",
        "ending": ENDING,
        "target_ending": ("", ""),
        "theorems": [],
        "holes": [],
        "is_whole": False,
        "unfilled": "",
        "allowed": [],
    }
    files = parts(lean, target, "Target"), parts(lean, code)
    return await judges.ask(split_header(code), files, order, LIMITS)


async def test_two_meanings_of_one_name_are_not_judged(judges: Judges, lean: Lean) -> None:
    """A target means `Hidden`'s value, and the candidate sees `Other`'s alone."""
    code = module("import Uses\npublic import Other", "theorem on : IsOn value := Same.refl Bit.on")
    target = "prelude\nimport Base\nimport Uses\naxiom sorryAx (α : Sort u) (synthetic : Bit) : α\n"
    target += "theorem on : IsOn value := sorryAx _ Bit.off\n"
    found = await verified(judges, lean, code, target)
    assert found.differences == ()
    assert not found.proved
    assert found.unavailable


async def test_a_name_that_is_seen_is_not_declared_again(judges: Judges, lean: Lean) -> None:
    body = "@[expose] def value : Bit := Bit.on\ntheorem on : IsOn value := Same.refl Bit.on"
    file = parts(lean, module("import Uses", body))
    for imports in ("import Public", "import Hidden"):
        # The same file, as if it had been compiled from a text with this header.
        code = module(imports, body)
        forged = [part.replace(b"Uses\0\0\0\0", b"Public\0\0") for part in file]
        found = await judges.judge(split_header(code), forged, ENDING, LIMITS)
        assert (found.proved, found.rule) == (False, "kernel_refused")


async def test_a_header_says_whether_a_file_is_a_module(judges: Judges, lean: Lean) -> None:
    body = "theorem mine (b : Bit) : Same b b := useful b"
    code = module("import Uses", body)
    plain = code.removeprefix("module\n")
    found = await judges.judge(split_header(plain), parts(lean, code), ENDING, LIMITS)
    assert (found.proved, found.rule) == (False, "kernel_refused")
    assert "module system" in found.text


async def test_a_file_whose_parts_share_one_root_is_accepted(judges: Judges, lean: Lean) -> None:
    # Its parts are alike, for it declares nothing.
    code = "module\nprelude\npublic import Base\n"
    assert (await judged(judges, lean, code)).proved


async def test_the_modules_hide_a_name(lean: Lean) -> None:
    messages = lean.run(module("import Uses", "theorem t : Same value Bit.off := Same.refl _"))
    assert any("value" in each["data"] for each in messages if each["severity"] == "error")
