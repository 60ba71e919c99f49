"""Remembers for later processes the self-tests that this machine has passed.

A self-test tells whether Lean's functions are those that leanq takes them for. The answer is the
same for the same bytes of Lean's libraries, the same code of leanq's, the same Python and kernel. A
machine's name is no part of it, since each container has another one. So the cache folder keeps a
pass under a hash of all these, and never keeps a failure. A process that can write this user's
files there can change the compiled Core as well. All functions block.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from leanq.lean.environment import Environment
from leanq.lean.run.files import File, content_hashes, hash_bytes, keep, read_kept

_PACKAGE = Path(__file__).resolve().parents[2]
_PASSED = b"passed"

Libraries = tuple[str, tuple[File, ...]]
"""A version of Lean, and its libraries as they were found."""

_passed: set[tuple[str, Libraries, tuple[str, ...]]] = set()


def libraries_of(environment: Environment, paths: Sequence[Path] | None = None) -> Libraries:
    """Returns the source of Lean's functions as it is now, without reading it; the environment's
    own, if no other libraries are named."""
    toolchain = environment.toolchain
    files: list[File] = []
    with contextlib.suppress(OSError):
        files = [File.at(path) for path in paths or toolchain.shared_libraries]
    return toolchain.version, tuple(files)


class PassMemory:
    """The place of one self-test's pass in one environment, whose cache folder keeps it.
    ``libraries``: as they were before the test; ``words``: further inputs of a pass."""

    def __init__(
        self, environment: Environment, test: str, libraries: Libraries, *words: str
    ) -> None:
        self._environment, self._cache = environment, environment.cache / test
        self._libraries, self._words = libraries, words
        self._name = test, libraries, words
        self._path: Path | None = None

    def is_kept(self) -> bool:
        """Returns whether exactly this has passed its test, in this process or in another."""
        with contextlib.suppress(OSError):
            if read_kept(self._file()) == _PASSED:
                _passed.add(self._name)
        return self._name in _passed

    def holds_for(self, libraries: Libraries) -> bool:
        """Returns whether the test was of the same bytes, whose times may be others: a new hard
        link changes them, as another Python environment makes one."""
        test, _, words = self._name
        found = PassMemory(self._environment, test, libraries, *words)
        try:
            return found._file() == self._file()
        except OSError:
            return False

    def keep(self) -> None:
        """Notes that it has passed."""
        _passed.add(self._name)
        with contextlib.suppress(OSError):
            keep(self._file(), _PASSED)

    def forget(self) -> None:
        """Notes that it has failed."""
        _passed.discard(self._name)
        with contextlib.suppress(OSError):
            self._file().unlink(missing_ok=True)

    def _file(self) -> Path:
        if self._path is None:
            version, libraries = self._libraries
            hashes = content_hashes(libraries, self._cache.parent / "libraries.json")
            words = [version, *(hashes[file.path] for file in libraries), sys.version]
            words += [os.uname().sysname, *os.uname()[2:]]
            key = hash_bytes("\0".join([*words, *self._words, _hash_of_code()]).encode()).hex()
            self._path = self._cache / f"{key[:32]}.passed"
        return self._path


@cache
def _hash_of_code() -> str:
    """Returns the hash of everything that may take part in a self-test, this file included, as it
    was when this process first asked."""
    files = [_PACKAGE / "errors.py", *sorted((_PACKAGE / "lean").rglob("*.py"))]
    return hash_bytes(b"".join(hash_bytes(path.read_bytes()) for path in files)).hex()
