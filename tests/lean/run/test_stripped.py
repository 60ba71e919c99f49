"""Lean whose library lacks symbols, as those of 4.29 to 4.32 may: the fork server says which, and
texts are checked without it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from support.lean.other_lean import COMMIT, open_other, other_lean
from support.lean.sites import new_site
from support.waiting import eventually

from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment
from leanq.lean.goals.prefixes import StandingPrefixes
from leanq.lean.run.fork_server import ForkRules, ForkServer, fault_of_forks
from leanq.lean.run.process import Lean
from leanq.lean.run.toolchain import wheel_toolchain
from leanq.lean.sandbox.sandbox import Limits
from leanq.queue.requests import Request

pytestmark = pytest.mark.slow

LIMITS = Limits(cpu_s=60.0, wall_s=100.0, memory_bytes=2 << 30, scratch_bytes=64 << 20)
IMPORT = "l_Lean_importModules"
EMPTY = "l_Lean_mkEmptyEnvironment"
PARSE = "l___private_Lean_Language_Lean_0__Lean_Language_Lean_process_parseCmd"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_lean(tmp_path_factory.mktemp("whole") / "toolchain")


@pytest.fixture
def environment(whole: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Environment:
    """A toolchain whose library exports no function of this name."""
    prefix = tmp_path / "toolchain"
    shutil.copytree(whole.parents[1], prefix)
    library = prefix / "lib" / "lean" / "libleanshared.so"
    data, name = bytearray(library.read_bytes()), f"\0{request.param}\0".encode()
    # A fork does not run the program, which changes the commit in memory.
    commit = wheel_toolchain({}).commit.encode()
    at = data.index(commit)
    data[at : at + len(COMMIT)] = COMMIT.encode()
    at = data.index(name)
    while at >= 0:
        data[at + 1 : at + 2] = b"?"
        at = data.find(name, at)
    library.write_bytes(data)
    return open_other(prefix / "bin" / "lean", tmp_path / "cache")


@pytest.mark.parametrize("environment", [IMPORT], indirect=True)
async def test_a_symbol_that_is_missing_is_named_and_texts_are_checked(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await fault_of_forks(environment, environment.header) == (
        f"this Lean has no symbol {IMPORT}"
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with new_site(environment, tmp_path) as site:
        rules = ForkRules(preload_after=1, compare_every=0)
        driver: LeanDriver = await site.driver(forks=rules)
        check = Request(op="check", code="theorem t (p : Prop) (h : p) : p := h\n")
        assert (await driver.run(check)).verdict == "accepted"
        await eventually(lambda: "degraded" in driver.about, deadline_s=100.0)
        assert f"has no symbol {IMPORT}" in str(driver.about["degraded"])
        assert (await driver.run(check)).verdict == "accepted"


@pytest.mark.parametrize("environment", [EMPTY], indirect=True)
async def test_forks_do_without_what_only_saves_time(environment: Environment) -> None:
    assert await fault_of_forks(environment, environment.header) == ""


@pytest.mark.parametrize("environment", [PARSE], indirect=True)
async def test_forks_serve_where_none_stands_behind_a_prefix(environment: Environment) -> None:
    forks = ForkServer(environment, ForkRules(preload_after=1, compare_every=0))
    lean = Lean(environment, slots=1, forks=forks)
    standing = StandingPrefixes(environment, forks, slots=1)
    source = "theorem first (p : Prop) (h : p) : p := h\ntheorem t : True := by\n  "
    code = f"{source}exact True.intro\n"
    try:
        await lean.open()
        async with lean.slot() as slot:
            run = await lean.run(slot, code, LIMITS, compile_=False)
        await standing.expect("source", source, code, lean.command(), run.done, LIMITS)
        await standing.settled()
        assert not standing.holds("source")
        assert not forks.unavailable
    finally:
        await standing.close()
        await lean.close()
    assert await fault_of_forks(environment, environment.header) == ""
