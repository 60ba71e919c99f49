"""A library's own modules, judged as a check's file is: by a judge that has imported what they do.

A module may rest on private parts that were not delivered with it, and then cannot be judged. That
is found in the files: a name that nothing declares, or a definition without its body.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from leanq.lean.environment import Environment
from leanq.lean.judge.judge_client import Judgement, Judges
from leanq.lean.run.image import Image, Name, Raw
from leanq.lean.run.olean import display, open_image, read_parts
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import Header

_EQUATION = re.compile(r"eq_\d+")
LIMITS = Limits(cpu_s=600.0, wall_s=1800.0, memory_bytes=8 << 30)


@dataclass(frozen=True, slots=True)
class Judged:
    """A module and what the judge says of it.

    Attributes:
        lacks: what it rests on and was not delivered; looked for if the kernel refuses it.
        twice: what one of its imports declares as well, which copies without hidden parts show.
    """

    name: str
    size_bytes: int
    constants: int
    found: Judgement
    lacks: tuple[str, ...] = ()
    twice: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """``proved``, or why it is not, in a word."""
        if self.found.proved:
            return "proved"
        if self.lacks:
            return "private parts missing"
        return "an import declares the same" if self.twice else self.found.rule or "limit"


class Modules:
    """The modules of a folder, by their names."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.environment = environment
        names = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.olean"))
        self.names = sorted(".".join(name.parts) for name in names)
        self._imports: dict[str, tuple[str, ...]] = {}
        self._declares: dict[str, frozenset[Name]] = {}

    def image(self, module: str) -> Image:
        """Returns the compiled file as data."""
        path = self.environment.find_olean(module)
        assert path is not None, module
        return open_image(read_parts(path.resolve()))

    def imports(self, module: str) -> tuple[str, ...]:
        """Returns the modules that a module imports itself."""
        if module not in self._imports:
            imports = self.image(module).imports()
            self._imports[module] = tuple(display(each.module) for each in imports)
        return self._imports[module]

    def closure(self, modules: Sequence[str]) -> frozenset[str]:
        """Returns the modules and all that they lead to."""
        seen, todo = set(modules), list(modules)
        while todo:
            fresh = set(self.imports(todo.pop())) - seen
            seen |= fresh
            todo += fresh
        return frozenset(seen)

    def declares(self, module: str) -> frozenset[Name]:
        """Returns the names that a module declares."""
        if module not in self._declares:
            self._declares[module] = frozenset(self.image(module).constants())
        return self._declares[module]

    def lacks(self, module: str) -> tuple[str, ...]:
        """Returns the names that safe constants of a module rest on and that were not delivered.

        Nothing that the module imports declares them; or the file says how a definition unfolds,
        and the definition was delivered as an axiom.
        """
        image = self.image(module)
        constants = image.constants()
        safe = [raw for raw in constants.values() if not raw.unsafe]
        wanted = set().union(*(image.references(raw) for raw in safe)) - constants.keys()
        unfolded = {name[:-1] for name in constants if _EQUATION.fullmatch(str(name[-1]))}
        unfolded |= {_without_module(name) for name in unfolded}
        hollow = _axioms(constants, unfolded)
        for imported in self.closure(self.imports(module)):
            declared = self.declares(imported)
            wanted -= declared
            if about := declared & unfolded:
                hollow |= _axioms(self.image(imported).constants(about), about)
        return tuple(sorted(map(display, wanted | hollow)))

    def twice(self, module: str) -> tuple[str, ...]:
        """Returns the names that a module and one of its imports declare."""
        own = self.declares(module)
        shared = [own & self.declares(each) for each in self.closure(self.imports(module))]
        return tuple(sorted(map(display, frozenset[Name]().union(*shared))))


def _axioms(constants: Mapping[Name, Raw], names: Collection[Name]) -> set[Name]:
    return {name for name in names if name in constants and constants[name].kind == "axiom"}


def _without_module(name: Name) -> Name:
    """Returns the name that a private one has in its module."""
    numbers = [place for place, part in enumerate(name) if isinstance(part, int)]
    return name[numbers[0] + 1 :] if numbers else name


async def judge_modules(library: Modules, modules: Sequence[str], slots: int = 1) -> list[Judged]:
    """Judges modules, each behind its own imports."""
    judges = Judges(library.environment, slots=slots, prints=False)
    free = asyncio.Semaphore(slots)

    async def one(module: str) -> Judged:
        async with free:
            path = library.environment.find_olean(module)
            assert path is not None, module
            parts = read_parts(path.resolve())
            is_module = library.image(module).is_module
            header = Header("", 0, library.imports(module), is_module=is_module, is_prelude=True)
            found = await judges.judge(header, parts, ("", ""), LIMITS)
            refused = found.rule == "kernel_refused"
            lacks = await asyncio.to_thread(library.lacks, module) if refused else ()
            twice = await asyncio.to_thread(library.twice, module) if refused else ()
            constants = len(library.image(module).constants())
            return Judged(module, sum(map(len, parts)), constants, found, lacks, twice)

    try:
        if why := await judges.unavailable():
            raise RuntimeError(why)
        return await asyncio.gather(*map(one, modules))
    finally:
        await judges.close()
