"""Which Lean compiled a module, by its file's header, and libraries that this Lean cannot read.

A header holds "olean", a format, the version of Lean and its commit, and leads to the file's last
object. Lean refuses a file of another commit, and dies of some that are damaged: an honest text
would seem to be at fault. What a header says is a suspicion alone, since some builds of Lean
compare nothing. So Lean itself is asked.
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from leanq.errors import ToolchainError
from leanq.lean.files import library_of
from leanq.lean.syntax import quote
from leanq.lean.toolchain import Toolchain, ask, last_words

# Lean has said this since 4.9 of a file that it finds and cannot read.
UNREADABLE = re.compile(
    r"failed to (?:read|open) file '|\(error code: \d+, permission denied\)|incompatible header"
)
# A header, of 56 or 88 bytes, and the address of its last object.
_HEAD_BYTES = 96
_MAGIC = b"olean"
_PART = re.compile(r"\.(?:olean(?:\.server|\.private)?|ir(?:\.sig)?)\Z")
_TOOLCHAIN = re.compile(r"(?:leanprover/lean4:)?v?(\d+\.\d+\.\d+(?:-\S+)?)\s*")


class Build(NamedTuple):
    """The Lean that compiled a module; both are "" where the file does not say."""

    version: str
    commit: str

    def __str__(self) -> str:
        commit = f" (commit {self.commit[:12]})" if self.commit else ""
        return f"Lean {self.version}{commit}" if self.version else f"a Lean{commit}"


def build_of(path: str) -> Build | None:
    """Returns the Lean that compiled a module; None if the file is no whole compiled module. Raises
    OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        head = os.pread(fd, _HEAD_BYTES, 0)
        if not head.startswith(_MAGIC) or len(head) < _HEAD_BYTES:
            return None
        is_first = head[5] == 1
        if head[5] <= 2 and not _is_whole(fd, head, 56 if is_first else 88):
            return None
    finally:
        os.close(fd)
    if is_first:
        return Build("", _text(head[6:48]))
    return Build(_text(head[7:40]), _text(head[40:80]))


def _is_whole(fd: int, head: bytes, begin: int) -> bool:
    """Returns whether a file ends with the object that its header, of so many bytes, leads to. Lean
    writes that one last. A part of a module may lead to one of an earlier part."""
    base, root = struct.unpack_from("<QQ", head, begin - 8)
    if root < base:
        return True
    word = os.pread(fd, 8, root - base) if root - base < 1 << 62 else b""
    if len(word) < 8:
        return False
    return bool(root - base + int.from_bytes(word[4:6], "little") == os.fstat(fd).st_size)


def check_builds(
    name: str,
    toolchain: Toolchain,
    folders: Sequence[Path],
    files: Iterable[tuple[str, str]],
    environ: Mapping[str, str],
) -> None:
    """Looks at compiled modules, each a name below a folder and a path. Raises ToolchainError if
    this Lean cannot read one, and names both Leans. ``folders``: the search path."""
    ours = Build(toolchain.version, toolchain.commit)
    asked = set[tuple[str, bool]]()
    for file, path in files:
        build = build_of(path)
        if build is not None and build.commit and ours.commit.startswith(build.commit):
            continue
        # A Lean that reads one of them compares nothing, or has files of another form.
        kind = (library_of(file), build is None)
        if kind in asked:
            continue
        asked.add(kind)
        if said := _refusal(toolchain, folders, file, environ):
            theirs = "is no compiled module, or damaged" if build is None else f"is of {build}"
            raise ToolchainError(
                f"environment {name}: {path} {theirs}, and {toolchain} cannot read it "
                f"({said}). Build the library with this Lean, or name the Lean that it was built "
                "with: leanq worker --lean PATH"
            )


def check_project(name: str, toolchain: Toolchain, project: Path) -> None:
    """Raises ToolchainError if a Lake project asks for another version of Lean."""
    try:
        asked = (project / "lean-toolchain").read_text(errors="replace")
    except OSError:
        return
    wanted = _TOOLCHAIN.fullmatch(asked)
    if wanted and wanted[1] != toolchain.version:
        raise ToolchainError(
            f"environment {name}: the project's lean-toolchain asks for Lean {wanted[1]}, and this "
            f"is {toolchain}; name that Lean with --lean, or build the project with this one"
        )


def _refusal(
    toolchain: Toolchain, folders: Sequence[Path], file: str, environ: Mapping[str, str]
) -> str:
    """Returns what Lean says of a module that it cannot read; "" if it can."""
    module = ".".join(map(quote, _PART.sub("", file).split("/")))
    with tempfile.TemporaryDirectory(prefix="leanq-") as scratch:
        Path(scratch, "T.lean").write_text(f"prelude\nimport {module}\n")
        path = os.pathsep.join(map(str, folders))
        done = ask(
            ["env", f"LEAN_PATH={path}", *toolchain.command, "T.lean"], environ, Path(scratch)
        )
    if done.returncode not in (0, 1):
        return f"it dies: {last_words(done)}"
    said = (done.stdout + done.stderr).decode(errors="replace")
    found = UNREADABLE.search(said)
    return "" if found is None else " ".join(said[found.start() :].split())[:300]


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("ascii", "replace")
