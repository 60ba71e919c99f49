"""Examples on a full library: each is judged as Lean has elaborated it."""

from __future__ import annotations

import pytest
from support.lean.libraries import Library, has_modules
from support.lean.sites import Site, check

BY_NAME = """import Lean
set_option warn.sorry false
class Says (n : Lean.Name) where
  says : Prop
instance (priority := low) (n : Lean.Name) : Says n := ⟨True⟩
instance : Says `_example := ⟨False⟩
"""
PROOF = "by first | exact True.intro | exact sorryAx _ false"

CHEATS = {
    "states something else under another name": (
        f"{BY_NAME}\nexample : Says.says decl_name% := {PROOF}\n",
        "unverified statement_differs",
    ),
    "the same behind other words on its line": (
        f"{BY_NAME}open Nat in example : Says.says decl_name% := {PROOF}\n",
        "unverified statement_differs",
    ),
    "states something else on another line": (
        "import Init\nset_option warn.sorry false\nopen Nat in example : (by first\n"
        '  | (have : (unreachable! : Nat) = panicWithPosWithDecl "_stdin" "_example" 4 13\n'
        '       "unreachable code has been reached" := by with_reducible rfl\n'
        "     exact False)\n  | exact True) := by first | trivial | stop trivial\n",
        "unverified statement_differs",
    ),
    "states something else about its own matcher": (
        "import Init\nset_option warn.sorry false\n"
        "example : (∀ n : Nat, (match n with | 0 => True | _ + 1 => True)) → (by first\n"
        "  | (have := @_example.match_1\n     exact False)\n  | exact True) := "
        "by first | exact fun _ => trivial | stop trivial\n",
        "unverified statement_differs",
    ),
    "has a local declaration that it does not use": (
        "import Init\nset_option warn.sorry false\nexample : True := by\n"
        "  let rec t : False := sorryAx _ true\n  exact True.intro\n",
        "incomplete sorry",
    ),
    "is hidden behind another token": (
        "import Init\nset_option warn.sorry false\n#versionexample : False := sorryAx _ false\n"
        "example : True := trivial\n",
        "unverified statement_differs",
    ),
    "has an attribute, though it is right": (
        "import Init\n@[simp] example : (2 : Nat) ∣ 4 := ⟨2, rfl⟩\n",
        "unverified statement_differs",
    ),
    "changes what those behind it state": (
        "import Init\nset_option warn.sorry false\nclass M where\n  says : Prop\n"
        "instance first : M := ⟨False⟩\n\n@[instance] example : M := ⟨True⟩\n"
        f"example : M.says := {PROOF}\n",
        "unverified statement_differs",
    ),
}

HONEST = """import Init
-- an example
example (p : Prop) (h : p) : p := by
  exact h
/-- The second example. -/
example : 1 + 1 = 2 := rfl
theorem my_example (a b : Nat) : a + b = b + a := by omega
example : (2 : Nat) ∣ 4 := ⟨2, rfl⟩
namespace A
variable (x : Nat)

example (h : x > 3) : x ≠ 0 := by
  intro h2
  omega
end A
example (a b : Nat) : a + b = b + a := by simp only [my_example a b]
example : "an example".length = 10 := rfl
"""


@pytest.mark.parametrize("name", CHEATS)
async def test_no_example_is_accepted_without_its_proof(real_site: Site, name: str) -> None:
    code, expected = CHEATS[name]
    reply = await (await real_site.driver()).run(check(code))
    assert f"{reply.verdict} {reply.reason}" == expected, reply.messages


async def test_honest_examples_are_accepted(real_site: Site) -> None:
    reply = await (await real_site.driver()).run(check(HONEST))
    assert reply.verdict == "accepted", reply.messages
    assert [theorem.name for theorem in reply.theorems] == ["my_example"]


PUBLIC = """module
set_option warn.sorry false
public class M (n : Nat) where
  says : Prop
public instance : M 0 := ⟨True⟩
@[instance high, instance_reducible] private def hidden : M 0 := ⟨False⟩
"""


async def test_an_example_may_rest_on_what_a_public_definition_does_not_see(
    library: Library, real_site: Site
) -> None:
    if not has_modules(library.layout):
        pytest.skip("this layout has no files of the module system")
    driver = await real_site.driver()
    stated = f"example : M.says 0 := {PROOF}\n"
    for code, expected in {
        f"{PUBLIC}{stated}": "incomplete sorry",
        f"{PUBLIC}public section\n{stated}end\n": "unverified statement_differs",
        f"{PUBLIC}example (n : Nat) : n + 0 = n := rfl\n": "accepted None",
    }.items():
        reply = await driver.run(check(code))
        assert f"{reply.verdict} {reply.reason}" == expected, (code, reply.messages)
