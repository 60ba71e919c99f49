"""Targets for candidates, compiled apart from any candidate, each once.

They are kept where no candidate can write, in the worker's own memory. Fingerprint, options and
text name a target.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from cachetools import LRUCache

from leanq.errors import AuditError, InvalidRequestError
from leanq.lean.environment import Environment, module_parts
from leanq.lean.goals.recipes import text_hash
from leanq.lean.judge.check import NAMED_OPTIONS, Target
from leanq.lean.judge.closing import Marks
from leanq.lean.judge.declarations import Ended
from leanq.lean.judge.examples import example_names, name_examples
from leanq.lean.judge.judge_client import Parts
from leanq.lean.judge.statement import what_is_open
from leanq.lean.run.image import Name
from leanq.lean.run.layouts import Damaged
from leanq.lean.run.olean import display, modules_of, open_image, read_parts
from leanq.lean.run.process import Lean, limits_of, olean
from leanq.queue.requests import LEAN_VERDICTS, Reply, Request

_KEPT_BYTES = 64 << 20
_MOST_SALTS = 100


class _Compiled(NamedTuple):
    """A compiled target: its file, the name of the declaration behind its text, whether the text
    declares a theorem, and the definitions that it leaves open."""

    file: Parts
    ending: tuple[str, str]
    has_theorem: bool
    open: Sequence[str]

    @classmethod
    def of(cls, file: Parts, ending: tuple[str, str]) -> _Compiled:
        """Reads from a compiled file what there is to prove."""
        try:
            has_theorem, open_ = what_is_open(open_image(file))
        except (Damaged, IndexError):
            # Of another Lean, or too large: the candidate's judge says so, within its limits.
            has_theorem, open_ = True, []
        return cls(file, ending, has_theorem, [display(name) for name in open_])

    def check(self, holes: Sequence[str]) -> None:
        """Raises `InvalidRequestError` if there is nothing to prove or to fill in."""
        if self.has_theorem:
            return
        unknown = [hole for hole in holes if hole not in self.open]
        if holes and not unknown:
            return
        names = ", ".join(self.open)
        text = "the target declares no theorem, so there is nothing to prove"
        if not names:
            text += ": give it one, such as `theorem t : … := sorry`"
        elif unknown:
            text += f", and {unknown[0]} is no definition that it leaves open; these are: {names}"
        else:
            text += f"; to have the definitions filled that it leaves open, name as holes: {names}"
        raise InvalidRequestError(text)


class UncompiledError(InvalidRequestError):
    """Lean says that a target does not compile.

    Attributes:
        why: what Lean says.
    """

    def __init__(self, text: str, why: str = "") -> None:
        super().__init__(text, why)
        self.why = why


class Targets:
    """The targets of one environment."""

    def __init__(self, lean: Lean) -> None:
        self._lean = lean
        # One that is larger than all the room is kept alone.
        self._kept: LRUCache[str, _Compiled] = LRUCache(
            _KEPT_BYTES, lambda kept: min(sum(map(len, kept.file)), _KEPT_BYTES)
        )
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._found: dict[tuple[str, ...], tuple[Name, Path]] = {}

    async def of_request(self, request: Request) -> Target:
        """Returns the target of a request. Raises InvalidRequestError if it does not compile, has
        nothing to prove, or names what the environment lacks."""
        if request.theorems:
            return await self._of_environment(request)
        environment = self._lean.environment
        text = environment.header_for(request.target) + request.target
        compiled = await self._compiled(text, request)
        compiled.check(request.holes)
        return Target(compiled.file, compiled.ending, holes=request.holes)

    async def of_source(
        self,
        source: str,
        filled: str,
        request: Request,
        opened: str = "",
        marks: Marks | None = None,
    ) -> tuple[Target, str]:
        """Returns a source with holes as the target of ``filled``, the source with its holes
        filled, and the salt of its examples' names. If some holes alone are filled, these are
        marked in both, and ``opened`` is the source with the markers. Raises InvalidRequestError if
        the source does not compile any more, or the filling uses up the names."""
        salt, names = _unused_names(source, filled)
        text, options = await asyncio.to_thread(named_as_in_source, opened or source, source, salt)
        compiled = await self._compiled(text, request, options)
        file, ending = compiled.file, compiled.ending
        target = Target(file, ending, holes=None, is_whole=True, marks=marks, examples=names)
        return target, salt

    async def _compiled(
        self, text: str, request: Request, options: Sequence[str] = ()
    ) -> _Compiled:
        environment = self._lean.environment
        parts = (environment.fingerprint, *environment.options, "", *options, "", text)
        key = text_hash("\0".join(parts)).hex()
        async with self._turns.setdefault(key, asyncio.Lock()):
            if key not in self._kept:
                self._kept[key] = await self._compile(text, request, options)
            return self._kept[key]

    async def _compile(self, text: str, request: Request, options: Sequence[str]) -> _Compiled:
        ended = Ended.of(text)
        async with self._lean.slot() as slot:
            run = await self._lean.run(slot, ended.text, limits_of(request), options=options)
            outcome = run.outcome
            if outcome.verdict not in ("accepted", "incomplete"):
                why = await asyncio.to_thread(self._why, outcome, ended)
                text = f"the target does not compile: {why}"
                if outcome.verdict in LEAN_VERDICTS:
                    raise UncompiledError(text, why)
                raise InvalidRequestError(text)
            try:
                file = await asyncio.to_thread(read_parts, olean(slot))
                return await asyncio.to_thread(_Compiled.of, file, ended.name)
            except AuditError as error:
                raise InvalidRequestError(f"the target does not compile: {error}") from None

    def _why(self, outcome: Reply, ended: Ended) -> str:
        if outcome.reason == "unknown_import":
            return self._lean.environment.explain_import(ended.code)
        errors = [message for message in outcome.messages if message.severity == "error"]
        last_line = ended.code.rstrip().count("\n") + 1
        if errors and errors[0].line >= last_line and ended.is_involved(errors[:1]):
            # The target's author does not know the token that Lean met.
            expected = errors[0].text.partition("; ")[2]
            return f"it is not complete; behind its end Lean {expected or 'expected more'}"
        return f"{errors[0].text if errors else outcome.verdict:.2000}"

    async def _of_environment(self, request: Request) -> Target:
        names = [module_parts(each) for each in request.theorems]
        paths = [await self._declaring(name) for name in names]
        if len(set(paths)) > 1:
            modules = ", ".join(sorted({path.stem for path in paths}))
            raise InvalidRequestError(
                f"verify takes theorems of one module; these are of {modules}"
            )
        file = await asyncio.to_thread(read_parts, paths[0], follows=True)
        return Target(file, ("", ""), theorems=names, holes=request.holes)

    async def _declaring(self, name: tuple[str, ...]) -> Path:
        known = self._found.get(name)
        if known is None:
            environment = self._lean.environment
            found = await asyncio.to_thread(_find_declaring, environment, name)
            if not found:
                raise InvalidRequestError(
                    f"no module of the environment {environment.name!r} declares "
                    f"{display(name)}; give the full name of one of its theorems"
                )
            if len(found) > 1:
                modules = " and ".join(map(display, sorted(found, key=str)[:2]))
                raise InvalidRequestError(
                    f"{len(found)} modules of the environment {environment.name!r} declare "
                    f"{display(name)}, such as {modules}; give the theorem's text as the target"
                )
            [known] = found.items()
            self._found[name] = known
        return known[1]


def _unused_names(source: str, filled: str) -> tuple[str, Sequence[str]]:
    """Returns a salt and its names for a source's examples, which stand nowhere in a text. It is
    the same for most fillings, so that one target serves them. Whoever fills can know it, and could
    prove by an example that has no name."""
    salt = source
    for _ in range(_MOST_SALTS):
        salt = text_hash(salt).hex()
        names = example_names(source, salt)
        if not any(name in filled for name in names):
            return salt, names
    raise InvalidRequestError("the tactics hold too many of the names for the source's examples")


def named_as_in_source(code: str, source: str, salt: str) -> tuple[str, Sequence[str]]:
    """Returns a filled source with its target's names for examples, and the options for it."""
    if not example_names(source, salt):
        return code, ()
    return name_examples(code, salt) or code, NAMED_OPTIONS


def _find_declaring(environment: Environment, name: tuple[str, ...]) -> dict[Name, Path]:
    """Returns the modules that declare a name, with their compiled files."""
    written, found = name[-1].encode() + b"\0", dict[Name, Path]()
    for module, path in modules_of(environment.search_path):
        try:
            parts = read_parts(Path(path), follows=True)
            if any(written in part for part in parts) and open_image(parts).constants({name}):
                found[module] = Path(path)
        except (AuditError, Damaged, IndexError):
            continue
    return found
