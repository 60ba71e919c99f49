"""The judge's self-test is run once for the same libraries, code, Python and machine."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.paths import ROOT

from leanq.lean.environment import Environment
from leanq.lean.judge.judge_client import Judges
from leanq.lean.run import pass_memory
from leanq.lean.run.olean import read_parts
from leanq.lean.run.pass_memory import PassMemory, libraries_of
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import split_header


@pytest.fixture
def environment(core: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """One whose Lean is in two libraries, with a cache of its own; nothing has passed yet."""
    monkeypatch.setattr(pass_memory, "_passed", set())
    folder = tmp_path / "lib" / "lean"
    folder.mkdir(parents=True)
    (folder / "libleanshared.so").write_bytes(b"one")
    (folder / "libleanshared_1.so").write_bytes(b"two")
    toolchain = replace(core.toolchain, source="option", prefix=tmp_path)
    return replace(core, toolchain=toolchain, cache=tmp_path / "cache")


def is_kept(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a process that starts now finds a pass."""
    monkeypatch.setattr(pass_memory, "_passed", set())
    return PassMemory(environment, "judge", libraries_of(environment)).is_kept()


def kept_file(environment: Environment) -> Path:
    memory = PassMemory(environment, "judge", libraries_of(environment))
    memory.keep()
    [file] = (environment.cache / "judge").glob("*.passed")
    return file


def test_a_pass_is_found_by_the_next_process_and_can_be_forgotten(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_kept(environment, monkeypatch)
    kept_file(environment)
    assert is_kept(environment, monkeypatch)
    PassMemory(environment, "judge", libraries_of(environment)).forget()
    assert not is_kept(environment, monkeypatch)


@pytest.mark.parametrize("what", ["main library", "other library", "lean", "python", "code"])
def test_a_pass_is_one_of_these_libraries_this_code_and_this_python(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    kept_file(environment)
    match what:
        case "main library":
            (tmp_path / "lib/lean/libleanshared.so").write_bytes(b"eno")
        case "other library":
            (tmp_path / "lib/lean/libleanshared_1.so").write_bytes(b"owt")
        case "lean":
            toolchain = replace(environment.toolchain, version="4.35.1")
            environment = replace(environment, toolchain=toolchain)
        case "python":
            monkeypatch.setattr(sys, "version", "another")
        case _:
            monkeypatch.setattr(pass_memory, "_hash_of_code", lambda: "another")
    assert not is_kept(environment, monkeypatch)


@pytest.mark.parametrize("what", ["writable", "foreign", "a link", "damaged", "a folder"])
def test_what_another_user_could_have_written_is_no_pass(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str
) -> None:
    file = kept_file(environment)
    assert is_kept(environment, monkeypatch)
    match what:
        case "writable":
            file.chmod(0o666)
        case "foreign":
            if os.geteuid():
                pytest.skip("only the superuser can give a file away")
            os.chown(file, 12345, 12345)
        case "a link":
            file.rename(tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere")
        case "damaged":
            file.write_bytes(file.read_bytes()[:-1])
        case _:
            file.unlink()
            file.mkdir()
    assert not is_kept(environment, monkeypatch)


def test_a_pass_under_another_name_is_none(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever can write to its folder can rename the pass of another library."""
    first = kept_file(environment)
    (tmp_path / "lib/lean/libleanshared.so").write_bytes(b"eno")
    PassMemory(environment, "judge", libraries_of(environment)).keep()
    assert is_kept(environment, monkeypatch)
    [second] = {*first.parent.glob("*.passed")} - {first}
    first.replace(second)
    assert not is_kept(environment, monkeypatch)


def test_a_cache_that_cannot_be_written_costs_time_only(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = replace(environment, cache=Path("/dev/null/cache"))
    memory = PassMemory(environment, "judge", libraries_of(environment))
    memory.keep()
    assert memory.is_kept()
    memory.forget()
    assert not is_kept(environment, monkeypatch)


@pytest.mark.slow
async def test_a_remembered_pass_is_no_test_and_doctor_runs_it_all_the_same(
    core: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_memory, "_passed", set())
    environment = replace(core, cache=tmp_path)
    judges = Judges(environment, slots=1)
    try:
        assert await judges.unavailable() == ""
    finally:
        await judges.close()
    # From now on the test fails wherever it is run.
    monkeypatch.setattr("leanq.lean.judge.judge_client.forged", lambda honest: [honest])
    monkeypatch.setattr(pass_memory, "_passed", set())
    judges = Judges(environment, slots=1)
    try:
        assert await judges.unavailable() == ""
        assert "expected kernel_refused" in await judges.self_test()
    finally:
        await judges.close()
    again = Judges(environment, slots=1)
    try:
        assert "expected kernel_refused" in await again.unavailable()
    finally:
        await again.close()
    assert list((tmp_path / "judge").glob("*.passed")) == []


async def test_a_library_that_was_replaced_since_its_test_judges_nothing(
    environment: Environment, tmp_path: Path
) -> None:
    PassMemory(environment, "judge", libraries_of(environment)).keep()
    judges = Judges(environment, slots=1)
    try:
        assert await judges.unavailable() == ""
        (tmp_path / "lib/lean/libleanshared_1.so").write_bytes(b"three")
        limits = Limits(cpu_s=60.0, wall_s=60.0, memory_bytes=1 << 30)
        honest = environment.find_olean("Core")
        assert honest
        file = read_parts(honest)
        found = await judges.judge(split_header("prelude\n"), file, ("", ""), limits)
        assert (found.proved, found.rule) == (False, "")
        assert "another one than its self-test was run with" in found.unavailable
    finally:
        await judges.close()


async def test_a_library_that_got_another_link_is_the_same(
    environment: Environment, tmp_path: Path
) -> None:
    """As where an installer links the same wheel into another Python environment."""
    PassMemory(environment, "judge", libraries_of(environment)).keep()
    judges = Judges(environment, slots=1)
    library = tmp_path / "lib/lean/libleanshared.so"
    limits = Limits(cpu_s=60.0, wall_s=60.0, memory_bytes=1 << 30)
    honest = environment.find_olean("Core")
    assert honest
    file = read_parts(honest)
    try:
        assert await judges.unavailable() == ""
        before = libraries_of(environment)
        os.link(library, tmp_path / "another environment's")
        assert libraries_of(environment) != before
        for _ in range(2):
            found = await judges.judge(split_header("prelude\n"), file, ("", ""), limits)
            # These are no libraries, and still the ones of the test.
            assert "the judge cannot use Lean's library" in found.unavailable
    finally:
        await judges.close()


@pytest.mark.slow
def test_functions_are_found_in_whichever_library_has_them(
    core: Environment, tmp_path: Path
) -> None:
    main, *others = core.toolchain.shared_libraries
    assert others, "the wheel has empty libraries beside the one that has everything"
    code = (
        "import sys; from leanq.lean.judge.kernel import Kernel;"
        "kernel = Kernel(sys.argv[1:]); kernel.import_header([], []);"
        "print(kernel.env > 0)"
    )
    for order in ([others[0], main], [main, *others]):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, order)],
            env={"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
    done = subprocess.run(
        [sys.executable, "-c", code, str(others[0])],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "KernelUnavailableError: the judge cannot use Lean's library: there is no" in done.stderr
