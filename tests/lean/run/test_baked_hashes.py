"""Hashes of modules that an image brings: believed where they are as sure as the modules."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from leanq.lean.run import baked_hashes
from leanq.lean.run.baked_hashes import NAME, bake, baked
from leanq.lean.run.files import compiled_modules, content_hashes, hash_bytes

COUNT = 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "lean"
    (place / "Sub").mkdir(parents=True)
    for number in range(COUNT):
        place.joinpath("Sub", f"M{number:02}.olean").write_bytes(b"content %d" % number)
    bake(place, compiled_modules(place))
    return place


def test_a_baked_list_saves_the_reading(folder: Path, tmp_path: Path) -> None:
    files = compiled_modules(folder)
    found = baked(folder, files)
    assert len(found) == COUNT
    with mock.patch("leanq.lean.run.files.hash_file", side_effect=AssertionError("was read")):
        hashes = content_hashes(files, tmp_path / "memory", found)
    first = str(folder / "Sub" / "M00.olean")
    assert hashes[first] == hash_bytes(b"content 0").hex()
    assert hashes == content_hashes(files, tmp_path / "another memory")


def test_a_copy_with_the_same_times_is_believed(folder: Path, tmp_path: Path) -> None:
    """As a layer of an image is: other inodes, and times to the second."""
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-Rp", folder, copy], check=True, timeout=60)
    for path in copy.rglob("*.olean"):
        at_s = int(path.stat().st_mtime)
        os.utime(path, (at_s, at_s))
    assert len(baked(copy, compiled_modules(copy))) == COUNT


def test_a_module_that_changed_or_came_later_is_read(folder: Path, tmp_path: Path) -> None:
    changed = folder / "Sub" / "M07.olean"
    changed.write_bytes(b"content 777")
    folder.joinpath("New.olean").write_bytes(b"new")
    files = compiled_modules(folder)
    assert len(baked(folder, files)) == COUNT - 1
    hashes = content_hashes(files, tmp_path / "memory", baked(folder, files))
    assert hashes[str(changed)] == hash_bytes(b"content 777").hex()


def test_modules_that_were_exchanged_under_their_old_times_are_noticed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in folder.rglob("*.olean"):
        status = path.stat()
        path.write_bytes(b"CONTENT" + path.read_bytes()[7:])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with caplog.at_level(logging.WARNING):
        assert baked(folder, compiled_modules(folder)) == {}
    assert "all modules are read" in caplog.text


@pytest.mark.parametrize("harm", ["damaged", "writable list", "writable folder", "nonsense"])
def test_a_list_that_is_not_to_be_trusted(folder: Path, harm: str) -> None:
    path = folder / NAME
    if harm == "damaged":
        path.write_bytes(path.read_bytes()[:-9])
    elif harm == "nonsense":
        body = b"[1, 2]"
        path.write_bytes(hash_bytes(body).hex().encode() + b"\n" + body)
    else:
        (path if harm == "writable list" else folder).chmod(0o777)
    assert baked(folder, compiled_modules(folder)) == {}


@pytest.mark.slow
def test_it_is_a_program(tmp_path: Path) -> None:
    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", baked_hashes.__name__, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    tmp_path.joinpath("A.olean").write_bytes(b"a")
    done = run(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"1 modules of {tmp_path} are hashed\n")
    assert len(baked(tmp_path, compiled_modules(tmp_path))) == 1
    assert run(tmp_path / "none").returncode == 1
