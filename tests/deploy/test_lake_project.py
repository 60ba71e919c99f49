"""``deploy/lake-project`` on real git, with stand-ins for lake and lean."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.paths import ROOT
from support.required import missing

from leanq.lean.run.headers import NAME

Build = Callable[..., subprocess.CompletedProcess[str]]

# `lake build` "compiles" each text into a file; what Mathlib's cache brings is in $CACHE.
LAKE = """#!/bin/sh
echo "lake $*" >> "$LOG"
lib=.lake/build/lib/lean
case "$*" in
  "exe cache get")
    git remote get-url origin >/dev/null || exit 1
    [ -d "$CACHE" ] || { echo "no network" >&2; exit 1; }
    mkdir -p .lake/packages/mathlib/$lib && cp -R "$CACHE/." .lake/packages/mathlib/$lib/ ;;
  "build --no-build Mathlib")
    [ -f .lake/packages/mathlib/$lib/Mathlib/Deep.olean ] && exit
    echo "Mathlib.Deep is not built" >&2; exit 3 ;;
  build)
    [ ! -f broken ] || exit 1
    mkdir -p $lib
    for text in *.lean; do
      name=$lib/${text%.lean}; cp "$text" "$name.olean"; : > "$name.ilean"
    done ;;
esac
"""
# Knows the version, and whether what is imported is on LEAN_PATH and not marked as broken.
LEAN = """#!/bin/sh
[ "$1" != --version ] || { echo "Lean (version 4.35.0, x86_64-unknown-linux-gnu, Release)"; exit; }
module=$(sed -n 's/^import //p')
file=$LEAN_PATH/$(echo "$module" | tr . /).olean
[ -f "$file" ] || { echo "unknown module $module"; exit 1; }
! grep -q noisy "$file" || echo "warning: noise"
"""


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A repository with a project, at the tag v1."""
    if shutil.which("git") is None:
        missing("git")
    folder = tmp_path / "remote"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "lean-toolchain").write_text("leanprover/lean4:v4.35.0\n")
    (folder / "Sample.lean").write_text("theorem sample : True := trivial\n")
    commit(folder)
    return folder


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, timeout=60)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "a change")
    git(folder, "tag", "-f", "v1")


@pytest.fixture
def build(tmp_path: Path, remote: Path) -> Build:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("lake", LAKE), ("lean", LEAN)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(revision: str = "v1", **environ: str) -> subprocess.CompletedProcess[str]:
        place = tmp_path / "src"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return subprocess.run(
            [ROOT / "deploy" / "lake-project", remote.as_uri(), revision, tmp_path / "out"],
            cwd=place,
            env={
                "PATH": f"{programs}:{os.environ['PATH']}",
                "LOG": str(tmp_path / "log"),
                "CACHE": str(tmp_path / "cache"),
                **environ,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def fill_cache(tmp_path: Path, *modules: str) -> None:
    for module in modules:
        file = tmp_path / "cache" / f"{module}.olean"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("compiled")


def test_a_project_is_built_and_can_be_imported(build: Build, tmp_path: Path) -> None:
    done = build()
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"Sample.olean", NAME}
    assert (tmp_path / "out" / NAME).read_text() == "import Sample\n"
    assert "1 modules; these can be imported: Sample" in done.stdout
    assert (tmp_path / "log").read_text().splitlines() == ["lake build"]


def test_mathlib_comes_from_its_cache(build: Build, remote: Path, tmp_path: Path) -> None:
    (remote / "lake-manifest.json").write_text('{"packages": [{"name": "mathlib"}]}')
    commit(remote)
    fill_cache(tmp_path, "Mathlib", "Mathlib/Deep")
    done = build(PROJECT_MODULES="Sample Mathlib.Deep")
    assert done.returncode == 0, done.stderr
    found = {
        str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.olean")
    }
    assert found == {"Sample.olean", "Mathlib.olean", "Mathlib/Deep.olean"}


def test_without_mathlibs_cache_the_build_ends(build: Build, remote: Path, tmp_path: Path) -> None:
    (remote / "Mathlib.lean").write_text("")
    commit(remote)
    done = build()
    assert done.returncode == 1
    assert "Mathlib's cache could not be had; PROJECT_CACHE=none compiles all of it" in done.stderr
    assert "lake build" not in (tmp_path / "log").read_text()
    assert build(PROJECT_CACHE="none").returncode == 0


def test_a_module_that_the_cache_lacks_ends_the_build(
    build: Build, remote: Path, tmp_path: Path
) -> None:
    (remote / "Mathlib.lean").write_text("")
    commit(remote)
    fill_cache(tmp_path, "Mathlib")
    done = build()
    assert done.returncode == 1
    assert "Mathlib.Deep is not built" in done.stderr
    assert "Mathlib's cache lacks modules of this revision" in done.stderr
    assert "lake build\n" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("change", "environ", "said"),
    [
        ({"lean-toolchain": "leanprover/lean4:v4.34.0"}, {}, "set LEAN_VERSION=v4.34.0"),
        ({"broken": ""}, {}, "the project does not build"),
        ({}, {"PROJECT_MODULES": "Sample Other.One"}, "there is no compiled module Other.One"),
        ({"Sample.lean": "noisy"}, {}, "import Sample: warning: noise"),
        ({}, {"PROJECT_CACHE": "maybe"}, "PROJECT_CACHE is mathlib or none, got 'maybe'"),
    ],
)
def test_what_is_wrong_is_said(
    build: Build, remote: Path, change: dict[str, str], environ: dict[str, str], said: str
) -> None:
    for name, text in change.items():
        (remote / name).write_text(text)
    if change:
        commit(remote)
    done = build(**environ)
    assert done.returncode == 1
    assert said in done.stderr


def test_a_revision_that_is_none(build: Build) -> None:
    done = build("v2")
    assert done.returncode == 1
    assert "has no revision v2 that can be fetched" in done.stderr
