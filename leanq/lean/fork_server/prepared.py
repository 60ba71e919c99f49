"""The headers that an environment's texts will have, as was said before its first text.

``leanq env prepare --header`` notes them in the cache folder. The builder of an image names them in
a file beside the compiled modules, since a volume may hide the image's cache folder. A worker
preloads them where the fleet knows of no texts.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from leanq.lean.environment import Environment
from leanq.lean.files import open_regular
from leanq.lean.fork_server.headers import forkable_header
from leanq.lean.hashes import is_ours, keep, read_kept

NAME = ".leanq-headers"
"""Beside compiled modules: a header in each line, such as ``import Mathlib``."""

_MOST_BYTES = 64 << 10


def prepared(environment: Environment) -> list[str]:
    """Returns the headers that were named, in their order, and can be preloaded."""
    found = _noted(environment)
    for folder in environment.folders():
        for line in _lines(folder / NAME):
            header = forkable_header(environment, f"{line}\n")
            if header is not None:
                found.append(header)
    return list(dict.fromkeys(found))


def note(environment: Environment, header: str) -> None:
    """Notes a header of :func:`forkable_header` for workers to come."""
    noted = [*_noted(environment), header]
    keep(_memory(environment), json.dumps(list(dict.fromkeys(noted))).encode())


def _noted(environment: Environment) -> list[str]:
    return [*json.loads(read_kept(_memory(environment)) or b"[]")]


def _memory(environment: Environment) -> Path:
    return environment.cache / "headers" / f"{environment.fingerprint[:32]}.json"


def _lines(path: Path) -> list[str]:
    """Returns the lines of a file that no other user can have written."""
    with contextlib.suppress(OSError, UnicodeDecodeError), open_regular(path) as file:
        if is_ours(os.fstat(file.fileno())):
            text = file.read(_MOST_BYTES).decode()
            return [line.strip() for line in text.splitlines() if line.strip()]
    return []
