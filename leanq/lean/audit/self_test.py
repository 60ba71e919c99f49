"""Whether the judge is one to rely on here: what it is tested with, and the memory of a pass.

The test tells whether Lean's functions are the ones that the judge takes them for. That is the same
for the same bytes of Lean's libraries, the same code of leanq's, the same Python and machine; so a
pass is kept in the cache folder under a hash of all these. A failure never is. Whoever can write
this user's files to that folder can change the compiled Core there as well.

All functions block.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from leanq.lean.audit.image import Image
from leanq.lean.environment import Environment
from leanq.lean.hashes import File, content_hashes, hash_bytes, keep, read_kept

HONEST = """prelude
inductive LeanqFalse : Prop
inductive LeanqTrue : Prop where | intro : LeanqTrue
axiom leanqAssumed : LeanqFalse
theorem leanqTrue : LeanqTrue := LeanqTrue.intro
theorem leanqSame (p : Prop) (h : p) : p := h
"""
"""A text whose compiled file the judge has to accept."""

_PACKAGE = Path(__file__).resolve().parents[2]
_PASSED = b"passed"

_passed: set[Libraries] = set()

Libraries = tuple[str, tuple[File, ...]]
"""A version of Lean, and its libraries as they were found."""


def libraries_of(environment: Environment) -> Libraries:
    """What the judge's kernel comes from, as it is at this moment; not read."""
    toolchain = environment.toolchain
    files: list[File] = []
    with contextlib.suppress(OSError):
        files = [File.at(path) for path in toolchain.shared_libraries]
    return toolchain.version, tuple(files)


class PassMemory:
    """Where the pass of one environment's judge is kept.

    Args:
        environment: whose libraries and cache folder it is.
        libraries: as they were before the test.
    """

    def __init__(self, environment: Environment, libraries: Libraries) -> None:
        self._cache, self._libraries = environment.cache / "judge", libraries
        self._path: Path | None = None

    def is_kept(self) -> bool:
        """Whether just this judge has passed its test, in this process or in another."""
        if self._libraries in _passed:
            return True
        try:
            found = read_kept(self._file()) == _PASSED
        except OSError:
            return False
        if found:
            _passed.add(self._libraries)
        return found

    def keep(self) -> None:
        """Notes that it has passed."""
        _passed.add(self._libraries)
        with contextlib.suppress(OSError):
            keep(self._file(), _PASSED)

    def forget(self) -> None:
        """Notes that it has failed."""
        _passed.discard(self._libraries)
        with contextlib.suppress(OSError):
            self._file().unlink(missing_ok=True)

    def _file(self) -> Path:
        if self._path is None:
            version, libraries = self._libraries
            hashes = content_hashes(libraries, self._cache / "libraries.json")
            words = [version, *(hashes[file.path] for file in libraries), sys.version, *os.uname()]
            key = hash_bytes("\0".join([*words, _hash_of_code()]).encode()).hex()
            self._path = self._cache / f"{key[:32]}.passed"
        return self._path


def forged(honest: bytes) -> Sequence[bytes]:
    """Files that are wrong in one place each, from the compiled `HONEST`."""
    image = Image([honest])
    constants = image.constants()
    false, true, same, recursor = (
        constants[name]
        for name in (
            ("leanqAssumed",),
            ("leanqTrue",),
            ("leanqSame",),
            ("LeanqTrue", "rec"),
        )
    )
    assert true.body is not None
    patches = [
        (true.head + 3, false.type_),  # a proof of something else
        (same.value + 2, true.body),  # another proof
        (same.value + 2, image.words[true.head + 1]),  # no expression at all
        (recursor.value + 6, 2 << 1 | 1),  # two minor premises instead of one
    ]
    return [_patched(honest, index, word) for index, word in patches]


def _patched(data: bytes, index: int, word: int) -> bytes:
    return data[: 8 * index] + struct.pack("<Q", word) + data[8 * index + 8 :]


def _hash_of_code() -> str:
    """That of everything that may have a part in a judgement, this file included."""
    files = [_PACKAGE / "errors.py", *sorted((_PACKAGE / "lean").rglob("*.py"))]
    return hash_bytes(b"".join(hash_bytes(path.read_bytes()) for path in files)).hex()
