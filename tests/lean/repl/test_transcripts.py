"""What the real REPL has answered, answered again through the driver: recorded dialogues.

``LEANQ_TRANSCRIPTS`` names a folder of them: ``NAME.in`` with the commands, ``NAME.expected.out``
with the answers. A stand-in plays the REPL's part, in the sandbox, and cuts all that it writes at
random places.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from support.lean.sandboxes import GENEROUS, PYTHON
from support.lean.sites import STANDIN
from support.paths import TRANSCRIPTS

from leanq.errors import ReplError
from leanq.lean.repl.protocol import Elaborated, Refused, Stepped, read_answer
from leanq.lean.repl.session import Session
from leanq.lean.sandbox.sandbox import Sandbox

# Between them all sets of fields that a recorded command or answer has.
QUICK = {
    *("file2", "file_env", "infotree", "infotree_theorem", "name_generator"),
    *("pickle_environment_with_imports", "pickle_proof_state_1", "pickle_proof_state_env"),
    "self_proof_check",
}


def recorded() -> list[Any]:
    """The dialogues whose answers were recorded."""
    found = sorted(TRANSCRIPTS.glob("*.in"))
    names = [path.stem for path in found if path.with_suffix(".expected.out").exists()]
    skip = pytest.mark.skip(
        reason=f"there are no transcripts in {TRANSCRIPTS}; see LEANQ_TRANSCRIPTS"
    )
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in names if name not in QUICK]
    return [*filter(QUICK.__contains__, names), *slow] or [pytest.param("none", marks=skip)]


def commands(name: str) -> list[str]:
    """The commands as the REPL reads them: lines up to a blank one, joined without their ends."""
    text = (TRANSCRIPTS / f"{name}.in").read_text()
    blocks: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line.strip():
            blocks[-1].append(line.rstrip())
        else:
            blocks.append([])
    joined = ("".join(block) for block in blocks if block)
    return [block for block in joined if not block.startswith(("#", "--"))]


def answers(name: str) -> list[dict[str, Any]]:
    """The recorded answers, in order."""
    text = (TRANSCRIPTS / f"{name}.expected.out").read_text()
    decoder, found, at = json.JSONDecoder(), [], 0
    while (at := text.find("{", at)) >= 0:
        answer, at = decoder.raw_decode(text, at)
        found.append(answer)
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    """One for all, that can read the transcripts and the stand-in."""
    made = await Sandbox.open(
        readable=[*PYTHON, STANDIN.parent, *([TRANSCRIPTS] if TRANSCRIPTS.exists() else [])]
    )
    yield made
    await made.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", recorded())
async def test_the_driver_reproduces_it(sandbox: Sandbox, name: str) -> None:
    argv = [sys.executable, "-S", str(STANDIN), "--split", "--replay", str(TRANSCRIPTS / name)]
    session = await Session.start(sandbox, argv, {})
    expected = answers(name)
    try:
        for command, answer in zip(commands(name), expected, strict=False):
            assert await session.exchange(json.loads(command), GENEROUS) == answer
            assert_is_understood(answer)
            assert session.usable
        # A command that ended the REPL has no answer, and none is made up.
        for command in commands(name)[len(expected) :]:
            with pytest.raises(ReplError, match="ended"):
                await session.exchange({"unread": command}, GENEROUS)
    finally:
        await session.end()


def assert_is_understood(answer: dict[str, Any]) -> None:
    """Every field of it, as a value, except for those that are not asked for."""
    read = read_answer(answer)
    if isinstance(read, Refused):
        assert {"message": read.text} == answer
        return
    messages = answer.get("messages", [])
    assert [message.text for message, _ in read.messages] == [each["data"] for each in messages]
    for (message, _), each in zip(read.messages, messages, strict=True):
        assert (message.line, message.column) == (each["pos"]["line"], each["pos"]["column"])
        end = each["endPos"] and (each["endPos"]["line"], each["endPos"]["column"])
        assert (message.end_line is None) == (end is None)
        assert end is None or end == (message.end_line, message.end_column)
    told = [
        {"goal": each.goal, "proofState": each.proof_state}
        | ({"pos": {"line": each.at[0], "column": each.at[1]}} if each.at else {})
        for each in read.sorries
    ]
    for each in answer.get("sorries", []):
        each.pop("endPos", None)
    assert told == answer.get("sorries", [])
    if isinstance(read, Stepped):
        assert read.status == answer.get("proofStatus", "")
        assert list(read.goals) == answer["goals"]
        assert list(read.traces) == answer.get("traces", [])
    else:
        assert isinstance(read, Elaborated)
        assert read.env == answer["env"]
