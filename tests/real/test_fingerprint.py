"""The fingerprint of an environment covers every file that Lean opens on an import."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from support.lean.libraries import Library
from support.required import missing

from leanq.lean.environment import open_environment
from leanq.lean.run.files import compiled_modules

_OPENED = re.compile(r'open(?:at)?\([^"]*"([^"]+)"[^)]*\) = \d')


def opened_by_lean(library: Library, text: str, search_path: Path, scratch: Path) -> set[Path]:
    """Returns the files below the library and the search path that Lean opens for a text."""
    if not shutil.which("strace"):
        missing("strace")
    (scratch / "text.lean").write_text(text)
    log = scratch / "opened"
    subprocess.run(
        ["strace", "-f", "-qq", "-e", "trace=open,openat", "-o", log, library.lean, "text.lean"],
        cwd=scratch,
        env={"LEAN_PATH": str(search_path)},
        check=True,
        timeout=300,
    )
    folders = (library.folder.resolve(), search_path)
    paths = (Path(path) for path in _OPENED.findall(log.read_text()))
    return {path for path in paths if any(path.is_relative_to(folder) for folder in folders)}


def test_every_file_that_an_import_opens_is_hashed(
    library: Library, tmp_path: Path, cache: Path
) -> None:
    """Those of a project by their contents; Lean's version stands for its own library."""
    word = "" if library.layout == "plain" else "module\n"
    modules = tmp_path / "modules"
    modules.mkdir()
    (tmp_path / "Own.lean").write_text(f"{word}theorem own (a : Nat) : a + 0 = a := rfl\n")
    command = [library.lean, "-o", modules / "Own.olean", "Own.lean"]
    if word:
        command += ["-i", modules / "Own.ilean"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    if word:  # which Lake has written beside them
        for part in (".ir", ".ir.sig"):
            if not (modules / f"Own{part}").exists():
                shutil.copy(library.folder / f"Compat{part}", modules / f"Own{part}")
    text = "import Std\nimport Own\ntheorem t (a : Nat) : a + 0 = a := by simp\n"
    opened = opened_by_lean(library, text, modules, tmp_path)

    for folder in (modules, library.folder):
        hashed = {Path(file.path).resolve() for file in compiled_modules(folder)}
        found = {path.resolve() for path in opened if path.is_relative_to(folder.resolve())}
        assert {path for path in found if path.suffix != ".so"} <= hashed

    def fingerprint() -> str:
        environment = open_environment(
            "own", modules, lean=str(library.lean), cache=cache, environ={}
        )
        return environment.fingerprint

    own = sorted(path for path in opened if path.is_relative_to(modules))
    assert len(own) == (5 if word else 1), own
    for path in own:
        before = fingerprint()
        path.write_bytes(path.read_bytes() + b"\0")
        assert fingerprint() != before, path
