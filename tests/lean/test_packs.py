"""Packs: an environment as one file, unpacked once for all workers of a node."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest
import zstandard
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from leanq.cli import cli
from leanq.errors import ToolchainError
from leanq.lean.environment import Environment, open_environment, pack_environment

VERSION = "Lean (version 4.20.0, x86_64-unknown-linux-gnu, commit abc123, Release)"
ENVIRON = {"PATH": "/usr/bin:/bin"}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def program(path: Path, text: str) -> None:
    write(path, f"#!/bin/sh\n{text}\n").chmod(0o755)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A Lake project with a package, and a toolchain that can say who it is wherever it lies."""
    root = tmp_path_factory.mktemp("packed")
    prefix = root / "toolchain"
    answers = f"--version) echo {shlex.quote(VERSION)};; --print-prefix) dirname $(dirname $0);;"
    program(prefix / "bin/lean", f"case $1 in {answers} esac")
    path = f"{root}/package:{root}/project/build:{root}/project/later"
    program(prefix / "bin/lake", f'shift; LEAN_PATH={shlex.quote(path)} exec "$@"')
    write(prefix / "lib/lean/Init.olean", "the library")
    write(prefix / "lib/lean/libleanshared.so", "shared")
    write(prefix / "lib/lean/Init.ilean", "for editors")
    write(prefix / "src/Init.lean", "sources")
    write(root / "package/A/B.olean", "ab")
    write(root / "package/A/B.olean.private", "private")
    write(root / "package/A/B.trace", "a log")
    write(root / "project/build/P.olean", "p")
    write(root / "project/lakefile.toml", 'name = "p"')
    write(root / "project/P.lean", "theorem p : True := trivial")
    write(root / "project/.lake/X.lean", "hidden")
    cache, lean = root / "cache", str(prefix / "bin/lean")
    return open_environment("p", root / "project", lean=lean, cache=cache, environ=ENVIRON)


@pytest.fixture(scope="module")
def pack(project: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pack") / "p.tar.zst"
    pack_environment(project, made)
    return made


def opened(pack: Path, cache: Path, **how: str) -> Environment:
    return open_environment("p", pack, cache=cache, environ=ENVIRON, **how)


def test_what_is_unpacked_is_the_environment(
    project: Environment, pack: Path, tmp_path: Path
) -> None:
    environment = opened(pack, tmp_path)
    (place,) = (tmp_path / "packs").glob("*/")
    assert place.name == project.fingerprint[:32]
    assert environment.fingerprint == project.fingerprint
    assert environment.toolchain.program == place / "toolchain/bin/lean"
    assert environment.find_olean("A.B") == place / "folders/0/A/B.olean"
    assert environment.find_olean("Init") == place / "toolchain/lib/lean/Init.olean"
    assert environment.search_path == tuple(place / f"folders/{n}" for n in range(3))
    assert environment.project == place / "project"
    found = sorted(str(p.relative_to(place)) for p in place.rglob("*") if p.is_file())
    assert found == [
        "folders/0/A/B.olean",
        "folders/0/A/B.olean.private",
        "folders/1/P.olean",
        "project/P.lean",
        "project/lakefile.toml",
        "toolchain/bin/lean",
        "toolchain/lib/lean/Init.olean",
        "toolchain/lib/lean/libleanshared.so",
    ]


def test_the_same_environment_gives_the_same_pack(
    project: Environment, pack: Path, tmp_path: Path
) -> None:
    pack_environment(project, tmp_path / "again.tar.zst")
    assert (tmp_path / "again.tar.zst").read_bytes() == pack.read_bytes()
    assert os.listdir(tmp_path) == ["again.tar.zst"]


def test_workers_of_a_node_unpack_it_once(pack: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from leanq.lean.environment import open_environment;"
        "found = open_environment('p', Path(sys.argv[1]), cache=Path(sys.argv[2]));"
        "print(found.find_olean('A.B').stat().st_ino)"
    )
    command = [sys.executable, "-c", code, str(pack), str(tmp_path)]

    def inode(_: int) -> bytes:
        return subprocess.run(command, check=True, capture_output=True, timeout=120).stdout

    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(inode, range(4)))) == 1
    assert sorted(p.suffix for p in (tmp_path / "packs").iterdir()) == ["", ".lock"]


def test_what_nobody_uses_goes_when_another_comes(
    project: Environment, pack: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "packs"
    for name in ("used", "recent", "old"):
        (folder / name).mkdir(parents=True)
        (folder / f"{name}.lock").touch()
    long_ago_s = time.time() - 100_000
    for name in (".making-killed", ".making-now"):
        (folder / name / "whole").mkdir(parents=True)
    for name in ("used.lock", "old.lock", ".making-killed"):
        os.utime(folder / name, (long_ago_s, long_ago_s))
    with (folder / "used.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        opened(pack, tmp_path)
    left = {"used", "recent", ".making-now", project.fingerprint[:32]}
    assert {p.name for p in folder.glob("*/")} == left


def test_no_half_of_a_pack_is_left_where_a_process_was_killed_as_it_removed_it(
    project: Environment, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = tmp_path / "packs", project.fingerprint[:32]
    code = "import sys; from pathlib import Path; from leanq.lean.packs import unpacked;"
    code += "unpacked(Path(sys.argv[1]), Path(sys.argv[2]))"
    # Another process, since this one would hold it.
    subprocess.run([sys.executable, "-c", code, str(pack), str(tmp_path)], check=True, timeout=60)
    long_ago_s = time.time() - 100_000
    os.utime(folder / f"{name}.lock", (long_ago_s, long_ago_s))

    class KilledError(BaseException):
        pass

    def half(path: str | Path, *_: object, **how: object) -> None:
        next(Path(path).rglob("*.olean")).unlink()
        raise KilledError

    another = crafted(tmp_path, ("manifest.json", MANIFEST % (64 * b"a")))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half)
        with pytest.raises(KilledError):
            opened(another, tmp_path)
    assert opened(pack, tmp_path).fingerprint == project.fingerprint


def test_a_worker_that_uses_it_keeps_nobody_out(pack: Path, tmp_path: Path) -> None:
    opened(pack, tmp_path)
    code = "import sys; from pathlib import Path; from leanq.lean.packs import unpacked;"
    code += "print(unpacked(Path(sys.argv[1]), Path(sys.argv[2]))[1].lean)"
    command = [sys.executable, "-c", code, str(pack), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert done.stdout == b"4.20.0\n"
    # Nor itself, as when it opens the environment anew.
    opened(pack, tmp_path)


def test_a_folder_that_others_may_write_to_is_refused(pack: Path, tmp_path: Path) -> None:
    folder = tmp_path / "packs"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ToolchainError, match="other users can write to"):
        opened(pack, tmp_path)
    assert os.listdir(folder) == []
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ToolchainError, match="other users can write to"):
        opened(pack, tmp_path)


@pytest.mark.usefixtures("loose_umask")
def test_no_umask_lets_others_write_in_what_is_unpacked(pack: Path, tmp_path: Path) -> None:
    (tmp_path / "packs").mkdir(0o755)
    opened(pack, tmp_path)
    made = [path for path in (tmp_path / "packs").rglob("*") if path.stat().st_mode & 0o022]
    assert made == []


def test_another_lean_is_refused(pack: Path, tmp_path: Path) -> None:
    other, version = tmp_path / "other/bin/lean", shlex.quote(VERSION.replace("20", "21"))
    program(
        other,
        f"case $1 in --version) echo {version};; *) echo {tmp_path}/other;; esac",
    )
    with pytest.raises(ToolchainError, match=r"for Lean 4\.20\.0, and is .* with Lean 4\.21\.0"):
        opened(pack, tmp_path / "cache", lean=str(other))


def test_what_was_changed_in_the_cache_is_noticed(pack: Path, tmp_path: Path) -> None:
    environment = opened(pack, tmp_path)
    found = environment.find_olean("A.B")
    assert found
    write(found, "other")
    assert environment.changed()
    with pytest.raises(ToolchainError, match="if its files were changed"):
        opened(pack, tmp_path)


@given(data=st.data())
def test_a_damaged_pack_is_refused_or_whole(
    project: Environment, pack: Path, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = bytearray(pack.read_bytes())
    place = data.draw(st.integers(0, len(damaged) - 1))
    if data.draw(st.booleans()):
        del damaged[place:]
    else:
        damaged[place] ^= data.draw(st.integers(1, 255))
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "p.tar.zst").write_bytes(damaged)
    try:
        environment = opened(folder / "p.tar.zst", folder)
    except ToolchainError as error:
        assert "is damaged, or no pack" in str(error)  # noqa: PT017 - or it is whole
        assert list((folder / "packs").glob("*/")) == []
    else:
        assert environment.fingerprint == project.fingerprint
        library = environment.find_olean("Init")
        assert library
        assert library.read_text() == "the library"
    shutil.rmtree(folder)


def crafted(folder: Path, *members: tuple[str, bytes]) -> Path:
    plain = BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
    made = folder / "crafted.tar.zst"
    made.write_bytes(zstandard.compress(plain.getvalue()))
    return made


MANIFEST = (
    b'{"format":1,"fingerprint":"%s","lean":"4.20.0","folders":1,"project":false,"toolchain":false}'
)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([], "expected manifest.json first"),
        ([("a", b"")], "expected manifest.json first"),
        ([("manifest.json", b"{}")], "missing required field"),
        ([("manifest.json", b"{" + b" " * 100_000)], "expected manifest.json first"),
        ([("manifest.json", MANIFEST % b"../x")], "expected a fingerprint"),
        ([("manifest.json", MANIFEST % (64 * b"a")), ("../x", b"")], "is no file of a pack"),
        ([("manifest.json", MANIFEST % (64 * b"a")), ("/x", b"")], "is no file of a pack"),
        ([("manifest.json", b'{"format":2}')], "was made by a later release"),
    ],
)
def test_what_is_no_pack(tmp_path: Path, members: list[tuple[str, bytes]], said: str) -> None:
    with pytest.raises(ToolchainError, match=said):
        opened(crafted(tmp_path, *members), tmp_path / "cache")
    assert not (tmp_path / "x").exists()


def test_a_link_in_a_pack_is_refused(tmp_path: Path) -> None:
    plain = BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        said = MANIFEST % (64 * b"a")
        first = tarfile.TarInfo("manifest.json")
        first.size = len(said)
        archive.addfile(first, BytesIO(said))
        link = tarfile.TarInfo("folders/0/A.olean")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    made = tmp_path / "p.tar.zst"
    made.write_bytes(zstandard.compress(plain.getvalue()))
    with pytest.raises(ToolchainError, match="is no file of a pack"):
        opened(made, tmp_path / "cache")


@pytest.mark.slow
def test_a_pack_of_compiled_modules_checks(tmp_path: Path) -> None:
    modules = tmp_path / "modules"
    cache = str(tmp_path / "cache")
    core = open_environment("core", None, cache=Path(cache), environ=ENVIRON)
    write(modules / "Mine.lean", "prelude\nimport Core\ntheorem mine : True := True.intro\n")
    subprocess.run(
        [*core.toolchain.command, "-o", "Mine.olean", "Mine.lean"],
        env=core.process_env(),
        cwd=modules,
        check=True,
        timeout=120,
    )
    runner = CliRunner(env={"LEANQ_CACHE": cache, **ENVIRON})
    done = runner.invoke(cli, ["env", "pack", str(modules), "-o", str(tmp_path / "mine.tar.zst")])
    assert (done.exit_code, "1 files in" in done.output) == (0, True), done.output
    shutil.rmtree(modules)
    environment = opened(tmp_path / "mine.tar.zst", Path(cache))
    text = write(tmp_path / "T.lean", "prelude\nimport Mine\ntheorem t : True := mine\n")
    subprocess.run(
        [*environment.toolchain.command, str(text)],
        env=environment.process_env(),
        check=True,
        timeout=120,
    )
