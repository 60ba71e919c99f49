"""Finds the axioms that a compiled file rests on, without running anything of the file.

The file's own constants are read as data (see :mod:`leanq.lean.audit.survey`). Where another Lean's
kernel judges, it also tells the axioms behind the imported constants that they lead to. Elsewhere
Lean itself does. `ImportedAxioms` asks a process that imports what the file imports and never the
file, and remembers the answers.

The declaring file identifies an axiom, and its name does not. A file without imports can declare
``axiom propext : False``, which makes that axiom no standard one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from leanq.errors import AuditError
from leanq.lean.audit.image import Name
from leanq.lean.audit.olean import Constant, as_written, display, read_module
from leanq.lean.audit.survey import Survey, proves_itself, reachable
from leanq.lean.syntax import Header

SORRY = "sorryAx"

# How many modules are searched for names that do not tell their module.
_MAX_MODULES_SEARCHED = 1000

_RESTS_ON = re.compile(r"\s+depends\s+on\s+axioms:\s*\[(?P<axioms>.*)\]\s*\Z", re.DOTALL)
_RESTS_ON_NONE = re.compile(r"\s+does\s+not\s+depend\s+on\s+any\s+axioms\s*\Z")
_AXIOM = re.compile(r"(?:«[^»]*»|[^\s,«»])+")
_UNSPEAKABLE = re.compile(r"[»\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Findings:
    """The axioms behind a file's new constants.

    ``axioms``: all axioms behind the safe constants, and all new ones, sorted. ``incomplete``:
    whether sorryAx is behind any new constant, an unsafe one included. ``forbidden``: axioms that
    nobody has allowed, sorted: all new ones, and imported ones that a safe constant rests on. An
    imported sorryAx does not count among them. ``leads``: the first declaration of the text that
    rests on an imported one of these, and that one; empty if there is none.
    """

    axioms: tuple[str, ...]
    incomplete: bool
    forbidden: tuple[str, ...]
    leads: tuple[str, ...] = ()


async def audit(
    survey: Survey,
    *,
    allowed: Collection[str],
    environment_allowed: Collection[str],
    imported: ImportedAxioms,
) -> Findings:
    """Finds the axioms behind every constant of a file.

    The client allows the axioms ``allowed``, whichever text declares them. Axioms of
    ``environment_allowed`` are allowed if they are imported. Names are written as by `display`.

    Raises `AuditError` if an imported constant cannot be resolved.
    """
    known = await imported.look_up(survey.behind_any | survey.behind_safe)
    new_axioms = set(map(display, survey.axioms))
    behind_safe = set[str]().union(*(known[name] for name in survey.behind_safe))
    behind_any = new_axioms.union(*known.values())

    incomplete = SORRY in behind_any
    forbidden = new_axioms.difference(allowed)
    denied = behind_safe.difference(allowed, environment_allowed, {SORRY})
    leads = (
        (display(as_written(name)), axiom)
        for name, led in survey.safe
        for axiom in sorted(axiom for each in led for axiom in known[each] & denied)
    )
    axioms = new_axioms | behind_safe | ({SORRY} if incomplete else set())
    return Findings(
        tuple(sorted(axioms)), incomplete, tuple(sorted(forbidden | denied)), next(leads, ())
    )


def print_axioms_source(header: Header, names: Iterable[Name]) -> str:
    """Returns a Lean source that imports what ``header`` imports and prints each name's axioms.

    The imports are plain, which shows a file that is no module everything. The names come last, one
    a line. ``_root_`` keeps an alias from giving a name another meaning.
    """
    lines = ["prelude"] if header.is_prelude else []
    lines += [f"import {module}" for module in header.imports]
    lines += [f"#print axioms _root_.{'.'.join(f'«{part}»' for part in name)}" for name in names]
    return "".join(f"{line}\n" for line in lines)


Read = Callable[[Header, Sequence[Name]], Awaitable[Mapping[Name, frozenset[str]] | None]]


class ImportedAxioms:
    """The axioms behind the constants that one header imports in one environment.

    ``ask`` runs Lean in that environment on a source of ours, and returns its output with
    ``--json``. ``find_olean`` returns the compiled file of a module of that environment. ``read``
    returns what the judge's kernel has; None if Lean has to be asked.

    Answers are remembered for good. Overlapping lookups may ask for one constant twice, and get the
    same answer.
    """

    def __init__(
        self,
        header: Header,
        ask: Callable[[str], Awaitable[str]],
        find_olean: Callable[[str], Path | None],
        read: Read | None = None,
    ) -> None:
        self._read = read
        self._header = header
        self._ask = ask
        self._find_olean = find_olean
        self._known: dict[Name, frozenset[str]] = {}

    async def look_up(self, names: Collection[Name]) -> Mapping[Name, frozenset[str]]:
        """Returns the axioms behind each name; raises `AuditError` if one is not found."""
        unknown = {name for name in names if name not in self._known}
        if unknown:
            await self._learn(unknown)
        return {name: self._known[name] for name in names}

    async def _learn(self, names: set[Name]) -> None:
        if self._read is not None:
            found = await self._read(self._header, sorted(names, key=str))
            if found is not None:
                self._known |= found
                return
        unspeakable = {name for name in names if not _has_syntax(name)}
        hidden: dict[Name, Constant] = {}
        if unspeakable:
            hidden = await asyncio.to_thread(self._read_hidden, unspeakable)
        behind = {name: constant.references for name, constant in hidden.items()}
        # Several modules may declare a theorem, each with another proof.
        for name, constant in hidden.items():
            if constant.kind == "theorem" and name in reachable(constant.references, behind):
                raise AuditError(proves_itself(name))
        behind_hidden = {name for constant in hidden.values() for name in constant.references}
        spoken = [
            name for name in names | behind_hidden if name not in hidden and name not in self._known
        ]
        if spoken:
            source = print_axioms_source(self._header, spoken)
            self._known |= _read_answers(await self._ask(source), source, spoken)
        axioms = {name for name, constant in hidden.items() if constant.kind == "axiom"}
        # Only now: a hidden constant's axioms are those of everything behind it.
        for name in unspeakable:
            reached = reachable([name], behind)
            own = {display(each) for each in reached & axioms}
            behind_it = (self._known[each] for each in reached - hidden.keys())
            self._known[name] = frozenset(own.union(*behind_it))

    def _read_hidden(self, names: set[Name]) -> dict[Name, Constant]:
        """Returns the constants of these names that Lean's syntax cannot name, and those behind
        them."""
        found: dict[Name, Constant] = {}
        wanted = set(names)
        while wanted:
            likely = [module for name in wanted for module in _modules_in(name)]
            queue = deque([*likely, *self._header.imports, "Init"])
            seen: set[str] = set()
            while wanted:
                if not queue or len(seen) == _MAX_MODULES_SEARCHED:
                    raise AuditError(f"no import declares {display(next(iter(wanted)))!r}")
                name = queue.popleft()
                path = None if name in seen else self._find_olean(name)
                seen.add(name)
                if path is None:
                    continue
                module = read_module(path, only=wanted, follows=True)
                found |= {constant.name: constant for constant in module.constants}
                wanted -= found.keys()
                queue += (display(each.module) for each in module.imports)
            behind = {name for constant in found.values() for name in constant.references}
            wanted = {name for name in behind - found.keys() if not _has_syntax(name)}
        return found


def _has_syntax(name: Name) -> bool:
    """Returns whether `print_axioms_source` can name it."""
    return (
        bool(name)
        and name[0] != "_root_"
        and all(isinstance(part, str) and not _UNSPEAKABLE.search(part) for part in name)
    )


def _modules_in(name: Name) -> Iterator[str]:
    """Yields the possible modules in a name, as in ``_private.A.B.0.x`` and ``x._@.A.B._hyg.7``."""
    run: list[str | int] = []
    for part in (*name, 0):
        if isinstance(part, str) and not part.startswith("_"):
            run.append(part)
        elif run:
            yield display(tuple(run))
            run = []


def _read_answers(printed: str, source: str, names: Collection[Name]) -> dict[Name, frozenset[str]]:
    """Returns Lean's answer to ``source``, which asks for ``names`` in its last lines."""
    first_line = source.count("\n") - len(names) + 1
    by_line: dict[int, frozenset[str]] = {}
    for line in printed.split("\n"):
        try:
            message = json.loads(line)
            text, at = message["data"], message["pos"]["line"]
        except (ValueError, TypeError, KeyError):
            continue  # a library may print lines of its own when it is loaded
        if message.get("severity") == "error":
            raise AuditError(f"Lean could not say which axioms are imported: {text!r}")
        if match := _RESTS_ON.search(text):
            axioms = frozenset(_AXIOM.findall(match["axioms"]))
        elif _RESTS_ON_NONE.search(text):
            axioms = frozenset()
        else:
            continue
        by_line[at] = axioms
    answers = {
        name: by_line[line] for line, name in enumerate(names, first_line) if line in by_line
    }
    if missing := [name for name in names if name not in answers]:
        raise AuditError(f"Lean did not say which axioms {display(missing[0])!r} rests on")
    return answers
