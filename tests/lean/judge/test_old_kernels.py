"""The judge's kernel takes nothing of what older kernels took by their known defects.

The Lean at hand has none of these defects, so an honest compiled file is changed into what an older
one would have written. Each defect comes with the release that mended it. No file shows these:

- Counts that overflow (4.33.1): 2^31 references to one object fill 16 GiB.
- Defects of GMP before 6.3.0 (4.33.1): Lean's authors do not say which numbers show them, so Python
  computes what each operation gives for numbers of several words.
- A variable that a `let` lost (4.25): nobody has found a text that proves something false by it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from support.lean.images import Image as Writer
from support.lean.other_lean import compile_module, open_other, other_lean

from leanq.lean.judge.judge_client import Judgement, Judges
from leanq.lean.run import layouts
from leanq.lean.run.image import Image, Name
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import split_header

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LIMITS = Limits(cpu_s=60.0, wall_s=300.0, memory_bytes=2 << 30)
HEADER_BYTES = 88


class Edited(Writer):
    """A compiled file with some words changed, and with objects behind its own."""

    def __init__(self, data: bytes) -> None:
        self.BASE = int.from_bytes(data[HEADER_BYTES - 8 : HEADER_BYTES], "little")
        self.data = bytearray(data)
        self.image = Image([data])
        self.constants = self.image.constants()

    def put_word(self, index: int, word: int) -> None:
        self.data[8 * index : 8 * index + 8] = word.to_bytes(8, "little")

    def part(self, address: int, field: int) -> int:
        """The address in a field of an object, from 1."""
        return self.image.words[self.image.index(address) + field]

    def type_of(self, name: str) -> int:
        return self.constants[tuple(name.split("."))].type_

    def restate(self, name: str, type_: int) -> None:
        self.put_word(self.constants[tuple(name.split("."))].head + 3, type_)

    def reprove(self, name: str, value: int) -> None:
        self.put_word(self.constants[tuple(name.split("."))].value + 2, value)

    def changed(self, address: int, field: int, part: int) -> int:
        """A copy of an object, with another address in a field, from 1."""
        index = self.image.index(address)
        word = self.image.words[index]
        fields = word >> 48 & 0xFF
        parts = [*self.image.words[index + 1 : index + (word >> 35 & 0x1FFF)]]
        parts[field - 1] = part
        scalars = b"".join(each.to_bytes(8, "little") for each in parts[fields:])
        return self.object(word >> 56, *parts[:fields], scalars=scalars)

    def rename(self, was: Name, becomes: Name) -> None:
        """Has all expressions that name one constant name another."""
        new = self.name(*becomes)
        for raw in self.constants.values():
            for each in self.image.walk(*raw.parts).addresses:
                index = self.image.index(each)
                is_const = self.image.words[index] >> 48 == layouts.CONST
                if is_const and self.image.name(self.image.words[index + 1]) == was:
                    self.put_word(index + 1, new)


def phantom_parameter(file: Edited) -> None:
    """4.32.2: a parameter of a nested type that no constructor uses was not checked."""
    file.rename(("Nat", "zero"), ("True", "intro"))


def prop_in_disguise(file: Edited) -> None:
    """4.33: `Sort (imax 1 0)` was taken for no proposition, so two proofs could be told apart."""
    one = file.object(1, 1, scalars=bytes(8))
    file.restate("Two", file.object(3, file.object(3, one, 1, scalars=bytes(8)), scalars=bytes(8)))


def power_of_a_variable(file: Edited) -> None:
    """4.20: `Nat.pow` read what is no literal as a number."""
    file.restate("t", file.type_of("wanted"))


def claimed_to_be_closed(file: Edited) -> None:
    """4.21: what a file says of its own expressions was believed."""
    [value] = [raw.body for name, raw in file.constants.items() if name == ("t",)]
    assert value is not None
    inner = file.part(value, 3)
    file.put_word(file.image.index(inner) + 2, 0)  # no loose variable, says its data
    file.restate("t", file.type_of("wanted"))
    file.reprove("t", inner)


def free_variable(file: Edited) -> None:
    """4.32.1: values of opaque constants could have free variables."""
    file.reprove("o", file.object(1, file.name("x"), scalars=bytes(8)))


def free_variable_in_a_proof(file: Edited) -> None:
    """4.33: so could others."""
    file.restate("t", file.type_of("wanted"))
    file.reprove("t", file.object(1, file.name("x"), scalars=bytes(8)))


def meta_variable_in_a_proof(file: Edited) -> None:
    file.restate("t", file.type_of("wanted"))
    file.reprove("t", file.object(2, file.name("x"), scalars=bytes(8)))


def partial_without_its_mark(file: Edited) -> None:
    """4.33: a definition that need not end had lost its mark."""
    value = file.constants["bad",].value
    assert file.image.scalar(value, 0) == 0
    file.data[8 * value + 8 * 5] = 1


def reserved_prefix(file: Edited) -> None:
    """4.33: types could have the names that the kernel gives to nested ones."""
    assert file.data.count(b"anested\0") == 1
    at = file.data.index(b"anested\0")
    file.data[at : at + 1] = b"_"


def other_parameter(file: Edited) -> None:
    """4.33.1: a type could stand within itself with other parameters than its own."""
    type_ = file.type_of("T.node")
    field = file.part(type_, 3)
    list_of, own = (file.part(file.part(field, 2), each) for each in (1, 2))
    zero = file.const(file.name("Nat", "zero"))
    inner = file.app(list_of, file.app(file.part(own, 1), zero))
    file.restate("T.node", file.changed(type_, 3, file.changed(field, 2, inner)))


def projection_of_another_structure(file: Edited) -> None:
    """4.33: a part was taken by its number, whatever the structure's name."""
    value = file.constants["Left", "n"].body
    assert value is not None
    part = file.changed(file.part(value, 3), 1, file.name("Right"))
    file.reprove("Left.n", file.changed(value, 3, part))


def order_of_questions(file: Edited) -> None:
    """4.33.1: `a = b` and `b = c`, once found, made the kernel take `a = c`, which it denies."""
    file.restate("t", file.type_of("wanted"))


def stuck_sort(file: Edited) -> None:
    """4.33.1: a type whose sort does not reduce was taken for no proposition."""
    file.restate("Owner", file.type_of("wanted"))
    part = file.object(11, file.name("Owner"), 1, file.object(0, 1, scalars=bytes(8)))
    lambdas = [file.constants["seen",].body]
    for _ in range(2):
        lambdas.append(file.part(lambdas[-1] or 0, 3))
    for each in reversed(lambdas):
        part = file.changed(each or 0, 3, part)
    file.reprove("seen", part)


def no_proposition(file: Edited) -> None:
    """A theorem's type has to be a proposition: proofs are equal, and numbers are not."""
    file.restate("t", file.constants["number",].type_)
    number = file.constants["number",].body
    assert number is not None
    file.reprove("t", number)


Edit = Callable[[Edited], None]
Judge = Callable[[str, Edit | None], Awaitable[Judgement]]

PHANTOM = """inductive Phantom (A : Type) (n : Nat) : Type where | mk : A → Phantom A n
inductive T where | leaf | node : Phantom T Nat.zero → T
"""
TWO = "inductive Two : Type where | a | b\n"
POWER = """theorem t (n : Nat) : Eq (Nat.pow 2 n) (Nat.pow 2 n) := Eq.refl (Nat.pow 2 n)
axiom wanted (n : Nat) : Eq (Nat.pow 2 n) Nat.zero
"""
SELF = "theorem t : True → True := fun h => h\naxiom wanted : False\n"
OPAQUE = "opaque o : Nat := Nat.zero\n"
UNSAFE = "unsafe def bad : False := bad\n"
NESTED = "inductive anested.T where | leaf | node : List anested.T → anested.T\n"
UNIFORM = "inductive T (n : Nat) where | leaf | node : List (T n) → T n\n"
STRUCTURES = "structure Left where n : Nat\nstructure Right where n : Nat\n"
NUMBER = "def number : Nat := Nat.zero\ntheorem t : True := True.intro\n"

# Three values of which the kernel finds the first two equal, and the last two, by equal proofs; but
# not the first and the last, whose proofs prove different things.
REACH = """inductive Reach : Nat → Prop where
  | intro (n : Nat) (h : (m : Nat) → Nat.lt m n → Reach m) : Reach n
theorem Reach.inv {n m : Nat} (h : Reach n) : Nat.lt m n → Reach m :=
  Reach.rec (motive := fun n _ => Nat.lt m n → Reach m) (fun _ g _ lt => g m lt) h
noncomputable def run (n : Nat) (h : Reach n) : Bool :=
  Reach.rec (motive := fun _ _ => Bool) (fun m _ ih =>
    Nat.rec (motive := fun m => ((k : Nat) → Nat.lt k m → Bool) → Bool)
      (fun _ => false) (fun k _ ih => ih k Nat.le.refl) m ih) h
"""
WITH = "(h : Reach (Nat.succ Nat.zero))"
A = "run (Nat.succ Nat.zero) h"
B = "run (Nat.succ Nat.zero) (Reach.intro (Nat.succ Nat.zero) fun _ lt => h.inv lt)"
C = "run Nat.zero (h.inv Nat.le.refl)"
ORDER = f"""{REACH}
theorem t {WITH} : And ({A} = {B}) (And ({B} = {C}) ({A} = {A})) :=
  And.intro (Eq.refl ({A})) (And.intro (Eq.refl ({B})) (Eq.refl ({A})))
axiom wanted {WITH} : And ({A} = {B}) (And ({B} = {C}) ((fun x => x) ({A}) = {C}))
"""
STUCK = f"""{REACH}
noncomputable def gate {WITH} (e : {A} = {B}) : Type :=
  Eq.rec (motive := fun _ _ => Type) Prop e
inductive Owner {WITH} (e : {A} = {B}) : Prop where | mk (bit : Bool) : Owner h e
def Owned {WITH} (e : {A} = {B}) : Prop := Owner h e
def seen {WITH} (e : {A} = {C}) (_ : Owned h e) : Bool := false
axiom wanted {WITH} (e : {A} = {B}) : gate h e
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judged(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Judge]:
    folder = tmp_path_factory.mktemp("old")
    lean = other_lean(folder / "toolchain")
    judges = Judges(open_other(lean, folder / "cache"), slots=1, prints=False)

    async def judge(code: str, edit: Edit | None) -> Judgement:
        file = compile_module(lean, "T", code, folder).read_bytes()
        if edit is not None:
            edited = Edited(file)
            edit(edited)
            file = bytes(edited.data)
        return await judges.judge(split_header(code), [file], ("", ""), LIMITS)

    yield judge
    await judges.close()


@pytest.mark.parametrize(
    ("edit", "code", "words"),
    [
        (phantom_parameter, PHANTOM, "application type mismatch"),
        (prop_in_disguise, TWO, "universe levels parameters for 'Two.rec', #0 expected"),
        (power_of_a_variable, POWER, "type mismatch"),
        (claimed_to_be_closed, SELF, "does not support loose bound variables"),
        (free_variable, OPAQUE, "a free or meta variable"),
        (free_variable_in_a_proof, SELF, "a free or meta variable"),
        (meta_variable_in_a_proof, SELF, "a free or meta variable"),
        (partial_without_its_mark, UNSAFE, "unknown constant"),
        (reserved_prefix, NESTED, "_nested"),
        (other_parameter, UNIFORM, "must be applied to the parameters"),
        (projection_of_another_structure, STRUCTURES, "invalid projection"),
        (order_of_questions, ORDER, "declaration type mismatch, 't'"),
        (stuck_sort, STUCK, "type expected"),
        (no_proposition, NUMBER, "not a proposition"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_what_only_an_old_kernel_takes_is_not_proved(
    judged: Judge, edit: Edit, code: str, words: str
) -> None:
    honest = await judged(code, None)
    assert (honest.proved, honest.kernel) == (True, "4.35.0"), honest
    found = await judged(code, edit)
    assert not found.proved
    assert words in found.disagrees + found.text


BIT = 1 << 64  # the lowest of a number's second word
X, Y, Z = (1 << 192) - BIT + 7, (1 << 128) - 1, (1 << 130) + BIT + 1
LARGE = {
    "add": (X, Y, X + Y),
    "sub": (X, Y, X - Y),
    "mul": (X, Y, X * Y),
    "pow": (Y, 7, Y**7),
    "gcd": (6 * Z, 35 * Z, Z),
    "mod": (X * Y + Z, X, Z),
    "div": (X * Z + X - 1, X, Z),
    "land": (X, Z + 8, Z),
    "lor": (X, Z + 8, X | (Z + 8)),
    "xor": (X, Z, X ^ Z),
    "shiftLeft": (Y, 67, Y << 67),
    "shiftRight": (X, 61, X >> 61),
}


async def test_numbers_of_several_words_are_those_that_python_computes(judged: Judge) -> None:
    def words(number: int) -> bytes:
        return number.to_bytes(8 * -(-number.bit_length() // 64), "little")

    def theorem(operation: str) -> str:
        x, y, found = (f"(nat_lit {each})" for each in LARGE[operation])
        return f"theorem of_{operation} : Eq (Nat.{operation} {x} {y}) {found} := Eq.refl {found}\n"

    for operation, (_, _, found) in LARGE.items():
        honest = await judged(theorem(operation), None)
        assert (honest.proved, honest.kernel) == (True, "4.35.0"), honest

        def flip(file: Edited, found: int = found) -> None:
            assert file.data.count(words(found)) == 1
            at = file.data.index(words(found))
            file.data[at : at + len(words(found))] = words(found ^ BIT)

        wrong = await judged(theorem(operation), flip)
        assert not wrong.proved
        assert f"type mismatch, 'of_{operation}'" in wrong.disagrees
