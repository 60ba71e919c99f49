"""The names that the kernel knows, and whether a library means by them what the kernel does.

The kernel computes with these names and never looks at their definitions, so a wrong one proves
anything. Before an environment of another Lean is judged, each name has to mean what the judge's
kernel takes for granted. Data types are made by the kernel itself, in an empty environment, and
have to equal the library's. Functions are held to their defining equations. The kernel has to
prove these on variables, where its own arithmetic cannot help; by induction they determine each
value. No version is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from leanq.lean.judge.kernel import Kernel, KernelLimitError, RefusedError
from leanq.lean.run.image import Name

_KERNEL_NAMES = """
Nat Nat.zero Nat.succ Nat.add Nat.sub Nat.mul Nat.pow Nat.gcd Nat.div Nat.mod Nat.beq Nat.ble
Nat.land Nat.lor Nat.xor Nat.shiftLeft Nat.shiftRight Nat.log2 Nat.testBit
Bool Bool.true Bool.false String String.ofList String.mk Char Char.ofNat List List.nil List.cons
Quot Quot.mk Quot.lift Quot.ind Eq Eq.refl
eagerReduce dontcare reduceBool reduceNat Lean.reduceBool Lean.reduceNat
"""
KERNEL_NAMES: frozenset[Name] = frozenset(tuple(name.split(".")) for name in _KERNEL_NAMES.split())
"""Names that some kernel computes with, or takes to mean something."""

# The equations of each function: variables, hypotheses behind `|`, two sides, and a proof; without
# one, both sides are the same by computation. Variables are natural numbers. `ZERO` takes one and
# gives zero, since the kernel's arithmetic helps wherever no variable stands. A function has one
# block for each way in which a library may state the equations, and one block has to hold.
_EQUATIONS = """
Nat.pred
  : Nat.pred Nat.zero = Nat.zero
  n : Nat.pred (Nat.succ n) = n
Nat.add
  n : Nat.add n Nat.zero = n
  n m : Nat.add n (Nat.succ m) = Nat.succ (Nat.add n m)
Nat.sub
  n : Nat.sub n Nat.zero = n
  n m : Nat.sub n (Nat.succ m) = Nat.pred (Nat.sub n m)
Nat.mul
  n : Nat.mul n Nat.zero = Nat.zero
  n m : Nat.mul n (Nat.succ m) = Nat.add (Nat.mul n m) n
Nat.pow
  n : Nat.pow n Nat.zero = Nat.succ Nat.zero
  n m : Nat.pow n (Nat.succ m) = Nat.mul (Nat.pow n m) n
Nat.beq
  n : Nat.beq (ZERO n) (ZERO n) = Bool.true
  m : Nat.beq Nat.zero (Nat.succ m) = Bool.false
  n : Nat.beq (Nat.succ n) Nat.zero = Bool.false
  n m : Nat.beq (Nat.succ n) (Nat.succ m) = Nat.beq n m
Nat.ble
  n : Nat.ble (ZERO n) (ZERO n) = Bool.true
  m : Nat.ble Nat.zero (Nat.succ m) = Bool.true
  n : Nat.ble (Nat.succ n) Nat.zero = Bool.false
  n m : Nat.ble (Nat.succ n) (Nat.succ m) = Nat.ble n m
Nat.div
  n : Nat.div n Nat.zero = Nat.zero := Nat.div_zero n
  n m | Nat.ble (Nat.succ n) (Nat.succ m) = Bool.true : Nat.div n (Nat.succ m) = Nat.zero
    := Nat.div_eq_of_lt n (Nat.succ m) (Nat.le_of_ble_eq_true (Nat.succ n) (Nat.succ m) h)
  n m : Nat.div (Nat.add n (Nat.succ m)) (Nat.succ m) = Nat.succ (Nat.div n (Nat.succ m))
    := Nat.add_div_right n (Nat.succ m) (Nat.succ_pos m)
Nat.mod
  n : Nat.mod n Nat.zero = n := Nat.mod_zero n
  n m | Nat.ble (Nat.succ n) (Nat.succ m) = Bool.true : Nat.mod n (Nat.succ m) = n
    := Nat.mod_eq_of_lt n (Nat.succ m) (Nat.le_of_ble_eq_true (Nat.succ n) (Nat.succ m) h)
  n m : Nat.mod (Nat.add n (Nat.succ m)) (Nat.succ m) = Nat.mod n (Nat.succ m)
    := Nat.add_mod_right n (Nat.succ m)
Nat.gcd
  n : Nat.gcd Nat.zero n = n := Nat.gcd_zero_left n
  n m : Nat.gcd (Nat.succ n) m = Nat.gcd (Nat.mod m (Nat.succ n)) (Nat.succ n) := Nat.gcd_succ n m
Nat.shiftLeft
  n : Nat.shiftLeft n Nat.zero = n
  n m : Nat.shiftLeft n (Nat.succ m) = Nat.shiftLeft (Nat.mul 2 n) m
Nat.shiftLeft
  n : Nat.shiftLeft n Nat.zero = n
  n m : Nat.shiftLeft n (Nat.succ m) = Nat.mul 2 (Nat.shiftLeft n m) := Nat.shiftLeft_succ n m
Nat.shiftRight
  n : Nat.shiftRight n Nat.zero = n
  n m : Nat.shiftRight n (Nat.succ m) = Nat.div (Nat.shiftRight n m) 2
Nat.testBit F in Nat.testBit_succ Nat.testBit_add_one
  n | Nat.beq (Nat.mod n 2) 1 = Bool.true : Nat.testBit n Nat.zero = Bool.true
    := Eq.trans Bool (Nat.testBit n Nat.zero)
         (Decidable.decide (Eq Nat (Nat.mod n 2) 1) (instDecidableEqNat (Nat.mod n 2) 1)) Bool.true
         (Nat.testBit_zero n) (decide_eq_true (Eq Nat (Nat.mod n 2) 1)
           (instDecidableEqNat (Nat.mod n 2) 1) (Nat.eq_of_beq_eq_true (Nat.mod n 2) 1 h))
  n | Nat.beq (Nat.mod n 2) 1 = Bool.false : Nat.testBit n Nat.zero = Bool.false
    := Eq.trans Bool (Nat.testBit n Nat.zero)
         (Decidable.decide (Eq Nat (Nat.mod n 2) 1) (instDecidableEqNat (Nat.mod n 2) 1)) Bool.false
         (Nat.testBit_zero n) (decide_eq_false (Eq Nat (Nat.mod n 2) 1)
           (instDecidableEqNat (Nat.mod n 2) 1) (Nat.ne_of_beq_eq_false (Nat.mod n 2) 1 h))
  n m : Nat.testBit n (Nat.succ m) = Nat.testBit (Nat.div n 2) m := F n m
Nat.land F in Bool.and and
  n m i : Nat.testBit (Nat.land n m) i = F (Nat.testBit n i) (Nat.testBit m i)
    := Nat.testBit_and n m i
  : F Bool.true Bool.true = Bool.true
  : F Bool.true Bool.false = Bool.false
  : F Bool.false Bool.true = Bool.false
  : F Bool.false Bool.false = Bool.false
Nat.lor F in Bool.or or
  n m i : Nat.testBit (Nat.lor n m) i = F (Nat.testBit n i) (Nat.testBit m i)
    := Nat.testBit_or n m i
  : F Bool.true Bool.true = Bool.true
  : F Bool.true Bool.false = Bool.true
  : F Bool.false Bool.true = Bool.true
  : F Bool.false Bool.false = Bool.false
Nat.xor F in Bool.xor xor
  n m i : Nat.testBit (Nat.xor n m) i = F (Nat.testBit n i) (Nat.testBit m i)
    := Nat.testBit_xor n m i
  : F Bool.true Bool.true = Bool.false
  : F Bool.true Bool.false = Bool.true
  : F Bool.false Bool.true = Bool.true
  : F Bool.false Bool.false = Bool.false
"""
# A function that has such a type can stand for a literal's parts, whatever it does.
_FUNCTIONS = {"Char.ofNat": ("Nat", "Char"), "String.ofList": ("List Char", "String")}
# The library has to declare what the kernel makes of these declarations.
_MADE = {
    "Eq": "Eq Eq.refl Eq.rec",
    "Quot": "Quot Quot.mk Quot.lift Quot.ind",
    "Nat": "Nat Nat.zero Nat.succ Nat.rec",
    "Bool": "Bool Bool.false Bool.true Bool.rec",
    "List": "List List.nil List.cons List.rec",
}
QUOT_DECL = 4 << 1 | 1
"""The `Declaration` of the quotients."""

COMPARED = len(
    {name for made in _MADE.values() for name in made.split()}
    | {*_FUNCTIONS, "String"}
    | {*re.findall(r"^Nat\.\w+", _EQUATIONS, re.MULTILINE)}
)
"""How many names :func:`unsettled` looks at."""

_PROBE = "_leanq_probe"
_TESTS = frozenset({"Nat.beq", "Nat.ble", "Nat.testBit"})
_TOKEN = re.compile(r"[()]|[^\s()]+")
_LEVELS = {"Eq": 1, "Eq.refl": 1, "Eq.trans": 1, "List": 0}
_EXPLICIT, _SAFE = 0, 1
_OPAQUE = 1  # the boxed 0


class _Equation(NamedTuple):
    """One line of `_EQUATIONS`."""

    variables: tuple[str, ...]
    hypothesis: str
    left: str
    right: str
    proof: str


def unsettled(kernel: Kernel) -> dict[str, str]:
    """Returns the names that may mean something else in the kernel's environment, and why.

    A name that the environment does not have means nothing there.
    """
    found: dict[str, str] = {}
    library = kernel.env
    for name in _MADE:
        if why := _differs(kernel, name):
            found[name] = why
    # Any text in quotes is a String to the kernel, so an empty type would be inhabited.
    if _is_there(kernel, "String") and not _is_there(kernel, "String.ofList"):
        found["String"] = "the library has no String.ofList, which makes one of its characters"
    prover = _Prover(kernel)
    for name, (taken, given) in _FUNCTIONS.items():
        if _is_there(kernel, name) and (why := prover.has_type(name, taken, given)):
            found[name] = why
    for function, ways in _blocks().items():
        if _is_there(kernel, function):
            whys = [prover.fails(way) for way in ways]
            if all(whys):
                found[function] = whys[0]
    kernel.env = library
    return found


def _is_there(kernel: Kernel, name: str) -> bool:
    return kernel.declares(kernel.env, kernel.name(name.split(".")))


def _blocks() -> dict[str, list[list[_Equation]]]:
    """Returns the ways to state each function's equations."""
    found: dict[str, list[list[_Equation]]] = {}
    for block in re.split(r"\n(?=\S)", _EQUATIONS.strip("\n")):
        head, _, body = block.partition("\n")
        name, _, choices = head.partition(" F in ")
        lines = re.split(r"\n  (?=\S)", "\n" + body)[1:]
        found.setdefault(name, []).extend(
            [_equation(re.sub(r"\bF\b", choice, line)) for line in lines]
            for choice in choices.split() or ["F"]
        )
    return found


def _equation(line: str) -> _Equation:
    statement, _, proof = " ".join(line.split()).partition(" := ")
    binders, _, equation = f" {statement}".partition(" : ")
    variables, _, hypothesis = binders.partition("|")
    left, _, right = equation.partition(" = ")
    return _Equation(tuple(variables.split()), hypothesis.strip(), left, right, proof)


def _differs(kernel: Kernel, name: str) -> str:
    """Returns how a data type of the library differs from the kernel's own, or ""."""
    # The kernel looks at the name of each part alone, whatever else is there.
    if not any(_is_there(kernel, part) for part in _MADE[name].split()):
        return "the library has no such type" if name in ("Eq", "Nat", "Bool") else ""
    library = kernel.env
    terms = _Terms(kernel)
    needs = ("Eq", "Quot") if name == "Quot" else (name,)
    levels = {}
    for each in needs:
        if not _is_there(kernel, each):
            return f"the library has only a part of it, without {each}"
        if each in ("Eq", "List"):
            [level] = kernel.items(kernel.levels_in(kernel.find(kernel.name([each]))))
            levels[each] = kernel.read_name(level)
    try:
        kernel.import_header([], [])
        for each in needs:
            kernel.add(terms.declaration(each, levels))
        made: list[Name] = [tuple(each.split(".")) for each in _MADE[name].split()]
        own = {each: kernel.find(kernel.name(each)) for each in made}
    except RefusedError as error:
        return f"the kernel makes no such type: {error}"
    finally:
        kernel.env = library
    for part, info in own.items():
        if not kernel.has(kernel.name(part), info):
            return f"the library's {'.'.join(map(str, part))} is another one than the kernel makes"
    return ""


class _Terms:
    """Expressions by a short notation; each is made anew wherever it stands."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def read(self, text: str, scope: Sequence[str]) -> int:
        """Returns an application of constants, numbers, and the variables of a scope."""
        return self._application(iter(_TOKEN.findall(text)), scope)

    def binders(self, kinds: Sequence[int], body: int, *, is_type: bool) -> int:
        """Returns a body behind binders of these types."""
        make = self._kernel.forall if is_type else self._kernel.lam
        for kind in reversed(kinds):
            body = make(self._kernel.name(["x"]), kind, body, _EXPLICIT)
        return int(body)

    def declaration(self, name: str, levels: Mapping[str, tuple[str | int, ...]]) -> int:
        """Returns the declaration of a data type, as it stands in every version of Lean."""
        kernel = self._kernel
        if name == "Quot":
            return QUOT_DECL
        parameters = [levels[name]] if name in levels else []

        def sort(successors: int) -> int:
            level = kernel.level_param(kernel.name(parameters[0]))
            return int(kernel.sort(kernel.level_succ(level) if successors else level))

        def own(*variables: int) -> int:
            of = kernel.list([kernel.level_param(kernel.name(each)) for each in parameters])
            made = kernel.const(kernel.name([name]), of)
            for each in variables:
                made = kernel.app(made, self._variable(each))
            return int(made)

        var, pi = self._variable, partial(self.binders, is_type=True)
        constructors: dict[str, int]
        match name:
            case "Eq":
                count = 2
                type_ = pi([sort(0), var(0), var(1)], self._sort(0))
                constructors = {"refl": pi([sort(0), var(0)], own(1, 0, 0))}
            case "List":
                count = 1
                type_ = pi([sort(1)], sort(1))
                constructors = {
                    "nil": pi([sort(1)], own(0)),
                    "cons": pi([sort(1), var(0), own(1)], own(2)),
                }
            case "Nat":
                count, type_ = 0, self._sort(1)
                constructors = {"zero": own(), "succ": pi([own()], own())}
            case _:
                count, type_ = 0, self._sort(1)
                constructors = {"false": own(), "true": own()}
        made = [
            kernel.construct(0, kernel.name([name, each]), of) for each, of in constructors.items()
        ]
        block = kernel.construct(0, kernel.name([name]), type_, kernel.list(made))
        names = kernel.list([kernel.name(each) for each in parameters])
        return int(kernel.inductive_decl(names, kernel.nat(count), kernel.list([block]), 0))

    def _variable(self, number: int) -> int:
        return int(self._kernel.bvar(self._kernel.nat(number)))

    def _sort(self, number: int) -> int:
        return int(self._kernel.sort(self._level(number)))

    def _level(self, number: int) -> int:
        level = self._kernel.level_zero(1)
        return int(self._kernel.level_succ(level) if number else level)

    def _application(self, tokens: Iterator[str], scope: Sequence[str]) -> int:
        made = 0
        for token in tokens:
            if token == ")":
                break
            part = self._application(tokens, scope) if token == "(" else self._atom(token, scope)
            made = int(self._kernel.app(made, part)) if made else part
        return made

    def _atom(self, token: str, scope: Sequence[str]) -> int:
        kernel = self._kernel
        if token in scope:
            return self._variable(len(scope) - 1 - [*scope].index(token))
        if token.isdecimal():
            return int(kernel.lit(kernel.construct(0, kernel.nat(int(token)))))
        if token == "ZERO":
            number, zero = self._atom("Nat", ()), self._atom("Nat.zero", ())
            return self.binders([number], zero, is_type=False)
        levels = [self._level(_LEVELS[token])] if token in _LEVELS else []
        return int(kernel.const(kernel.name(token.split(".")), kernel.list(levels)))


class _Prover:
    """Has the kernel prove equations in its environment."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._terms = kernel, _Terms(kernel)
        self._env = kernel.env  # the kernel frees the environment of a declaration that it refuses

    def fails(self, equations: Sequence[_Equation]) -> str:
        """Returns why one of the equations is not proved, or ""."""
        for each in equations:
            if why := self._refused(each):
                return f"not proved of it: {each.left} = {each.right}: {why}"
        return ""

    def has_type(self, name: str, taken: str, given: str) -> str:
        """Returns why a constant is no function between these types, or ""."""
        read = self._terms.read
        type_ = self._terms.binders([read(taken, ())], read(given, ("x",)), is_type=True)
        why = self._declined(type_, read(name, ()), is_theorem=False)
        return why and f"no function from {taken} to {given}: {why}"

    def _refused(self, equation: _Equation) -> str:
        terms, scope = self._terms, equation.variables
        is_test = equation.left.split()[0] in _TESTS or equation.right.startswith("Bool.")
        kind = "Bool" if is_test else "Nat"
        kinds = [terms.read("Nat", ()) for _ in scope]
        inner = scope
        if equation.hypothesis:
            left, _, right = equation.hypothesis.partition(" = ")
            kinds.append(terms.read(f"Eq Bool ({left}) ({right})", scope))
            inner = (*scope, "h")
        statement = terms.read(f"Eq {kind} ({equation.left}) ({equation.right})", inner)
        proof = terms.read(equation.proof or f"Eq.refl {kind} ({equation.left})", inner)
        type_ = terms.binders(kinds, statement, is_type=True)
        return self._declined(type_, terms.binders(kinds, proof, is_type=False), is_theorem=True)

    def _declined(self, type_: int, value: int, *, is_theorem: bool) -> str:
        """Returns why the kernel does not take a declaration of this type and value, or ""."""
        kernel = self._kernel
        kernel.env = self._env
        name, all_ = kernel.name([_PROBE]), kernel.list([kernel.name([_PROBE])])
        head = (name, kernel.list([]), type_, value)
        if is_theorem:
            tag, made = 2, kernel.theorem_val(*head, all_)
        else:
            tag, made = 1, kernel.definition_val(*head, _OPAQUE, _SAFE, all_)
        try:
            kernel.add(kernel.construct(tag, made))
        except (RefusedError, KernelLimitError) as error:
            return " ".join(str(error).split())[:300] or "refused"
        return ""
