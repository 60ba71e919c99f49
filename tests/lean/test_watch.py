"""A watch over an environment's folders, with real files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from leanq.lean import environment as module
from leanq.lean.environment import Environment, Watch, open_environment


@pytest.fixture
def library(core: Environment, tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    (folder / "Lib").mkdir(parents=True)
    found = core.find_olean("Core")
    assert found is not None
    for name in ("Lib.olean", "Lib/A.olean", "Other.olean"):
        (folder / name).write_bytes(found.read_bytes())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.rename(folder / "Other.olean", elsewhere / "Other.olean")
    (folder / "Other.olean").symlink_to(elsewhere / "Other.olean")
    return folder


@pytest.fixture
def opened(library: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    if not module._are_local([str(library)]):  # noqa: SLF001 - what this machine has
        pytest.skip("the folder for temporary files is on no local file system")
    return open_environment("lib", library, cache=cache, environ={})


CHANGES: dict[str, Callable[[Path], object]] = {
    "written in place": lambda folder: (folder / "Lib/A.olean").write_bytes(b"x"),
    "replaced": lambda folder: os.replace(_new(folder / "new"), folder / "Lib.olean"),
    "removed": lambda folder: (folder / "Lib/A.olean").unlink(),
    "a new one": lambda folder: _new(folder / "New.olean"),
    "behind a link": lambda folder: (folder.parent / "elsewhere/Other.olean").write_bytes(b"x"),
    "its time": lambda folder: os.utime(folder / "Lib.olean", (1, 1)),
    "the folder moved": lambda folder: os.rename(folder, folder.with_name("moved")),
}


def _new(path: Path) -> Path:
    path.write_bytes(b"x")
    return path


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_heard_once(opened: Environment, library: Path, change: str) -> None:
    watch = Watch(opened)
    assert not watch.is_quiet()
    watch.begin()
    assert watch.is_quiet()
    (library / "Lib.olean").read_bytes()
    assert watch.is_quiet()
    CHANGES[change](library)
    assert not watch.is_quiet()
    assert not watch.is_quiet()
    watch.begin()
    assert watch.is_quiet()
    watch.close()
    assert not watch.is_quiet()


def test_a_network_file_system_is_never_quiet(
    opened: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LOCAL", frozenset())
    watch = Watch(opened)
    watch.begin()
    assert not watch.is_quiet()
