"""A program in Lean's place that speaks the tiny language of the stand-in for the REPL.

It reads a text from its standard input, prints messages as ``lean --json`` does, and writes what
``-o`` names where there is no error. Misbehaviour that a text asks for is the REPL's alone.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import repl_standin_script as script

_HEADER = re.compile(r"(?:[ \t]*(?:prelude|module|(?:public |meta )*import\b.*)?\n)*")


def main() -> None:
    """Elaborate the standard input."""
    given = sys.stdin.read()
    header = _HEADER.match(given)
    assert header
    text = "\n" * header[0].count("\n") + given[header.end() :]
    if "Missing" in header[0]:
        text += "\n#error unknown module prefix 'Missing'"
    text = script.without_mischief(text)
    notes, _ = script.elaborate(text, set(), "0", "declaration uses `sorry`")
    messages = [note.message(text) for note in notes]
    for message in messages:
        severity = {"info": "information"}.get(message["severity"], message["severity"])
        print(json.dumps({**message, "severity": severity}))
    if any(message["severity"] == "error" for message in messages):
        sys.exit(1)
    if "-o" in sys.argv:
        Path(sys.argv[sys.argv.index("-o") + 1]).touch()


if __name__ == "__main__":
    main()
