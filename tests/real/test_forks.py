"""Forks on a full library: each layout is served, and a fork says what plain Lean says."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.lean.forks import LIMITS, compared, everything, forked_once, opened
from support.lean.lean_texts import lean_texts
from support.lean.libraries import Library

from leanq.lean.environment import Environment, open_environment
from leanq.lean.run.fork_server import fault_of_forks
from leanq.lean.run.headers import forkable_header

PROOF = """theorem t (a b : Nat) (h : a < b) : a + 1 ≤ b := by omega
theorem u (xs : List Nat) : xs ++ [] = xs := by simp
#check t
"""
SAME_IMPORTS = (
    "import Std\n",
    "-- a remark\nimport Std\n",
    "/- one /- in another -/ é -/\r\n  import/- -/Std -- and\n\n/- -/",
)
CORE = "prelude\nimport Core\n"
PARTS = 4


def as_it_is(library: Library, folder: Path, cache: Path) -> Environment:
    return open_environment("as it is", None, lean=str(library.lean), cache=cache, environ={})


def behind_a_link(library: Library, folder: Path, cache: Path) -> Environment:
    (folder / "toolchain").symlink_to(library.lean.parents[1])
    lean = str(folder / "toolchain" / "bin" / "lean")
    return open_environment("behind a link", None, lean=lean, cache=cache, environ={})


def of_links(library: Library, folder: Path, cache: Path) -> Environment:
    """A toolchain with a program of its own, whose library is a link."""
    (folder / "own" / "bin").mkdir(parents=True)
    (folder / "own" / "lib").symlink_to(library.lean.parents[1] / "lib")
    shutil.copy2(library.lean, folder / "own" / "bin" / "lean")
    lean = str(folder / "own" / "bin" / "lean")
    return open_environment("of links", None, lean=lean, cache=cache, environ={})


def lake_project(library: Library, folder: Path, cache: Path) -> Environment:
    """A project of one module, by the lake that stands beside the library's Lean."""
    build(library, folder, "theorem own : 1 + 1 = 2 := rfl\n")
    return opened_project(library, folder, cache)


def opened_project(library: Library, folder: Path, cache: Path) -> Environment:
    lean = str(library.lean)
    return open_environment("project", folder, lean=lean, cache=cache, environ={})


def build(library: Library, folder: Path, text: str) -> None:
    """Compiles a project's one module."""
    (folder / "lakefile.toml").write_text('name = "own"\n')
    (folder / "Own.lean").write_text(f"{module(library)}{text}")
    compiled = folder / ".lake" / "build" / "lib" / "lean" / "Own.olean"
    compiled.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([library.lean, "-o", compiled, "Own.lean"], cwd=folder, check=True, timeout=60)


def module(library: Library) -> str:
    """The word with which files of the layout begin."""
    return "" if library.layout == "plain" else "module\npublic section\n"


@pytest.fixture(params=[as_it_is, behind_a_link, of_links, lake_project])
def placed(
    request: pytest.FixtureRequest, library: Library, tmp_path: Path, cache: Path
) -> Environment:
    """The library's Lean as users have it."""
    place: Callable[[Library, Path, Path], Environment] = request.param
    if place is lake_project and not (library.lean.parent / "lake").exists():
        pytest.skip("no lake beside this Lean")
    return place(library, tmp_path, cache)


async def test_every_layout_has_forks(placed: Environment) -> None:
    own = "import Own\n" if placed.project else ""
    assert await fault_of_forks(placed, own) == ""


async def test_imports_come_from_where_plain_lean_takes_them(placed: Environment) -> None:
    """A fork that imports for itself looks in the same folders in the same order."""
    texts = [f"{header}{PROOF}" for header in ("", "import Init\n", *SAME_IMPORTS)]
    if placed.project:
        texts.append(f"import Std\nimport Own\n#check own\n#print axioms own\n{PROOF}")
    assert await compared(placed, texts) == len(texts)


async def test_headers_that_differ_in_comments_share_a_process(real: Environment) -> None:
    assert {forkable_header(real, header + PROOF) for header in SAME_IMPORTS} == {"import Std\n"}
    assert forkable_header(real, PROOF) == forkable_header(real, f"/- x -/\n{PROOF}") == ""
    async with opened(real, forked=True) as lean, lean.slot() as slot:
        await forked_once(lean, SAME_IMPORTS[0])
        for header in SAME_IMPORTS:
            seen = await everything(lean, slot, header + PROOF)
            assert slot.sandbox in slot.forked.values()
            assert seen.code == 0
        assert lean.forks is not None
        # The worker's own trial has no imports.
        assert len(lean.forks.pids()) <= 2


async def test_a_project_that_is_rebuilt_is_imported_anew(
    library: Library, tmp_path: Path, cache: Path
) -> None:
    """Forks of the environment that was opened before see the module of before, or none."""
    before = lake_project(library, tmp_path, cache)
    text = "import Own\n#print own\n"
    async with opened(before, forked=True) as lean:
        await forked_once(lean, text)
        build(library, tmp_path, "theorem own : 2 + 2 = 4 := rfl\n")
        assert before.changed()
        after = opened_project(library, tmp_path, cache)
        assert after.fingerprint != before.fingerprint
        async with opened(after, forked=True) as other, other.slot() as again:
            await forked_once(other, text)
            seen = await other.run(again, text, LIMITS)
            assert "2 + 2" in seen.done.stdout.decode()


def texts_of_this_library(library: Library) -> list[str]:
    """The repository's texts, those behind Core as texts of Lean's own library."""
    texts = [text.removeprefix(CORE) for text in lean_texts()]
    if library.layout == "modular":
        texts += [f"module\n{text}" for text in texts[::5]]
    return list(dict.fromkeys(texts))


@pytest.mark.parametrize("part", range(PARTS))
async def test_every_text_of_the_repository_comes_out_the_same(
    library: Library, real: Environment, part: int
) -> None:
    assert await compared(real, texts_of_this_library(library)[part::PARTS]) > 80
