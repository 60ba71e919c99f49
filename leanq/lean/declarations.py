"""Reads a text's declarations from its compiled data: kinds, statements, dependencies, axioms,
places.

The text is compiled in the sandbox like any candidate, and the compiled file is read as data. Lean
prints the statements for the text itself, in its own notation. A text that can run programs can
make them say anything, so nothing here is a verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from leanq.errors import AuditError, InvalidRequestError
from leanq.lean.audit.ending import Ended
from leanq.lean.audit.image import ASTRAY, Image, Name, Raw
from leanq.lean.audit.imported_axioms import ImportedAxioms
from leanq.lean.audit.layouts import Damaged
from leanq.lean.audit.olean import display, open_image, read_parts
from leanq.lean.audit.survey import Place, places, reachable
from leanq.lean.process import Lean, Slot, limits_of, olean
from leanq.lean.syntax import split_header
from leanq.queue.requests import Request

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
