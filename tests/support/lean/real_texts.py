"""The texts of tests/real/texts, what their last lines say, and what plain Lean says of them.

Each text ends with lines about itself::

    -- accepted                      the verdict, and the reason where there is one
    -- states: add_comm, Point.ext   its theorems, in its order
    -- why: …                        only where leanq and plain Lean differ
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leanq.lean.environment import STANDARD_AXIOMS, Environment
from support.lean.libraries import has_modules
from support.paths import TESTS

FOLDER = TESTS / "real" / "texts"
LEAN_S = 300.0
_ENDING = re.compile(
    r"\n-- (?P<said>[a-z]+(?: [a-z_]+)?)\n"
    r"(?:-- states: (?P<states>.*)\n)?(?:-- why: (?P<why>.*)\n)?\Z"
)
_AXIOMS = re.compile(r"depends on axioms: \[(.*)\]", re.DOTALL)
_BUDGETS = {
    "runtime.maxHeartbeats": "exhausted heartbeats",
    "runtime.maxRecDepth": "exhausted recursion_depth",
}


@dataclass(frozen=True, slots=True)
class RealText:
    """A text, and what leanq has to say of it.

    Attributes:
        code: the text without the lines about itself.
        said: the verdict and its reason.
        states: the names of its theorems.
        why: why plain Lean says something else; empty where it says the same.
    """

    code: str
    said: str
    states: tuple[str, ...]
    why: str

    @property
    def is_module(self) -> bool:
        return self.code.startswith("module\n")


def _read(path: Path) -> RealText:
    text = path.read_text()
    found = _ENDING.search(text)
    assert found, f"{path} does not end with its verdict"
    states = tuple(found["states"].split(", ")) if found["states"] else ()
    return RealText(text[: found.start()] + "\n", found["said"], states, found["why"] or "")


TEXTS: Mapping[str, RealText] = {path.stem: _read(path) for path in sorted(FOLDER.glob("*.lean"))}


def texts_for(layout: str) -> list[str]:
    """Returns the names of the texts that are checked on a layout.

    Two layouts of one library differ in files, not in words: the second one gets what the first
    cannot import, and a fifth of the others.
    """
    if not has_modules(layout):
        return [name for name, text in TEXTS.items() if not text.is_module]
    if layout == "modular":
        return [
            name for n, (name, text) in enumerate(TEXTS.items()) if text.is_module or n % 5 == 0
        ]
    return list(TEXTS)


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """The answer of plain Lean.

    Attributes:
        said: the verdict that follows from its messages and from ``#print axioms``.
        trouble: its errors about the lines behind the text.
    """

    said: str
    trouble: tuple[str, ...]


def ask_plain(
    environment: Environment, text: RealText, statements: Mapping[str, str]
) -> PlainAnswer:
    """Asks Lean about a text, its theorems' axioms, and statements that they have to prove."""
    length = text.code.count("\n")
    code = text.code
    if text.said in ("accepted", "incomplete sorry"):
        if not text.is_module:  # where Lean refuses to print axioms
            code += "".join(f"#print axioms _root_.{name}\n" for name in text.states)
        code += "".join(
            f"example : {statement} := @_root_.{name}\n" for name, statement in statements.items()
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "text.lean")
        file.write_text(code)
        done = subprocess.run(
            [*environment.toolchain.command, "--json", str(file)],
            env=environment.process_env(),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LEAN_S,
        )
    assert done.returncode in (0, 1), done.stderr
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    own = [message for message in messages if message["pos"]["line"] <= length]
    behind = [message for message in messages if message["pos"]["line"] > length]
    axioms = {
        axiom.strip()
        for message in behind
        if (found := _AXIOMS.search(message["data"]))
        for axiom in found[1].split(",")
    }
    trouble = [message["data"] for message in behind if message["severity"] == "error"]
    return PlainAnswer(_verdict(own, axioms), tuple(trouble))


def _verdict(messages: list[dict[str, str]], axioms: set[str]) -> str:
    errors = [message for message in messages if message["severity"] == "error"]
    kinds = {message["kind"] for message in errors}
    if len(kinds) == 1 and (budget := _BUDGETS.get(*kinds)):
        return budget
    if any("unknown module prefix" in message["data"] for message in errors):
        return "rejected unknown_import"
    if errors:
        return "rejected lean_error"
    if "sorryAx" in axioms or any(message["kind"] == "hasSorry" for message in messages):
        return "incomplete sorry"
    if axioms - STANDARD_AXIOMS:
        return "rejected forbidden_axiom"
    return "accepted"
