"""The soak of the judge: damaged and forged compiled files, by chance and by a seed.

No file may kill a process of the judge's or one of its forks. A second reader of the format and a
second kernel explain each file that is accepted: it says what the honest file says, or less of it,
or the second kernel confirms its other constants.
``make soak-judge`` judges 10,000 files, the tests a fiftieth.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from support.lean.images import Lean
from support.lean.mutations import MUTATIONS, Sample, mutated
from support.lean.second_kernel import SecondKernel
from support.lean.second_reader import SecondReader, Tree, Trees
from support.lean.trees import PRELUDE, TREES

from leanq.lean.environment import Environment, open_environment
from leanq.lean.judge.declarations import Ended
from leanq.lean.judge.judge_client import Judgement, Judges
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import split_header

_AT_ONCE, _SLOTS = 2, 4  # so that the processes of both headers stay
_TENANTS = ("alice", "alice", "bob")
_LIMITS = Limits(cpu_s=10.0, wall_s=120.0, memory_bytes=1 << 30)
TEXTS = {
    "trees": f"""{PRELUDE}
{TREES}theorem late (p : Prop) (h : p) : p := h
theorem later (p : Prop) (h : p) : p := late p h
theorem mirrored : Eq (Tree.mirror (Tree.leaf : Tree Nat)) Tree.leaf := Eq.refl _
""",
    "numbers": f"""{PRELUDE}
theorem small : Eq (Nat.add 2 2) 4 := rfl
theorem large : Eq (Nat.mul 36893488147419103232 3) 110680464442257309696 := rfl
theorem text : Eq "ab" "ab" := rfl
theorem minus : Eq (Nat.sub 20000000000000000000000 1) 19999999999999999999999 := rfl
def twice (n : Nat) : Nat := let m := Nat.add n n; Nat.add m 0
theorem apart (n : Nat) : Eq (twice n) (Nat.add (Nat.add n n) 0) := rfl
opaque hidden : Nat := 12345678901234567890123
unsafe def odd : Nat := odd
""",
    "levels": f"""{PRELUDE}
universe u v
inductive Vec (α : Type u) : Type u where | nil : Vec α | cons (head : α) (tail : Vec α) : Vec α
mutual
inductive Even : Type where | zero : Even | next : Odd → Even
inductive Odd : Type where | next : Even → Odd
end
structure Pair (α : Type u) (β : Type v) : Type (max u v) where
  one : α
  two : β
def flip {{α : Type u}} {{β : Type v}} (p : Pair α β) : Pair β α := Pair.mk p.2 p.1
theorem back {{α : Type u}} {{β : Type v}} (p : Pair α β) : Eq (flip (flip p)) p := rfl
theorem imax (α : Sort u) (p : α → Prop) (h : (a : α) → p a) : (a : α) → p a := h
""",
    "alone": """prelude
set_option genCtorIdx false
inductive Own.False : Prop
inductive Own.Eq {α : Sort u} (a : α) : α → Prop where | refl : Own.Eq a a
theorem symm {α : Sort u} {a b : α} (h : Own.Eq a b) : Own.Eq b a :=
  Own.Eq.rec (motive := fun x _ => Own.Eq x a) Own.Eq.refl h
theorem none (p : Prop) (h : Own.False) : p := Own.False.rec (fun _ => p) h
theorem same (p : Prop) (h : p) : p := h
theorem also (p : Prop) (h : p) : p := same p h
""",
}


@dataclass
class Tally:
    """What became of the files.

    Attributes:
        outcomes: by kind of change and outcome.
        wrong: what must not be: deaths, and acceptances that nothing explains.
    """

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    def total(self) -> Counter[str]:
        """By outcome alone."""
        return sum(self.outcomes.values(), Counter[str]())


class Explainer:
    """Why a changed file may be accepted, by a reader and a kernel that are not leanq's."""

    def __init__(self, sample: Sample, imported: bytes) -> None:
        sys.setrecursionlimit(20_000)
        self._trees = Trees()
        self._sample = sample
        self._honest = SecondReader(sample.data, self._trees).constants()
        is_alone = "import" not in sample.header
        self._imported = {} if is_alone else SecondReader(imported, self._trees).constants()

    def confirm(self, constants: Mapping[Tree, Tree], names: Collection[Tree]) -> None:
        """Raises `UnconfirmedError` unless these are proved."""
        kernel = SecondKernel(self._trees, {**self._imported, **constants})
        for name in names:
            kernel.confirm(name)

    def confirm_honest(self) -> int:
        """The same for all of the honest file that it knows of; how many those are."""
        names = [name for name, what in self._honest.items() if _is_confirmable(what)]
        self.confirm(self._honest, names)
        return len(names)

    def _is_ending(self, name: Tree, what: Tree) -> bool:
        """Returns whether it is the axiom behind the text, which says nothing."""
        is_named = name[-2:] == self._sample.ending
        return is_named and what[0] == "axiom" and _is_proposition(what[3])

    def why(self, data: bytes) -> str:
        """The explanation.

        Raises:
            UnconfirmedError: there is none.
        """
        if data == self._sample.data:
            return "nothing changed"
        found = SecondReader(data, self._trees).constants()
        if found == self._honest:
            return "the same constants"
        renamed = dict(zip(found, self._honest, strict=False))
        if len(found) == len(self._honest) == len(set(renamed.values())):
            again = SecondReader(data, self._trees, renamed).constants()
            if again == self._honest:
                return "the same constants under other names"
            # Types are taken for granted, so they must be the honest ones.
            found = again
        changed = [
            name
            for name, what in found.items()
            if self._honest.get(name) != what and not self._is_ending(name, what)
        ]
        if not changed:
            return "fewer of the same constants, or another proposition behind the text"
        safe = [name for name in changed if not _is_unsafe(found[name])]
        self.confirm(found, safe)
        return "proved, says the second kernel" if safe else "unsafe, so that nothing rests on it"


def _is_proposition(type_: Tree) -> bool:
    return bool(type_[0] == "sort" and type_[2][0][0] == "zero")


def _is_unsafe(what: Tree) -> bool:
    return (what[0] == "definition" and what[-1] != b"\1") or (
        what[0] == "opaque" and what[-1] == b"\1"
    )


def _is_confirmable(what: Tree) -> bool:
    return what[0] in ("definition", "theorem", "opaque") and not _is_unsafe(what)


def samples(lean: Lean) -> list[Sample]:
    """The honest files."""
    found = []
    for name, text in TEXTS.items():
        word = f"leanqEnd{name}"  # no word by chance, so that a seed makes the same files
        code = f"{text}\nnamespace {word}\naxiom here : Prop\nend {word}\n"
        ended = Ended(text, code, (word, "here"))
        path = lean.compile(ended.text, name=name.capitalize())
        found.append(Sample.of(name, text, ended.name, path.read_bytes()))
    return found


def outcome(found: Judgement) -> str:
    """What a check would say of it, but for imported axioms."""
    if found.limit:
        if found.limit == "its process died (exit code 1)":
            return "Lean gives up"  # as it says itself, of a name that only its own can be
        return "died" if "died" in found.limit or "stopped" in found.limit else "limit"
    if found.rule:
        return "unreadable" if "cannot be audited" in found.text else found.rule
    if found.unavailable or not found.proved:
        return "no answer"
    if not found.ended:
        return "not read to its end"
    return "axiom" if found.survey.axioms else "accepted"


async def storm(
    environment: Environment, honest: list[Sample], files: int, seed: int, tally: Tally
) -> None:
    """Judges so many changed files."""
    judges = Judges(environment, slots=_SLOTS)
    core = environment.find_olean("Core")
    assert core
    imported = core.read_bytes()
    explainers = {sample.name: Explainer(sample, imported) for sample in honest}
    kinds = [*MUTATIONS, "swapped"]
    queue = iter(range(files))
    try:
        assert await judges.unavailable() == ""
        for sample in honest:
            found = await judges.judge(
                split_header(sample.header), [sample.data], sample.ending, _LIMITS
            )
            assert outcome(found) == "accepted", (sample.name, found)

        async def one_after_another() -> None:
            for number in queue:
                rng = random.Random(f"{seed} {number}")
                sample, kind = rng.choice(honest), kinds[number % len(kinds)]
                if kind == "swapped":  # the file of another text, changed or not
                    other = rng.choice([each for each in honest if each is not sample])
                    data = mutated(other, "bytes", rng) if rng.random() < 0.5 else other.data
                else:
                    data = mutated(sample, kind, rng)
                started = time.monotonic()
                tenant = rng.choice(_TENANTS)
                found = await judges.judge(
                    split_header(sample.header), [data], sample.ending, _LIMITS, tenant
                )
                tally.slowest_s = max(tally.slowest_s, time.monotonic() - started)
                _note(tally, f"{seed} {number}", kind, found, data, explainers[sample.name])

        await asyncio.gather(*(one_after_another() for _ in range(_AT_ONCE)))
    finally:
        await judges.close()


def _note(
    tally: Tally, which: str, kind: str, found: Judgement, data: bytes, explainer: Explainer
) -> None:
    what = outcome(found)
    if what == "accepted":
        try:
            what = f"accepted: {explainer.why(data)}"
        except Exception as error:  # the second reader believes what it reads, and falls over it
            what = "accepted: unexplained"
            tally.wrong.append(f"{which} {kind}: accepted: {type(error).__name__}: {error}")
    elif what in ("died", "no answer"):
        tally.wrong.append(f"{which} {kind}: {found.limit or found.unavailable}")
    tally.outcomes.setdefault(kind, Counter())[what] += 1


def main() -> None:
    """Judges, and prints what became of the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    tally = Tally()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        lean = Lean(open_environment("core", None, cache=where / "cache", environ={}), where)
        honest = samples(lean)
        asyncio.run(storm(lean.environment, honest, given.files, given.seed, tally))
    for kind, counts in tally.outcomes.items():
        print(f"{kind:10}", dict(counts.most_common()))
    print(f"{'all':10}", dict(tally.total().most_common()))
    took_s = time.monotonic() - started
    print(f"{given.files} files, {took_s:.0f} s, the slowest {tally.slowest_s:.2f} s")
    for each in tally.wrong:
        print("WRONG", each[:2000])
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
