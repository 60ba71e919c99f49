"""What a text declares, what that rests on, and whether Lean read it to its end: from data.

The text is compiled in the sandbox like any candidate, and the compiled file is read as data. Lean
prints the statements for the text itself, in its own notation. A text that can run programs can
make them say anything, so nothing here is a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from leanq.errors import AuditError, InvalidRequestError
from leanq.lean.run.image import ASTRAY, Image, Name, Raw
from leanq.lean.run.layouts import Damaged
from leanq.lean.run.olean import (
    Constant,
    Place,
    Survey,
    as_written,
    display,
    open_image,
    places,
    proves_itself,
    reachable,
    read_module,
    read_parts,
)
from leanq.lean.run.process import Lean, Slot, limits_of, olean
from leanq.lean.text import Header, split_header
from leanq.queue.requests import Message, Request

# Tells from data whether Lean has read a text to its end.
#
# ``#exit`` and some other words end a text early, and Lean then skips the rest. So a declaration
# of ours is compiled behind the text, and has to be in the result. A namespace of its own keeps
# the text from taking it over: an open attribute, doc comment or ``… in`` at its end would be an
# error.


@dataclass(frozen=True, slots=True)
class Ended:
    """A text with the declaration behind it.

    Attributes:
        code: the text alone.
        text: the text to compile.
        name: the last parts of the declaration's name.
    """

    code: str
    text: str
    name: tuple[str, str]

    @classmethod
    def of(cls, code: str) -> Ended:
        """Adds a declaration whose name the text cannot know, and that no notation of the text can
        have taken."""
        word = f"leanqEnd{secrets.token_hex(8)}"
        text = f"{code}\nnamespace {word}\naxiom is{word} : Prop\nend {word}\n"
        return cls(code, text, (word, f"is{word}"))

    def own(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Returns those of Lean's messages that are about the text itself. None reaches behind its
        end, as one would that ends where the next word begins."""
        lines = self.code.split("\n")
        end = (len(lines), len(lines[-1]))
        found = []
        for each in messages:
            if self._is_behind(each):
                continue
            if each.end_line is not None and (each.end_line, each.end_column or 0) > end:
                found.append(replace(each, end_line=end[0], end_column=end[1]))
            else:
                found.append(each)
        return tuple(found)

    def is_involved(self, messages: Sequence[Message]) -> bool:
        """Returns whether an error may be about the declaration behind the text, or be worded after
        it."""
        return any(
            message.severity == "error"
            and (
                self._is_behind(message)
                or "'namespace'" in message.text
                or self.name[0] in message.text
            )
            for message in messages
        )

    def _is_behind(self, message: Message) -> bool:
        return message.line > self.code.count("\n") + 1


# Finds the axioms that a compiled file rests on, without running anything of the file.
#
# The file's own constants are read as data (see :mod:`leanq.lean.run.olean`). Where another
# Lean's kernel judges, it also tells the axioms behind the imported constants that they lead to.
# Elsewhere Lean itself does. `ImportedAxioms` asks a process that imports what the file imports
# and never the file, and remembers the answers.
#
# The declaring file identifies an axiom, and its name does not. A file without imports can declare
# ``axiom propext : False``, which makes that axiom no standard one.

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


_SORRY = "sorryAx"
_LEVEL = re.compile(r"\bleanqLevel\d+\b")


@dataclass(frozen=True, slots=True)
class Declaration:
    """One declaration of a text.

    Attributes:
        kind: ``theorem``, ``definition``, ``axiom``, ``opaque``, ``inductive``, ``constructor``,
            ``recursor`` or ``quotient``.
        statement: its type, as Lean prints it; None if Lean has no syntax for the name.
        local: names of this text in its type and value. Names that Lean made on the way, such as
            matchers, are replaced by those behind them.
        imported: names of imported constants in its type and value, likewise.
        axioms: all axioms behind it; ``sorryAx`` among them if a sorry is.
        line, column, end_line, end_column: its place; lines from 1, columns from 0.
    """

    name: str
    kind: str
    statement: str | None
    universes: tuple[str, ...]
    local: tuple[str, ...]
    imported: tuple[str, ...]
    axioms: tuple[str, ...]
    line: int
    column: int
    end_line: int
    end_column: int

    @property
    def has_sorry(self) -> bool:
        return _SORRY in self.axioms


async def extract(lean: Lean, request: Request) -> tuple[Declaration, ...]:
    """Returns the declarations of ``request.code``, in its order, as far as they have a place
    there. Raises InvalidRequestError if Lean refuses the text, or has not read it to its end."""
    header = lean.environment.header_for(request.code)
    text = header + request.code
    async with lean.slot() as slot:
        with _readable():
            image, constants, known = await _compiled(lean, slot, request, text)
        names = [name for name in constants if name in known]
        with _readable():
            levels = {name: tuple(map(display, image.levels(constants[name]))) for name in names}
            references = {name: image.references(raw) for name, raw in constants.items()}
        statements = await _statements(lean, slot, request, text, levels)
    axioms = await _axioms(lean, text, constants, references)
    hidden = {name: behind for name, behind in references.items() if name not in known}
    shift, found = header.count("\n"), []
    for name in sorted(names, key=known.__getitem__):
        reached = reachable(references[name], hidden) - hidden.keys() - {name}
        line, column, end_line, end_column = known[name]
        found.append(
            Declaration(
                name=display(name),
                kind=constants[name].kind,
                statement=statements.get(name),
                universes=levels[name],
                local=tuple(sorted(display(each) for each in reached if each in references)),
                imported=tuple(sorted(display(each) for each in reached if each not in references)),
                axioms=tuple(sorted(axioms[name])),
                line=line - shift,
                column=column,
                end_line=end_line - shift,
                end_column=end_column,
            )
        )
    return tuple(found)


async def _compiled(
    lean: Lean, slot: Slot, request: Request, text: str
) -> tuple[Image, dict[Name, Raw], dict[Name, Place]]:
    ended = Ended.of(text)
    run = await lean.run(slot, ended.text, limits_of(request))
    if run.outcome.verdict not in ("accepted", "incomplete"):
        shift = text.count("\n") - request.code.count("\n")
        errors = (
            f"line {each.line - shift}: {each.text:.2000}"
            for each in run.outcome.messages
            if each.severity == "error"
        )
        why = next(errors, "no word of Lean's")
        raise InvalidRequestError(f"the text does not compile: {why}")
    image = open_image(await asyncio.to_thread(read_parts, olean(slot)))
    constants = image.constants()
    if not any(name[-2:] == ended.name for name in constants):
        raise InvalidRequestError(
            "Lean has not read the text to its end, as after `#exit`; remove what stops it"
        )
    constants = {name: raw for name, raw in constants.items() if name[-2:] != ended.name}
    known = {name: whole for name, (whole, _) in places(image).items() if name in constants}
    return image, constants, known


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (AuditError, Damaged, IndexError) as error:
        # A text that runs programs can leave any bytes there.
        why = ASTRAY if isinstance(error, IndexError) else str(error)
        raise InvalidRequestError(f"what Lean has compiled cannot be read: {why}") from None


async def _statements(
    lean: Lean, slot: Slot, request: Request, text: str, levels: Mapping[Name, Sequence[str]]
) -> Mapping[Name, str]:
    """Returns the type of each name as Lean prints it behind the text."""
    asked = [name for name in levels if all(isinstance(part, str) for part in name)]
    # Under names of ours: Lean would make up others for the parameters, and the text may have
    # declared the same.
    most = max((len(each) for each in levels.values()), default=0)
    ours = [f"leanqLevel{number}" for number in range(most)]
    lines = [f"universe {' '.join(ours)}" if ours else ""]
    for name in asked:
        given = f".{{{', '.join(ours[: len(levels[name])])}}}" if levels[name] else ""
        lines.append(f"#check @_root_.{display(name)}{given}")
    first = text.count("\n") + 3
    run = await lean.run(slot, "\n".join((text, *lines, "")), limits_of(request))
    found = {}
    for message in run.outcome.messages:
        number = message.line - first
        if message.severity == "information" and 0 <= number < len(asked):
            _, colon, statement = message.text.partition(" : ")
            theirs = dict(zip(ours, levels[asked[number]], strict=False))
            if colon:
                found[asked[number]] = _LEVEL.sub(
                    lambda level, theirs=theirs: theirs.get(level[0], level[0]),  # type: ignore[misc]
                    " ".join(statement.split()),
                )
    return found


async def _axioms(
    lean: Lean,
    text: str,
    constants: Mapping[Name, Raw],
    references: Mapping[Name, set[Name]],
) -> Mapping[Name, frozenset[str]]:
    imported = ImportedAxioms(split_header(text), lean.ask, lean.environment.find_olean)
    leaves = set().union(*references.values()) - constants.keys()
    try:
        known = await imported.look_up(leaves)
    except AuditError as error:
        raise InvalidRequestError(f"its axioms cannot be told: {error}") from None
    own = {name for name, raw in constants.items() if raw.kind == "axiom"}
    found = {}
    for name in constants:
        reached = reachable([name], references)
        axioms = frozenset(map(display, reached & own))
        found[name] = axioms.union(*(known[each] for each in reached & known.keys()))
    return found
