"""Environments: fingerprints, what a Lean process gets to see, the compiled Core, the memory."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path

import pytest
from support.paths import ROOT

from leanq.errors import ToolchainError
from leanq.lean.environment import Environment, open_environment
from leanq.lean.run import files as hashes_module
from leanq.lean.run.files import compiled_modules

LONG_AGO_NS = 1_600_000_000 * 10**9


class Site:
    """A machine: a toolchain that can say who it is, a cache, and a Lake project."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root / "cache"
        self.lean = root / "toolchain" / "bin" / "lean"
        self.search_path = ["packages/a/lib", "project/build"]
        self.write("toolchain/lib/lean/Init.olean", "the toolchain's own")
        self.write("packages/a/lib/A.olean", "a")
        self.write("packages/a/lib/A/B.olean", "ab")
        self.write("packages/a/lib/A/B.olean.private", "private")
        self.write("project/build/P.olean", "p")
        self.write("project/lakefile.toml", 'name = "p"')
        self.write("project/lake-manifest.json", "{}")
        self.write("project/lean-toolchain", "leanprover/lean4:stable")
        self.write("project/P.lean", "theorem p : True := trivial")
        self.write("project/P/Q.lean", "theorem q : True := trivial")
        self.set_version("4.20.0", "abc123")

    def set_version(self, version: str, commit: str) -> None:
        line = f"Lean (version {version}, x86_64-unknown-linux-gnu, commit {commit}, Release)"
        answers = {"--version": line, "--print-prefix": str(self.lean.parents[1]), "--help": ""}
        cases = [f"{flag}) echo {shlex.quote(text)};;" for flag, text in answers.items()]
        self.script("toolchain/bin/lean", f"case $1 in {' '.join(cases)} esac")

    def open(
        self, folder: str | None = "project", *options: str, of_project: bool = False
    ) -> Environment:
        lean_path = ":".join(str(self.root / entry) for entry in self.search_path)
        self.script("toolchain/bin/lake", f'shift; LEAN_PATH={shlex.quote(lean_path)} exec "$@"')
        return open_environment(
            "site",
            self.root / folder if folder else None,
            lean=str(self.lean),
            cache=self.cache,
            environ={"PATH": "/usr/bin:/bin"},
            options=options,
            options_of_project=of_project,
        )

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
        return path

    def move(self, name: str, to: str) -> None:
        (self.root / name).rename(self.root / to)

    def script(self, name: str, text: str) -> None:
        self.write(name, f"#!/bin/sh\n{text}\n").chmod(0o755)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "here")


def test_fingerprints_agree_where_the_files_agree(site: Site, tmp_path: Path) -> None:
    there = Site(tmp_path / "elsewhere" / "deeper")
    for path in (tmp_path / "elsewhere").rglob("*.olean"):
        os.utime(path, ns=(LONG_AGO_NS + 10**15, LONG_AGO_NS + 10**15))
    for folder in ("project", "packages/a/lib", None):
        assert site.open(folder).fingerprint == there.open(folder).fingerprint


A = "packages/a/lib/A.olean"
P = "project/build/P.olean"
DIFFERENT: dict[str, Callable[[Site], object]] = {
    "a byte of a module": lambda site: site.write(A, "A"),
    "a byte of a module's part": lambda site: site.write(f"{A[:-6]}/B.olean.private", "PRIVATE"),
    "a new module": lambda site: site.write("project/build/New.olean", ""),
    "a lost module": lambda site: site.move(P, "elsewhere"),
    "a renamed module": lambda site: site.move(P, "project/build/R.olean"),
    "a module in another folder": lambda site: site.move(A, "project/build/A.olean"),
    "the order of the search path": lambda site: site.search_path.reverse(),
    "a folder more": lambda site: site.search_path.append("nothing/yet"),
    "a source": lambda site: site.write("project/P/Q.lean", "theorem q : False := sorry"),
    "the manifest": lambda site: site.write("project/lake-manifest.json", '{"version": 7}'),
    "the lakefile": lambda site: site.write("project/lakefile.toml", 'name = "q"'),
    "the toolchain file": lambda site: site.write("project/lean-toolchain", "nightly"),
    "a library beside Lean's own": lambda site: site.write("toolchain/lib/lean/Own/A.olean", ""),
    "an empty folder that hides a library": lambda site: (site.root / "packages/a/lib/P").mkdir(),
    "an empty folder that hides one of Lean's own": lambda site: (
        site.root / "packages/a/lib/Std"
    ).mkdir(),
    "the version of Lean": lambda site: site.set_version("4.20.1", "abc123"),
    "the commit of Lean": lambda site: site.set_version("4.20.0", "abc124"),
}
SAME: dict[str, Callable[[Site], object]] = {
    "a build log": lambda site: site.write("packages/a/lib/A.trace", "3"),
    "a hidden file": lambda site: site.write("project/.lake/packages/x/X.lean", ""),
    "the toolchain's own library": lambda site: site.write("toolchain/lib/lean/Init.olean", "?"),
    "an empty folder that hides nothing": lambda site: (site.root / "project/build/A").mkdir(),
    "a lock of Emacs": lambda site: (site.root / "project/.#P.lean").symlink_to("me@host:1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_fingerprint_changes_with(site: Site, change: Callable[[Site], object]) -> None:
    before = site.open().fingerprint
    change(site)
    assert site.open().fingerprint != before


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_nothing_changes_with(site: Site, change: Callable[[Site], object]) -> None:
    before = site.open()
    change(site)
    assert not before.changed()
    assert site.open() == before


def test_fingerprint_changes_with_options(site: Site) -> None:
    one, two = "-DautoImplicit=true", "-DmaxRecDepth=99"
    options: list[tuple[str, ...]] = [(), (one,), (two,), (one, two)]
    assert len({site.open("project", *each).fingerprint for each in options}) == len(options)
    assert site.open("project", one).options == (one,)
    with pytest.raises(ToolchainError, match="'autoImplicit' is no option"):
        site.open("project", "autoImplicit")


def test_a_projects_own_options_are_taken_where_asked_for(site: Site) -> None:
    lakefile = 'name = "p"\n[leanOptions]\nautoImplicit = false\npp.unicode.fun = true\n'
    site.write("project/lakefile.toml", lakefile)
    assert site.open().options == ()
    made = site.open("project", "-DautoImplicit=true", "-Da=1", of_project=True)
    assert made.options == ("-Da=1", "-DautoImplicit=true", "-Dpp.unicode.fun=true")
    assert made.fingerprint != site.open().fingerprint
    with pytest.raises(ToolchainError, match="a Lake project, and this is none"):
        site.open("packages/a/lib", of_project=True)


def test_links_are_followed_and_never_endlessly(site: Site) -> None:
    real = site.open("packages/a/lib").fingerprint
    (site.root / "link").symlink_to(site.root / "packages/a/lib")
    assert site.open("link").fingerprint == real
    (site.root / "packages/a/lib/A/again").symlink_to(site.root / "packages/a/lib")
    assert site.open("packages/a/lib").fingerprint == real
    (site.root / "packages/a/lib/A/C.olean").symlink_to(site.root / P)
    assert site.open("packages/a/lib").fingerprint != real


CHANGED: dict[str, Callable[[Site], object]] = {
    "a module": lambda site: site.write(A, "A"),
    "a source": lambda site: site.write("project/New.lean", ""),
    "the toolchain": lambda site: site.set_version("4.20.10", "abc123"),
    "a library beside Lean's own": lambda site: site.write("toolchain/lib/lean/Own.olean", ""),
    "a folder that hides a library": lambda site: (site.root / "packages/a/lib/P").mkdir(),
    "a lost folder": lambda site: shutil.rmtree(site.root / "packages"),
    "a lost toolchain": lambda site: shutil.rmtree(site.root / "toolchain"),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED.keys())
def test_changed_after(site: Site, change: Callable[[Site], object]) -> None:
    environment = site.open()
    assert not environment.changed()
    change(site)
    assert environment.changed()


def test_a_link_that_led_elsewhere_meanwhile_counts_as_changed(site: Site) -> None:
    """What was imported meanwhile, and is kept, is of other files."""
    (site.root / "links").mkdir()
    link = site.root / "links" / "a"
    link.symlink_to(site.root / "packages/a")
    site.search_path[0] = "links/a/lib"
    environment = site.open()
    assert not environment.changed()
    for to in ("project", "packages/a"):
        link.unlink()
        link.symlink_to(site.root / to)
    assert environment.changed()
    assert site.open().fingerprint == environment.fingerprint


def test_touched_module_counts_as_changed_and_has_the_same_fingerprint(site: Site) -> None:
    environment = site.open()
    os.utime(site.root / A)
    assert environment.changed()
    assert site.open().fingerprint == environment.fingerprint


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose contents are read; no file counts as too young."""
    monkeypatch.setattr(hashes_module, "_SETTLED_NS", 0)
    names: list[str] = []
    real = hashes_module.hash_rest

    def spy(file: BufferedReader) -> bytes:
        names.append(Path(file.name).name)
        return real(file)

    monkeypatch.setattr(hashes_module, "hash_rest", spy)
    return names


def test_second_start_reads_only_what_changed(site: Site, hashed: list[str]) -> None:
    site.open()
    assert len(hashed) == 9
    hashed.clear()
    site.open()
    assert hashed == []
    # Of the same length, and `write` sets the same time.
    site.write(A, "A")
    changed = site.open().fingerprint
    assert hashed == ["A.olean"]
    shutil.rmtree(site.cache)
    assert site.open().fingerprint == changed


def test_file_that_was_just_changed_is_not_remembered(
    site: Site, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes_module, "_SETTLED_NS", 3600 * 10**9)
    site.open()
    site.open()
    assert len(hashed) == 2 * 9


@pytest.mark.usefixtures("hashed")
def test_the_hash_of_another_file_is_not_remembered(site: Site) -> None:
    """As when a link moves on to the next release while its files are read, and then back."""
    for release in ("v1", "v2"):
        site.write(f"releases/{release}/A.olean", release)
    link, memory = site.root / "current", site.root / "memory"
    link.symlink_to("releases/v1")
    found = compiled_modules(link)

    def moved_to(release: str) -> None:
        link.unlink()
        link.symlink_to(f"releases/{release}")

    moved_to("v2")
    with pytest.raises(OSError, match="it has changed while it was read"):
        hashes_module.content_hashes(found, memory)
    moved_to("v1")
    path = found[0].path
    content = hashes_module.content_hashes(found, memory)[path]
    assert content == hashes_module.hash_bytes(b"v1").hex()


def test_an_environment_that_changes_while_it_is_read_is_not_opened(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hashes_module.hash_rest

    def changing(file: BufferedReader) -> bytes:
        read = real(file)
        if file.name.endswith(A):
            site.write(A, "of another length")
        return read

    monkeypatch.setattr(hashes_module, "hash_rest", changing)
    with pytest.raises(ToolchainError, match=r"A\.olean .* changed while .* leave it as it is"):
        site.open()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-20],
    "altered": lambda content: content[:-10] + bytes([content[-10] ^ 1]) + content[-9:],
    "emptied": lambda content: b"",
    "not text": lambda content: b"\xff\0" * 50,
}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_memory_is_made_anew(
    site: Site, hashed: list[str], damage: Callable[[bytes], bytes]
) -> None:
    before = site.open().fingerprint
    (memory,) = (site.cache / "hashes").iterdir()
    content = memory.read_bytes()
    memory.write_bytes(damage(content))
    hashed.clear()
    assert site.open().fingerprint == before
    assert len(hashed) == 9
    assert memory.read_bytes() == content


@pytest.mark.usefixtures("hashed")
def test_memory_that_cannot_be_kept_is_no_error(site: Site) -> None:
    before = site.open().fingerprint
    shutil.rmtree(site.cache)
    site.cache.write_text("a file where the folder should be")
    assert site.open().fingerprint == before


def test_what_a_lean_process_gets(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANQ_URL", "redis://:secret@host")
    environment = site.open()
    toolchain, project = site.root / "toolchain", site.root / "project"
    assert environment.search_path == (site.root / "packages/a/lib", project / "build")
    assert environment.process_env() == {
        "LANG": "C.UTF-8",
        "LEAN_PATH": f"{site.root}/packages/a/lib:{project}/build",
        "LEAN_SYSROOT": str(toolchain),
        "PATH": "/usr/bin:/bin",
    }
    assert {toolchain, *environment.search_path} <= set(environment.readable())
    assert project not in environment.readable()


def test_plain_folder_and_own_library(site: Site) -> None:
    plain = site.open("packages/a/lib")
    assert (plain.project, plain.search_path) == (None, (site.root / "packages/a/lib",))
    own = site.open(None)
    assert (own.project, own.search_path) == (None, ())
    assert site.open().project == site.root / "project"


def test_modules_are_found_as_lean_finds_them(site: Site) -> None:
    site.write("project/build/A/Later.olean", "hidden by the folder before")
    site.write("project/build/P/odd.name.olean", "")
    environment = site.open()
    found = {
        "A": "packages/a/lib/A.olean",
        "A.B": "packages/a/lib/A/B.olean",
        "P": "project/build/P.olean",
        "P.«odd.name»": "project/build/P/odd.name.olean",
        "Init": "toolchain/lib/lean/Init.olean",
    }
    for module, path in found.items():
        assert environment.find_olean(module) == site.root / path
    for module in ("A.Later", "A.Absent", "Absent", "", "«..».a.lib.A", "A.«../A»"):
        assert environment.find_olean(module) is None, module


@pytest.mark.slow
def test_everything_that_the_wheels_lean_maps_is_readable(core: Environment) -> None:
    allowed = (*core.readable(), Path("/usr"), Path("/lib"), Path("/lib64"), Path("/etc"))
    command = (*core.toolchain.command, "--stdin")
    with subprocess.Popen(command, env=core.process_env(), stdin=subprocess.PIPE) as process:
        try:
            deadline, maps = time.monotonic() + 30, ""
            while "libleanshared" not in maps:
                assert time.monotonic() < deadline
                time.sleep(0.01)
                maps = Path(f"/proc/{process.pid}/maps").read_text()
        finally:
            process.kill()
    mapped = {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/" in line}
    assert [path for path in mapped if not any(map(path.is_relative_to, allowed))] == []


def lean(environment: Environment, folder: Path, *arguments: str) -> tuple[int, str]:
    command, env = (*environment.toolchain.command, *arguments), environment.process_env()
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, timeout=60)
    return done.returncode, (done.stdout + done.stderr).decode()


def test_core_can_be_imported(core: Environment, tmp_path: Path) -> None:
    (tmp_path / "T.lean").write_text(
        "prelude\nimport Core\ntheorem t (p : Prop) (h : p) : p := by exact h\n#print axioms t\n"
    )
    assert lean(core, tmp_path, "T.lean") == (0, "'t' does not depend on any axioms\n")
    assert core.find_olean("Core") == core.search_path[0] / "Core.olean"
    assert not core.changed()


def test_folder_of_modules_on_top_of_core(core: Environment, tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "Mine.lean").write_text("prelude\nimport Core\ntheorem mine : True := True.intro\n")
    assert lean(core, modules, "-o", "Mine.olean", "Mine.lean") == (0, "")
    (tmp_path / "T.lean").write_text("prelude\nimport Mine\ntheorem t : True := mine\n")
    cache = core.search_path[0].parents[1]
    environment = open_environment("mine", modules, cache=cache, environ={})
    assert environment.search_path == (modules, core.search_path[0])
    assert lean(environment, tmp_path, "T.lean") == (0, "")


@pytest.mark.slow
def test_core_made_by_four_processes_at_once(core: Environment, tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from leanq.lean.environment import open_environment;"
        "print(flush=True); sys.stdin.readline();"
        "cache = pathlib.Path(sys.argv[1]);"
        "print(open_environment('c', None, cache=cache, environ={}).fingerprint)"
    )
    command, pipe = (sys.executable, "-c", code, str(tmp_path)), subprocess.PIPE
    root = ROOT
    with ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe))
            for _ in range(4)
        ]
        assert [each.stdout.readline() for each in processes if each.stdout] == [b"\n"] * 4
        for process in processes:
            assert process.stdin
            process.stdin.write(b"go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=60)[0].decode() for process in processes]
    assert answers == [f"{core.fingerprint}\n"] * 4
    (made,) = (tmp_path / "core").iterdir()
    assert [path.name for path in made.iterdir()] == ["Core.olean"]


@pytest.mark.slow
@pytest.mark.usefixtures("core")
def test_no_umask_lets_others_write_core(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from leanq.lean.environment import open_environment; os.umask(0);"
        "open_environment('c', None, cache=pathlib.Path(sys.argv[1]), environ={})"
    )
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", code, str(cache)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    made = [cache, *cache.rglob("*")]
    assert "Core.olean" in {path.name for path in made}
    assert [path for path in made if path.stat().st_mode & 0o022] == []


@pytest.mark.slow
@pytest.mark.usefixtures("core")
def test_core_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = open_environment("core", None, cache=tmp_path, environ={}).search_path[0]
    for path in (folder.parent, folder, folder / "Core.olean"):
        mode = path.stat().st_mode
        path.chmod(0o666 if path.is_file() else 0o777)
        with pytest.raises(ToolchainError, match=f"other users can write to {path}, which every"):
            open_environment("core", None, cache=tmp_path, environ={})
        path.chmod(mode)
    open_environment("core", None, cache=tmp_path, environ={})


@pytest.mark.usefixtures("core")
def test_core_in_a_cache_that_cannot_be_written() -> None:
    with pytest.raises(ToolchainError, match=r"cannot write .*; name a writable .* LEANQ_CACHE"):
        open_environment("core", None, environ={"LEANQ_CACHE": __file__})


@pytest.mark.slow
@pytest.mark.parametrize("room", ["4k", "200k"])
@pytest.mark.usefixtures("core")
def test_core_on_a_disk_that_is_full(tmp_path: Path, room: str) -> None:
    code = (
        "import sys; from leanq.lean.environment import open_environment\n"
        "try: open_environment('core', None, environ={'LEANQ_CACHE': sys.argv[1]})\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    # In a mount namespace of its own, whose end takes the disk with it.
    mount = f"mount -t tmpfs -o size={room} small {tmp_path} || exit 77"
    run = shlex.join([sys.executable, "-c", code, str(tmp_path)])
    command = ["unshare", "-rm", "sh", "-c", f"{mount}; exec {run}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, text=True)
    if done.returncode in (1, 77) and not done.stdout:
        pytest.skip(f"no disk can be mounted here: {done.stderr}")
    assert done.stdout.startswith(
        f"ToolchainError the disk of the cache folder {tmp_path}/core is full (0 MB free)"
    )
    assert "name a folder on another disk with LEANQ_CACHE" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("core")
def test_core_goes_where_the_variables_say(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": "relative, so ignored"}
    for variable, value, folder in (
        ("LANG", "C", "home/.cache/leanq"),
        ("XDG_CACHE_HOME", str(tmp_path / "shared"), "shared/leanq"),
        ("LEANQ_CACHE", str(tmp_path / "named"), "named"),
    ):
        environ[variable] = value
        environment = open_environment("core", None, environ=environ)
        assert environment.search_path[0].parent == tmp_path / folder / "core"


def test_folders_that_are_no_environment(site: Site) -> None:
    site.write("empty/notes.txt", "")
    site.write("a:b/A.olean", "")
    for folder, match in (
        ("absent", "there is no folder"),
        ("empty", "neither a lakefile nor compiled modules"),
        ("a:b", "has a ':' in its name"),
    ):
        with pytest.raises(ToolchainError, match=match) as caught:
            site.open(folder)
        assert str(caught.value).startswith("environment site: ")
        assert str(site.root / folder) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_environment_says_what_it_is(site: Site) -> None:
    it = site.open()
    lean = f"Lean 4.20.0 (abc123) from option: {site.lean}"
    assert str(it) == f"site ({it.fingerprint[:12]}), {lean}"
