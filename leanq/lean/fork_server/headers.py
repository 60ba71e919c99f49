"""Which texts a fork can serve, by their header and what stands behind it."""

from __future__ import annotations

import re

from leanq.lean.environment import Environment
from leanq.lean.syntax import split_header

# A header that nothing can be hidden in: whatever stands here, no tokenizer takes for a command.
# Possessive, or a hostile header would have two readings for each of its lines, and all of them
# would be tried. `all` behind `import` is always the modifier, as for Lean.
_PLAIN_HEADER = re.compile(
    r"\s*+(?=\S)(?:module\s++)?+(?:prelude\s++)?+"
    r"(?:(?:public\s++)?+(?:meta\s++)?+import\s++(?:all\s++)?+"
    r"[A-Za-z_][A-Za-z0-9_']*+(?:\.[A-Za-z_][A-Za-z0-9_']*+)*+\s++)*+",
    re.ASCII,
)
# All modules of a large library, each in a line. It is one of a message's parts.
_MOST_HEADER_CHARS = 64 << 10
# libuv's loop runs in a thread of the zygote, which no fork has.
_NEEDS_LOOP = ("uv", "async", "timer", "socket", "signal", "tcp", "udp", "dns", "http", "sleep")


def forkable_header(environment: Environment, code: str) -> str | None:
    """The header that a zygote can have imported for this text; None: Lean has to start for it."""
    header = split_header(code)
    text = header.text + "\n"
    if len(text) > _MOST_HEADER_CHARS or not _PLAIN_HEADER.fullmatch(text):
        return None
    # A pattern would take a second for each few megabytes, in which nothing else is done.
    rest = code[len(header.text) :].lower()
    if any(word in rest for word in _NEEDS_LOOP):
        return None
    return None if environment.missing(header) else text
