"""The scripts of the queue, as they are sent."""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib import resources

# What all scripts share, and what one needs beside that.
_SHARED = ("library", "sharing")
_PARTS = {"claim": ("settling",)}


@cache
def script_text(name: str) -> str:
    """The script as it is sent: its first line (the flags), what it shares, and its own text."""
    folder = resources.files("leanq.queue") / "lua"
    flags, _, text = (folder / f"{name}.lua").read_text().partition("\n")
    parts = (*_SHARED, *_PARTS.get(name, ()))
    shared = [(folder / f"{part}.lua").read_text() for part in parts]
    return "\n".join((flags, *shared, text))


@cache
def digest_of(text: str) -> str:
    """The name that a server knows a script by, once it has seen it."""
    return sha1(text.encode(), usedforsecurity=False).hexdigest()
