"""Content hashes that an image brings beside its compiled modules.

A new pod has an empty cache folder, and Mathlib is gigabytes. So the image's builder hashes the
modules once, with ``python -m leanq.lean.run.baked_hashes FOLDER``. Each worker believes that list

- if the superuser or this user owns it, and no other user can write to it or to the folder;
- file by file, if size and time (to the second, as layers of images keep it) are as noted;
- unless one of a few modules, drawn anew at each start, has another content.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from leanq.lean.run.files import File, compiled_modules, hash_file, is_ours, keep, read_kept

log = logging.getLogger("leanq.lean")

NAME = ".leanq-hashes"
_CHECKED = 32
_NS = 1_000_000_000


def bake(folder: Path, files: Sequence[File]) -> None:
    """Hashes these files of the folder, and writes the list there; raises OSError."""
    rows = [(f.name, f.size, f.mtime_ns // _NS, hash_file(f.path).hex()) for f in files]
    keep(folder / NAME, json.dumps(rows, separators=(",", ":")).encode())
    if read_kept(folder / NAME) is None:
        raise PermissionError(f"cannot write {folder / NAME}")


def baked(folder: Path, files: Sequence[File]) -> Mapping[File, str]:
    """Returns the hashes that the folder brings, for files that are unchanged; raises OSError."""
    text = read_kept(folder / NAME)
    if text is None or not is_ours(os.stat(folder)):
        return {}
    try:
        noted = {(name, size, at_s): digest for name, size, at_s, digest in json.loads(text)}
    except (ValueError, TypeError):
        return {}
    found = {
        file: noted[place]
        for file in files
        if (place := (file.name, file.size, file.mtime_ns // _NS)) in noted
    }
    for file in random.sample(list(found), min(_CHECKED, len(found))):
        if hash_file(file.path).hex() != found[file]:
            log.warning(
                "%s is not as %s says; all modules are read. Make the list anew where the image "
                "is built: python -m leanq.lean.run.baked_hashes %s",
                file.path,
                folder / NAME,
                folder,
            )
            return {}
    return found


def main() -> None:
    """Hashes the compiled modules of the folder that the command names."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m leanq.lean.run.baked_hashes FOLDER, that of compiled modules")
    folder = Path(sys.argv[1])
    files = compiled_modules(folder)
    try:
        bake(folder, files)
    except OSError as error:
        sys.exit(f"leanq: {error}")
    print(f"{len(files)} modules of {folder} are hashed")


if __name__ == "__main__":
    main()
