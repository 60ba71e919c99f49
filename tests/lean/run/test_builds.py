"""Libraries that another Lean built, and damaged ones, are never a text's fault."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.lean.search_paths import as_opened
from support.lean.sites import Site, check

from leanq.errors import ToolchainError
from leanq.lean.environment import Environment, open_environment
from leanq.lean.run.toolchain import Build, build_of, check_project
from leanq.queue.requests import Request

HEAD = "prelude\nimport Core\nimport Lib\n"
HONEST = f"{HEAD}theorem t (p : Prop) (h : p) : p := h\n"


@pytest.fixture
def library(core: Environment, tmp_path: Path) -> Path:
    """Two compiled modules of this Lean's, in a folder of their own."""
    folder = tmp_path / "library"
    (folder / "Lib").mkdir(parents=True)
    for name in ("Lib", "Lib/Deep"):
        (folder / f"{name}.lean").write_text(
            f"prelude\nimport Core\ntheorem {name[-3:]} (p : Prop) : p → p := fun h => h\n"
        )
        command = [*core.toolchain.command, "-o", f"{name}.olean", f"{name}.lean"]
        subprocess.run(command, env=core.process_env(), cwd=folder, check=True)
    return folder


def foreign(data: bytes) -> bytes:
    """The same file as Lean 4.30 would name it."""
    return data[:7] + b"4.30.0".ljust(33, b"\0") + b"f" * 40 + data[80:]


DAMAGES = {
    "of another Lean": foreign,
    "cut short": lambda data: data[:40],
    "zeros": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
    "zeros behind the header": lambda data: data[:96] + bytes(len(data) - 96),
    "without an end": lambda data: data[:-64],
}


def test_the_build_of_a_module(library: Path, core: Environment) -> None:
    own = build_of(str(library / "Lib.olean"))
    assert own == Build(core.toolchain.version, core.toolchain.commit)
    (library / "Lib.olean").write_bytes(foreign((library / "Lib.olean").read_bytes()))
    assert str(build_of(str(library / "Lib.olean"))) == "Lean 4.30.0 (commit ffffffffffff)"
    (library / "Lib.olean").write_bytes(b"olean")
    assert build_of(str(library / "Lib.olean")) is None


@pytest.mark.parametrize("name", ["Lib", "Lib/Deep"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_environment_whose_library_cannot_be_read_is_refused(
    library: Path, cache: Path, damage: str, name: str
) -> None:
    file = library / f"{name}.olean"
    open_environment("lib", library, cache=cache, environ={})
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.raises(ToolchainError, match=r"cannot read it") as refused:
        open_environment("lib", library, cache=cache, environ={})
    assert ("Lean 4.30.0" in str(refused.value)) == (damage == "of another Lean")
    assert "4.35.0" in str(refused.value)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["lean", "server"])
async def test_a_library_that_is_damaged_later_rejects_no_text(
    site: Site, library: Path, cache: Path, damage: str, kind: str
) -> None:
    site.kind = kind
    opened = open_environment("lib", library, cache=cache, environ={})
    opened = replace(opened, options=site.core.options)
    driver = await site.one(lambda: as_opened(opened))
    assert (await driver.run(check(HONEST))).verdict == "accepted"
    file = library / "Lib.olean"
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    for request in (
        check(HONEST),
        Request("verify", code=HONEST, target=HONEST.replace(":= h", ":= sorry")),
        Request("verify", code="theorem t : x := y", target=HONEST.replace(":= h", ":= sorry")),
    ):
        reply = await driver.run(request)
        assert (reply.verdict, reply.reason) == ("unjudged", "library_unreadable"), reply
        assert "Lean cannot read a library that the text imports" in reply.messages[-1].text


async def test_a_step_behind_a_library_that_is_damaged_later(
    site: Site, library: Path, cache: Path
) -> None:
    opened = replace(
        open_environment("lib", library, cache=cache, environ={}), options=site.core.options
    )
    driver = await site.open(lambda: as_opened(opened))
    (sorry,) = (await driver.run(check(HONEST.replace(":= h", ":= by sorry")))).sorries
    file = library / "Lib.olean"
    file.write_bytes(bytes(file.stat().st_size))
    reply = await driver.run(Request("step", state=sorry.state, tactic="exact h"))
    assert (reply.verdict, reply.reason) == ("unjudged", "library_unreadable"), reply


async def test_a_text_that_ends_lean_itself_is_none_of_the_librarys(site: Site) -> None:
    reply = await (await site.driver(site.shell())).run(check("kill -SEGV $$"))
    assert (reply.verdict, reply.reason) == ("crashed", "process_died")


async def test_a_text_that_says_so_itself_is_rejected(site: Site) -> None:
    driver = await site.driver()
    code = "prelude\nimport Core\ntheorem «failed to read file 'x'» : nonsense := by skip\n"
    reply = await driver.run(check(code))
    assert (reply.verdict, reply.reason) == ("rejected", "lean_error")


@pytest.mark.parametrize(
    ("asks", "is_refused"),
    [
        ("leanprover/lean4:v4.35.0\n", False),
        ("leanprover/lean4:v4.30.0\n", True),
        ("4.35.0-rc1", True),
        ("leanprover/lean4:nightly-2026-09-01", False),
    ],
)
def test_a_project_that_asks_for_another_lean(
    core: Environment, tmp_path: Path, asks: str, is_refused: bool
) -> None:
    (tmp_path / "lean-toolchain").write_text(asks)
    if not is_refused:
        check_project("p", core.toolchain, tmp_path)
        return
    with pytest.raises(ToolchainError, match=r"asks for Lean 4\.3.*Lean 4\.35\.0"):
        check_project("p", core.toolchain, tmp_path)
