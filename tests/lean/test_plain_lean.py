"""What leanq says of a text beside what plain Lean says: the same messages, at the same places."""

from __future__ import annotations

import json
import subprocess
import tempfile

import pytest
from msgspec.structs import replace
from support.lean.eager_forks import EagerForkServer
from support.lean.sites import Site, check

from leanq.lean import driver as lean_driver
from leanq.lean.environment import Environment
from leanq.lean.run.documents import DocumentRules
from leanq.queue.requests import Message

HEADER = "prelude\nimport Core\n"
TEXTS = {
    "options": "set_option autoImplicit true\n#where\n",
    "fields at the end": "structure A where\n  x : Prop\ntheorem t : A where\n",
    "no newline": "structure A where\n  x : Prop\ndef t : A where\n  y := 1",
    "blanks at the end": "structure A where\n  x : Prop\ndef t : A where\n  y := 1\n\n  -- é\n\n",
    "a term is missing": "theorem t (p : Prop) : p :=\n",
    "a proof is missing": "theorem t (p : Prop) : p := by\n",
    "an open comment": "theorem t (p : Prop) (h : p) : p := h\n/- open",
    "a doc comment": "theorem t (p : Prop) (h : p) : p := h\n/-- of what? -/\n",
    "a warning": "theorem t (p : Prop) : p := by\n  sorry\n  -- in the end\n",
    "an attribute": "@[simp]\n",
}


def plain(environment: Environment, text: str) -> list[Message]:
    """Returns what Lean prints by itself."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*environment.toolchain.command, *environment.options, "--json", "--stdin"],
            input=text,
            env=environment.process_env(),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=100.0,
        )
    found = []
    for each in map(json.loads, done.stdout.splitlines()):
        begin, end = each["pos"], each["endPos"] or {"line": None, "column": None}
        message = Message(each["severity"], begin["line"], begin["column"], each["data"])
        found.append(replace(message, end_line=end["line"], end_column=end["column"]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", ["started", "forked", "read by its server"])
async def test_leans_messages_are_those_of_plain_lean(
    site: Site, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "forked":
        monkeypatch.setattr(lean_driver, "ForkServer", EagerForkServer)
        driver = await site.driver()
    else:
        rules = DocumentRules(served_from=1 << 30 if way == "started" else 1)
        driver = await site.driver(forks=None, documents=rules)
    for name, text in TEXTS.items():
        reply = await driver.run(check(HEADER + text))
        assert reply.spent
        assert reply.spent.is_forked or way != "forked", name
        said = [message for message in reply.messages if not message.text.startswith("leanq:")]
        expected = plain(driver.opened.lean.environment, HEADER + text)
        assert expected, name
        assert said == expected, name
