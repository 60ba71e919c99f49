"""``leanq try``: a page about one's own Lean, library and texts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.terminals import Terminal

from leanq.lean.environment import Environment
from leanq.lean.run.plain import difference, plain_lean
from leanq.lean.sandbox.sandbox import Limits
from leanq.queue.requests import Message, Reply

LIMITS = Limits(cpu_s=60, wall_s=120, memory_bytes=2 << 30)


@pytest.fixture
def library(core: Environment, tmp_path: Path) -> Path:
    """A folder with a compiled module, as a user names it."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "Core.olean").symlink_to(core.search_path[0] / "Core.olean")
    return folder


def test_plain_lean_says_what_its_messages_and_its_end_say(core: Environment) -> None:
    texts = {
        "accepted": "theorem t (p : Prop) (h : p) : p := h",
        "incomplete": "theorem t (p : Prop) : p := sorry",
        "rejected": "theorem t (p q : Prop) (h : p) : q := h",
    }

    async def read() -> None:
        async with plain_lean(core, 2) as plain:
            for verdict, text in texts.items():
                said = await plain.read(text, LIMITS)
                assert said is not None
                assert said.verdict == verdict
                assert said.cpu_s > 0
            assert said is not None
            assert [(each.line, each.column) for each in said.messages] == [(1, 38)]
            hasty = Limits(cpu_s=60, wall_s=0.001, memory_bytes=2 << 30)
            assert await plain.read(texts["accepted"], hasty) is None

    asyncio.run(read())


def test_the_first_difference_of_messages_is_told() -> None:
    one, other = Message("error", 1, 0, "one"), Message("error", 2, 0, "other")
    note = Message("warning", 1, 0, "leanq: a note")
    assert difference([one, other], Reply("rejected", (one, other, note))) == ""
    assert "None" in difference([one, other], Reply("rejected", (one,)))
    assert difference([one, other], Reply("rejected", (other, one))).startswith("in another order")


@pytest.mark.slow
def test_texts_are_made_behind_the_library_and_both_agree(
    terminal: Terminal, library: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    done = terminal.run("try", str(library), "--out", str(page), "--json")
    assert (done.code, done.err) == (0, "")
    [seen] = done.lines
    assert seen["texts"] == seen["compared"] == 40
    assert seen["verdicts"] == {"accepted": 20, "rejected": 20}
    assert (seen["differing"], seen["differ"], seen["errors"]) == (0, [], [])
    assert {each["what"]: each["works"] for each in seen["findings"]} == dict.fromkeys(
        ("sandbox", "lean", "judge", "fork server", "first texts", "check"), True
    )
    assert all(seen[name] > 0 for name in ("first_s", "texts_per_s", "cpu_s", "lean_cpu_s"))
    assert "agrees on each, word for word" in page.read_text()
    assert terminal.is_clean()


@pytest.mark.slow
def test_the_first_texts_that_disagree_are_shown(
    terminal: Terminal, library: Path, tmp_path: Path
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(5):
        (texts / f"{number}.lean").write_text(
            f"axiom cheat_{number} (p : Prop) : p\n"
            f"theorem t_{number} (p : Prop) : p := cheat_{number} p\n"
        )
    (texts / "good.lean").write_text("theorem t (p : Prop) (h : p) : p := h\n")
    done = terminal.run("try", str(library), str(texts))
    assert done.code == 1
    assert "Of your 6 texts: 5 rejected, 1 accepted (5 forbidden_axiom)." in done.out
    assert "Plain Lean read 6 of them and disagrees on 5:" in done.out
    shown = [line for line in done.out.splitlines() if line.startswith("- ")]
    assert len(shown) == 3
    assert all("Lean accepted, leanq rejected (forbidden_axiom)" in line for line in shown)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("nowhere",), "Directory 'nowhere' does not exist"),
        ((".",), "holds neither a lakefile nor compiled modules"),
    ],
)
def test_a_folder_without_a_library_is_refused(
    terminal: Terminal, arguments: tuple[str, ...], expected: str
) -> None:
    done = terminal.run("try", *arguments)
    assert done.code in (2, 3)
    assert expected in done.err


def test_a_text_that_cannot_be_read_is_named(terminal: Terminal, library: Path) -> None:
    done = terminal.run("try", str(library), "missing.lean")
    assert (done.code, json.dumps(done.out)) == (2, '""')
    assert "missing.lean: No such file or directory" in done.err
