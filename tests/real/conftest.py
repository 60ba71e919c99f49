"""Fixtures of the tests on a full library: its toolchains, environments and drivers."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.lean.libraries import VARIABLE, Library, NoLibraryError, layouts
from support.lean.libraries import library as find_library
from support.lean.sites import Site, new_site
from support.required import missing

from leanq.lean.environment import Environment

HERE = Path(__file__).parent
# The first test may have to wait until the library is built.
TIMEOUT_S = 640


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session", params=layouts())
def library(request: pytest.FixtureRequest) -> Library:
    """A toolchain with a full library, of each layout in turn."""
    try:
        return find_library(request.param)
    except NoLibraryError as error:
        if os.environ.get(VARIABLE):
            pytest.fail(str(error))
        missing(f"a full library ({error})")
        raise


@pytest.fixture(scope="session")
def real(library: Library, cache: Path) -> Environment:
    """The environment of a worker that was started with the library's Lean."""
    return library.open(cache)


@pytest.fixture
async def real_site(
    real: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Site]:
    """Drivers of the library's environment, whose temporary files go to the test's own folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with new_site(real, tmp_path) as made:
        yield made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints one table of what serves: the doctor's lines on the toolchain, and the tests of each
    file."""
    rows: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            path = Path(report.nodeid.split("::")[0])
            if path.parent.name == HERE.name:
                rows.setdefault(path.stem.removeprefix("test_"), Counter())[outcome] += 1
    if not rows:
        return
    terminalreporter.section("what serves on this toolchain")
    for layout in layouts():
        with contextlib.suppress(NoLibraryError):
            lean = str(find_library(layout).lean)
            command = [sys.executable, "-m", "leanq", "doctor", "--lean", lean]
            done = subprocess.run(
                command,
                env={name: value for name, value in os.environ.items() if name != VARIABLE},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            terminalreporter.write_line(f"{layout}\n{done.stdout}{done.stderr}")
    for name, counts in sorted(rows.items()):
        said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        terminalreporter.write_line(f"{name:16} {said}")
