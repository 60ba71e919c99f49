"""Reads compiled files as data: the constants that a module declares, and their references.

See :mod:`leanq.lean.audit.image` for the format. Any fault raises an `AuditError`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from leanq.errors import AuditError, SandboxError
from leanq.lean.audit.image import ASTRAY, Image, Import, Name
from leanq.lean.audit.layouts import Damaged, Kind
from leanq.lean.files import compiled_modules, open_regular
from leanq.lean.syntax import quote

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
    """Returns the code that reads compiled files and that of these modules, which together decide
    on what is kept of files."""
    names = ("image", "layouts", "olean", "shapes", *modules)
    return b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in names)


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
