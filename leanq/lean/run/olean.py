"""Reads compiled files as data: the constants that a module declares, and their references.

See :mod:`leanq.lean.run.image` for the format. Any fault raises an `AuditError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from leanq.errors import AuditError, SandboxError
from leanq.lean.run.files import compiled_modules, open_regular
from leanq.lean.run.image import ASTRAY, Image, Import, Name, Raw
from leanq.lean.run.layouts import Damaged, Kind, shape
from leanq.lean.text import quote

MAX_BYTES = 256 << 20
# What the machine is short of, or its disk's fault.
_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO)


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant, and the names of all constants in its type and its value.

    An inductive type refers to its constructors, a projection to its structure.
    """

    name: Name
    kind: Kind
    unsafe: bool
    references: frozenset[Name]


@dataclass(frozen=True, slots=True)
class Module:
    """The imports and the constants of a module, each in the file's order."""

    imports: tuple[Import, ...]
    constants: tuple[Constant, ...]


def code_with(*modules: str) -> bytes:
    """Returns the code that reads compiled files and that of these modules of lean/
    (``judge/kernel``), which together decide on what is kept of files."""
    names = ("run/image", "run/layouts", "run/olean", *modules)
    lean = Path(__file__).parents[1]
    return b"".join((lean / f"{name}.py").read_bytes() for name in names)


def display(name: Name) -> str:
    """Returns the name as Lean writes it; different names never look the same."""
    if not name:
        return "[anonymous]"
    return ".".join(quote(part) if isinstance(part, str) else str(part) for part in name)


def as_written(name: Name) -> Name:
    """Returns a private name as the text has it, without its module."""
    start = next((at for at, part in enumerate(name) if isinstance(part, int)), -1) + 1
    return name[start:] if name[:1] == ("_private",) else name


def find_module(name: Sequence[str | int], folders: Sequence[Path]) -> Path | None:
    """Finds the compiled file of a module as Lean does.

    The first folder that knows the first part of the name decides, even if it lacks the module. A
    name that would lead out of the folders is found nowhere.
    """
    parts = [str(each) for each in name]
    if not parts or any(part in (".", "..") or set(part) & set("/\0") for part in parts):
        return None
    folder = find_folder(parts[0], folders)
    if folder is None:
        return None
    olean = folder.joinpath(*parts[:-1], f"{parts[-1]}.olean")
    return olean if olean.is_file() else None


def find_folder(first: str, folders: Sequence[Path]) -> Path | None:
    """Returns the folder that decides on all modules whose names begin with this part."""
    for folder in folders:
        if (folder / first).is_dir() or (folder / f"{first}.olean").exists():
            return folder
    return None


def modules_of(
    folders: Sequence[Path], leave_out: Collection[str] = ()
) -> Iterator[tuple[Name, str]]:
    """Yields each module of a search path with its compiled file, as Lean finds it; raises OSError.

    Args:
        leave_out: libraries that stand beside `Init`. Another folder may have others of such names.
    """
    files: list[str] = []
    for folder in filter(Path.is_dir, folders):
        without = leave_out if (folder / "Init.olean").is_file() else ()
        files += (file.path for file in compiled_modules(folder, without))
    return find_modules(folders, files)


def find_modules(folders: Sequence[Path], paths: Iterable[str]) -> Iterator[tuple[Name, str]]:
    """Yields each module among these files below a search path's folders, as Lean finds it."""
    decides = cache(lambda first: find_folder(first, folders))
    compiled = [path for path in paths if path.endswith(".olean")]
    for folder in folders:
        start = f"{folder}/"
        for path in compiled:
            if path.startswith(start):
                name = tuple(path.removeprefix(start).removesuffix(".olean").split("/"))
                if decides(name[0]) == folder:
                    yield name, path


def read_module(
    path: Path,
    *,
    limit_bytes: int = MAX_BYTES,
    only: Container[Name] | None = None,
    follows: bool = False,
) -> Module:
    """Reads ``path`` and, for a file of the module system, its parts beside it.

    With ``only``, constants of other names are left out, at almost no cost. With ``follows``, files
    may be links, as `read_parts` says.

    Raises `AuditError` if a file is missing, no regular file, larger than ``limit_bytes`` (all
    parts together), of an unknown version or damaged.
    """
    try:
        image = open_image(read_parts(path, limit_bytes=limit_bytes, follows=follows))
        constants = tuple(
            Constant(raw.name, raw.kind, raw.unsafe, frozenset(image.references(raw)))
            for raw in image.constants(only).values()
        )
        return Module(image.imports(), constants)
    except Damaged as error:
        why = str(error)
    except IndexError:
        why = ASTRAY
    raise AuditError(f"{path.name} is no readable .olean file: {why}")


def open_image(parts: Sequence[bytes]) -> Image:
    """Opens the image in the parts of a file that :func:`read_parts` has found.

    Raises `Damaged` or `IndexError`.
    """
    image = Image(parts[:1])
    if not image.is_module:
        return image
    # The public part shows theorems as axioms: without the others there is no audit.
    if len(parts) < 3:
        raise Damaged("its parts .server and .private are missing")
    return Image(parts)


def read_parts(path: Path, *, limit_bytes: int = MAX_BYTES, follows: bool = False) -> list[bytes]:
    """Returns the bytes of ``path`` and of its parts beside it, unread.

    With ``follows``, each of them may be a link to a file of any name. Installed files may be; a
    candidate's may not.

    Raises `AuditError` as `read_module` does, except for damaged bytes.
    """

    def read(part: Path) -> bytes:
        return read_bytes(Path(os.path.realpath(part)) if follows else part, limit_bytes)

    parts = [read(path)]
    others = [path.with_name(path.name + suffix) for suffix in (".server", ".private")]
    if any(os.path.lexists(each) for each in others):
        for each in others:
            limit_bytes -= len(parts[-1])
            parts.append(read(each))
    return parts


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """Returns the bytes of a file that a candidate may have made.

    Raises:
        AuditError: it cannot be read.
        SandboxError: this machine cannot read now, which says nothing of the file.
    """
    try:
        with open_regular(path) as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        text = f"{path.name} cannot be read: {error.strerror}"
        if error.errno in _OF_THE_MACHINE:
            raise SandboxError(text) from None
        raise AuditError(text) from None
    if len(data) > limit_bytes:
        raise AuditError(f"{path.name} is larger than {limit_bytes} bytes")
    return data


# Surveys a compiled file: its declarations, their places, and their references.
#
# An unsafe constant proves nothing, since Lean's kernel keeps it out of safe ones. So only a
# ``sorry`` in it counts, for its author's sake. A file can bypass the kernel and lead from a safe
# constant to an unsafe one; the walk then goes on through it.

# The extension in which Lean keeps the places of declarations.
_PLACES: Name = ("Lean", "declRangeExt")


@dataclass(frozen=True, slots=True)
class Survey:
    """A file's declarations and references.

    Attributes:
        axioms: its own axioms.
        safe: its safe constants in the order of the text, each with the imported constants that it
            is the first to lead to.
        behind_any: imported constants that any of its constants lead to.
    """

    axioms: frozenset[Name]
    safe: tuple[tuple[Name, frozenset[Name]], ...]
    behind_any: frozenset[Name]

    @property
    def behind_safe(self) -> frozenset[Name]:
        """The imported constants that its safe constants lead to."""
        return frozenset[Name]().union(*(led for _, led in self.safe))


class Place(NamedTuple):
    """Where a declaration stands: lines from 1, columns from 0."""

    line: int
    column: int
    end_line: int
    end_column: int

    def is_inside(self, other: Place) -> bool:
        """Returns whether it is a part of another place, and not all of it."""
        return other[:2] <= self[:2] and self[2:] <= other[2:] and self != other


def places(image: Image) -> dict[Name, tuple[Place, Place]]:
    """Returns where the file's declarations stand, as a whole and by their names.

    A declaration is left out if its start cannot be read. Its start stands in for a damaged end,
    and the whole for a damaged place of its name: no damage behind the start hides a declaration.
    """
    words, found = image.words, {}
    entries = image.entries().get(_PLACES)
    for address in image.array(entries) if entries is not None else ():
        with contextlib.suppress(Damaged, IndexError):
            pair = image.object(address, shape(0, 2))
            ranges = image.object(words[pair + 2], shape(0, 2))
            whole = named = _place(image, words[ranges + 1])
            with contextlib.suppress(Damaged, IndexError):
                named = _place(image, words[ranges + 2])
            found[image.name(words[pair + 1])] = whole, named
    return found


def _place(image: Image, address: int) -> Place:
    words = image.words
    index = image.object(address, shape(0, 4))
    start = end = _position(image, words[index + 1])
    with contextlib.suppress(Damaged, IndexError):
        end = _position(image, words[index + 3])
    return Place(*start, *end)


def _position(image: Image, address: int) -> tuple[int, int]:
    words = image.words
    at = image.object(address, shape(0, 2))
    return image.small(words[at + 1]), image.small(words[at + 2])


def stated_theorems(image: Image, constants: Mapping[Name, Raw]) -> list[Name]:
    """Returns the theorems that the text states, in its order.

    Lean notes no place for the lemmas that it makes on its way. A structure's fields, and an
    attribute's products, stand inside another declaration.
    """
    known = {name: whole for name, (whole, _) in places(image).items() if name in constants}
    by_place = sorted(known, key=lambda name: (known[name][:2], *(-end for end in known[name][2:])))
    stated, around = [], Place(0, 0, 0, 0)
    for name in by_place:
        place = known[name]
        if place.is_inside(around):
            continue
        around = place
        if constants[name].kind == "theorem":
            stated.append(name)
    return stated


def survey(
    image: Image,
    constants: Mapping[Name, Raw],
    known: Mapping[Name, AbstractSet[Name]],
    ending: AbstractSet[Name] = frozenset(),
) -> Survey:
    """Surveys the constants of a file; ``known`` has the references of some of them. The axioms
    ``ending`` are ours."""
    references = {**known, **led_to(image, constants, constants, known)}
    at = {name: whole for name, (whole, _) in places(image).items()}
    last = Place(1 << 62, 0, 0, 0)
    seen, safe = set[Name](), []
    for name in sorted(constants, key=lambda name: at.get(name, last)):
        if not constants[name].unsafe and name not in seen:
            fresh = reachable([name], references, seen)
            seen |= fresh
            if led := frozenset(fresh - constants.keys()):
                safe.append((name, led))
    return Survey(
        axioms=frozenset(name for name, raw in constants.items() if raw.kind == "axiom") - ending,
        safe=tuple(safe),
        behind_any=frozenset(set().union(*references.values()) - constants.keys()),
    )


def led_to(
    image: Image,
    constants: Mapping[Name, Raw],
    start: Iterable[Name],
    known: Mapping[Name, AbstractSet[Name]],
) -> dict[Name, AbstractSet[Name]]:
    """Returns the file's own constants that some of them lead to, each with its references.

    ``known``: the references of some of them.
    """
    found: dict[Name, AbstractSet[Name]] = {}
    todo = [*start]
    while todo:
        name = todo.pop()
        if name in constants and name not in found:
            found[name] = known[name] if name in known else image.references(constants[name])
            todo += found[name]
    return found


def proves_itself(theorem: Name) -> str:
    """Returns the words for imports of which each was right, and all together are circular."""
    return (
        f"the imports prove {display(theorem)} by itself: several modules declare it, or what its "
        "proof uses; import one of them"
    )


def reachable(
    start: Iterable[Name],
    references: Mapping[Name, AbstractSet[Name]],
    but: AbstractSet[Name] = frozenset(),
) -> set[Name]:
    """Returns all names that ``start`` leads to by ``references``, itself included, and not through
    those in ``but``."""
    seen = set(start)
    todo = list(seen)
    while todo:
        fresh = references.get(todo.pop(), set()) - seen - but
        seen |= fresh
        todo += fresh
    return seen
