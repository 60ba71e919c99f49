"""The limit of the disk space that a program may fill."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.lean.sandboxes import GENEROUS, MB, MODES, opened, run
from support.lean.sites import Site, check

from leanq.lean.sandbox.sandbox import Sandbox
from leanq.lean.sandbox.scratch import disk_bytes, empty

LIMITS = replace(GENEROUS, scratch_bytes=4 * MB)

FILL = """
    import os, sys
    for n in range({files}):
        with open(f"{{sys.argv[1]}}/{{n}}", "wb") as file:
            file.write(bytes({size}))
    {after}
"""
WAIT = "import time; time.sleep(600)"


@pytest.fixture(params=MODES)
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with opened(request.param) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(("files", "size"), [(1, 8 * MB), (80, 100_000), (2000, 1)])
@pytest.mark.parametrize("after", [WAIT, ""], ids=["waits", "ends"])
async def test_a_program_that_fills_the_disk_is_stopped(
    sandbox: Sandbox, files: int, size: int, after: str
) -> None:
    code = FILL.format(files=files, size=size, after=after)
    finished = await run(sandbox, code, str(sandbox.scratch), limits=LIMITS)
    assert finished.exit.stopped == "scratch"
    assert finished.exit.scratch_bytes > 4 * MB


async def test_a_program_that_keeps_within_it_is_not(sandbox: Sandbox) -> None:
    code = FILL.format(files=3, size=MB, after="")
    finished = await run(sandbox, code, str(sandbox.scratch), limits=LIMITS)
    assert (finished.exit.stopped, finished.exit.code) == (None, 0)
    assert 3 * MB <= finished.exit.scratch_bytes <= 4 * MB


async def test_a_folder_that_is_closed_hides_nothing(sandbox: Sandbox) -> None:
    code = """
        import os, sys, time
        inner = sys.argv[1] + "/inner"
        os.mkdir(inner)
        with open(inner + "/file", "wb") as file:
            file.write(bytes(8 << 20))
        try: os.chmod(inner, 0)
        except PermissionError: pass
        time.sleep(600)
    """
    finished = await run(sandbox, code, str(sandbox.scratch), limits=LIMITS)
    assert finished.exit.stopped == "scratch"


def test_folders_that_their_owner_has_closed_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an ordinary user, as most workers are; root may open them all."""
    folder = tmp_path / "scratch"
    for place in (folder / "a" / "b" / "c", folder / "d"):
        place.mkdir(parents=True)
        (place / "file").touch()
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    is_root = os.geteuid() == 0
    if is_root:
        for parent, folders, files in os.walk(folder):
            for name in (".", *folders, *files):
                os.chown(f"{parent}/{name}", 65534, 65534)
    for place in ("d", "a/b/c", "a/b", "a", "."):
        (folder / place).chmod(0)
    if is_root:
        os.seteuid(65534)
    try:
        empty("scratch")
        assert os.listdir("scratch") == []
    finally:
        if is_root:
            os.seteuid(0)


def test_folders_below_the_reach_of_paths_count_as_too_much(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    made = []
    try:
        for _ in range(30):
            os.mkdir("n" * 200, dir_fd=here)
            made.append(here)
            here = os.open("n" * 200, os.O_RDONLY, dir_fd=here)
        assert disk_bytes(str(tmp_path), 1 << 40) == math.inf
        with pytest.raises(OSError, match="File name too long") as caught:
            os.stat(str(tmp_path) + f"/{'n' * 200}" * 30)
        assert caught.value.errno == errno.ENAMETOOLONG
    finally:
        for parent in reversed(made):
            os.close(here)
            os.rmdir("n" * 200, dir_fd=parent)
            here = parent
        os.close(here)


@pytest.mark.slow
async def test_a_check_that_fills_the_disk_says_so(site: Site) -> None:
    driver = await site.driver(site.shell())
    reply = await driver.run(check("yes | head -c 8000000 > big; sleep 600", scratch_mb=4))
    assert (reply.verdict, reply.reason) == ("memory", "scratch")
    assert "the request allows 4 MB" in reply.messages[-1].text
