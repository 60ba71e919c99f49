"""Which headers a process can import ahead of their texts."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from leanq.lean.environment import Environment
from leanq.lean.run.files import is_ours, keep, open_regular, read_kept
from leanq.lean.text import can_act, header_statements, split_header

# No tokenizer takes anything in it for a command, so nothing can hide in it.
_PLAIN_HEADER = re.compile(
    r"(?:module\n)?(?:prelude\n)?"
    r"(?:(?:public )?(?:meta )?import (?:all )?"
    r"[A-Za-z_][A-Za-z0-9_']*(?:\.[A-Za-z_][A-Za-z0-9_']*)*\n)*",
    re.ASCII,
)
# All modules of a large library, each in a line. It is one of a message's parts.
_MOST_HEADER_CHARS = 64 << 10
# libuv's loop runs in a thread of the zygote, which forks lack.
_NEEDS_LOOP = ("uv", "async", "timer", "socket", "signal", "tcp", "udp", "dns", "http", "sleep")
# Nothing else is done meanwhile; so much takes some 50 ms.
_MOST_CHARS_READ = 64 << 10


def forkable_header(environment: Environment, code: str) -> str | None:
    """Returns the header that a zygote can import for this text; None if Lean has to start for it.
    Lean compares it with the text's own, so a misread header only costs an import."""
    header = split_header(code)
    if len(header.text) > _MOST_HEADER_CHARS:
        return None
    text = "".join(f"{words}\n" for words, _ in header_statements(header))
    if not _PLAIN_HEADER.fullmatch(text) or _needs_loop(code[header.end_offset :]):
        return None
    return None if environment.missing(header) else text


def _needs_loop(text: str) -> bool:
    """Returns whether a text has a program that may wait for libuv's loop."""
    # A pattern would take a second for each few megabytes, in which nothing else is done.
    lower = text.lower()
    if not any(word in lower for word in _NEEDS_LOOP):
        return False
    return len(text) > _MOST_CHARS_READ or can_act(text)


# The headers that an environment's texts will have, as was said before its first text.
#
# ``leanq env prepare --header`` notes them in the cache folder. The builder of an image names them
# in a file beside the compiled modules, since a volume may hide the image's cache folder. A worker
# preloads them where the fleet knows of no texts.

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
