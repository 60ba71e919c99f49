"""What is published: complete, nothing too much, and working where there is no repository."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from support.paths import ROOT
from support.required import missing
from support.terminals import ended, new_terminal


@dataclass(frozen=True)
class Published:
    """The two files that a release consists of."""

    sdist: Path
    wheel: Path

    @property
    def version(self) -> str:
        return self.wheel.name.split("-")[1]

    def in_sdist(self) -> set[str]:
        with tarfile.open(self.sdist) as archive:
            names = [member.name for member in archive if member.isfile()]
        return {name.removeprefix(f"leanq-{self.version}/") for name in names}

    def in_wheel(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """Built as by ``make dist``: the wheel from the sdist, which therefore has to be complete."""
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation, because the index may be out of reach.
    must(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    [wheel] = folder.glob("leanq-*-py3-none-any.whl")
    version = wheel.name.split("-")[1]
    made = Published(folder / f"leanq-{version}.tar.gz", wheel)
    assert set(folder.iterdir()) == {made.sdist, made.wheel}
    return made


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a tool of Python's, with the user's settings and cache and without the repository."""
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        argv, env=environ, cwd="/", capture_output=True, text=True, check=False, timeout=500
    )


def must(*argv: str) -> None:
    done = run(*argv)
    assert done.returncode == 0, done.stdout + done.stderr


def tree(*folders: str) -> set[str]:
    """All files of the repository in these folders, without what running it leaves there."""
    files = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_no_more(published: Published) -> None:
    package = tree("leanq")
    data = {"leanq/py.typed", "leanq/lean/run/Core.lean", "leanq/lean/run/lean_launcher.py"}
    data |= {f"leanq/lean/sandbox/seccomp.{machine}.bpf" for machine in ("x86_64", "aarch64")}
    assert data | {"leanq/queue/lua/claim.lua", "leanq/queue/lua/parts/record.lua"} <= package
    page = {"templates/overview.html", "static/leanq.css", "static/vendor/LICENSE-uPlot.txt"}
    assert {f"leanq/gateway/page/{name}" for name in page} <= package
    kinds = {".py", ".typed", ".lua", ".lean", ".bpf"}
    kinds |= {".html", ".css", ".js", ".svg", ".txt", ".md"}
    assert {Path(name).suffix for name in package} == kinds
    info = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    assert published.in_wheel() == package | {
        f"leanq-{published.version}.dist-info/{n}" for n in info
    }


@pytest.mark.slow
def test_the_sdist_holds_all_that_the_tests_need(published: Published) -> None:
    written = {path.name for path in ROOT.glob("*.md")}
    assert {"README.md", "CHANGELOG.md"} <= written
    folders = tree("leanq", "tests", "bench", "sim", "examples", "deploy", "docs", "k8s")
    assert {"tests/conftest.py", "tests/samples/wrong.lean", "examples/axiom.lean"} <= folders
    root = {"pyproject.toml", "Makefile", "LICENSE", ".gitignore", "PKG-INFO"}
    root |= {"compose.yaml", "Dockerfile", ".dockerignore"}
    assert published.in_sdist() == folders | written | root


@pytest.mark.slow
def test_the_index_would_take_both(published: Published) -> None:
    must(
        sys.executable,
        "-m",
        "twine",
        "check",
        "--strict",
        *map(str, (published.sdist, published.wheel)),
    )


@pytest.mark.slow
def test_the_version_is_that_of_the_tag(tmp_path: Path) -> None:
    if shutil.which("git") is None:
        missing("git")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())

    def git(*words: str) -> None:
        who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        must("git", "-C", str(tmp_path), *who, *words)

    def version(**environ: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "version"],
            cwd=tmp_path,
            env=os.environ | environ,
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
        return done.stdout.strip()

    # As in the image's build, with the argument LEANQ_VERSION and without.
    assert version(SETUPTOOLS_SCM_PRETEND_VERSION_FOR_LEANQ="") == "0.0"
    assert version(SETUPTOOLS_SCM_PRETEND_VERSION_FOR_LEANQ="1.2.3") == "1.2.3"
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "a change")
    # Before the first release, and below it.
    assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]+", version())
    git("tag", "-a", "v1.2.3", "-m", "leanq 1.2.3")
    assert version() == "1.2.3"
    git("commit", "-q", "--allow-empty", "-m", "another")
    assert re.fullmatch(r"1\.2\.4\.dev1\+g[0-9a-f]+", version())


def test_the_packages_version_is_what_was_installed() -> None:
    program = "import leanq; print(leanq.__version__)"
    for path, wanted in ((ROOT, "0.0"), (None, None)):
        command = (sys.executable, *(["-S"] if path else []), "-c", program)
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.strip() == (wanted or metadata.version("leanq"))


# On a first run, Lean itself may have to be fetched.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_works_in_a_fresh_environment(published: Published, tmp_path: Path) -> None:
    with new_terminal(tmp_path) as terminal:
        # In the terminal's folder, which goes away: Lean is too big for what pytest keeps.
        python = str(terminal.folder / "venv" / "bin" / "python")
        must(sys.executable, "-m", "venv", str(terminal.folder / "venv"))
        pip = (python, "-m", "pip", "--disable-pip-version-check")
        # Asked apart, so that a requirement that nothing meets is a failure.
        if run(*pip, "--timeout=10", "--retries=1", "index", "versions", "click").returncode:
            missing("a package index")
        must(*pip, "install", "--quiet", f"{published.wheel}[local]")

        del terminal.environ["PYTHONPATH"]
        file = str(ROOT / "examples" / "and_swap.lean")
        leanq = (str(terminal.folder / "venv" / "bin" / "leanq"),)
        said = ended(terminal.start("--version", program=leanq)).out
        assert said == f"leanq, version {published.version}\n"
        done = ended(terminal.start("submit", "--json", file, program=leanq))
        assert done.code == 0, done
        [line] = map(json.loads, done.out.splitlines())
        assert (line["file"], line["verdict"]) == (file, "accepted")
