"""An environment: its modules, its Lean and options, its fingerprint, and a watch over it.

The fingerprint is part of every verdict and of every state's key. It must be equal on two machines
exactly if Lean answers alike on both. It is the BLAKE2b-256 hash of

- the version and commit of Lean, which stand for its own library and are the same on every
  platform; the options; the header of texts that have none,
- for each folder of the search path, in order: the relative path and content of every compiled
  module in it; never an absolute path or a time,
- the same of modules in Lean's own folder that do not come with Lean, if there are any; and the
  libraries that a folder hides without having them,
- for a Lake project also its ``lean-toolchain``, lakefile, manifest and ``.lean`` sources: a
  project with other sources is another environment, compiled or not.

Mathlib is gigabytes, so the cache folder remembers content hashes (:mod:`leanq.lean.run.files`),
and a second start costs a scan of the folders.

All functions block.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from leanq.errors import ToolchainError, to_install
from leanq.fleet.shown import some_of
from leanq.lean.run import toolchain as lean_options
from leanq.lean.run.baked_hashes import baked
from leanq.lean.run.files import (
    File,
    compiled_modules,
    content_hashes,
    files_below,
    hash_bytes,
    is_ours,
    library_of,
    make_folders,
    module_names,
    nearest,
)
from leanq.lean.run.olean import find_folder, find_module
from leanq.lean.run.toolchain import (
    LAUNCHER,
    LEANS_OWN,
    Toolchain,
    ask,
    check_builds,
    check_project,
    find_toolchain_and_path,
    is_lake_project,
    last_words,
)
from leanq.lean.text import Header, quote, split_header

STANDARD_AXIOMS = frozenset({"propext", "Classical.choice", "Quot.sound"})

_CORE_SOURCE = Path(__file__).resolve().parent / "run" / "Core.lean"
_CORE_HEADER = "prelude\nimport Core\n"
_CORE_NEEDS_BYTES = 4 << 20
_PROJECT_FILES = (".lean", "lakefile.toml", "lake-manifest.json", "lean-toolchain")
_NAME_PART = re.compile(r"«([^»]+)»|([^.«»]+)")


@dataclass(frozen=True, slots=True)
class Environment:
    """The inputs of all Lean processes of one environment.

    ``project``: the Lake project's folder, if it is one. ``header``: the lines in front of a text
    without ``prelude`` or imports; empty if Lean's own ``import Init`` leads somewhere. ``cache``:
    the folder for files to keep between starts. ``stamp``: of its files' names, sizes, times and
    inodes, as they were ``found``. ``seen``: the names of the files of all modules that could be
    imported, Lean's own among them.
    """

    name: str
    toolchain: Toolchain
    project: Path | None
    search_path: tuple[Path, ...]
    options: tuple[str, ...]
    fingerprint: str
    header: str = ""
    cache: Path = field(default=Path(), repr=False, compare=False)
    stamp: str = field(default="", repr=False, compare=False)
    found: Mapping[str, File] = field(default_factory=dict, repr=False, compare=False)
    seen: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def __str__(self) -> str:
        told = f"{self.name} ({self.fingerprint[:12]}), {self.toolchain}"
        options = ", ".join(lean_options.shown(self.options))
        return f"{told}, with {options}" if options else told

    def process_env(self) -> dict[str, str]:
        """Returns all environment variables of a Lean process, except the caller's HOME and TMPDIR.
        Nothing is inherited: the worker's own environment holds secrets (LEANQ_URL)."""
        variables = {
            "LANG": "C.UTF-8",
            "LEAN_PATH": os.pathsep.join(map(str, self.search_path)),
            "PATH": "/usr/bin:/bin",
        }
        if prefix := self.toolchain.prefix:
            variables["LEAN_SYSROOT"] = str(prefix)
        return variables

    def command(self, args: Sequence[str] = ()) -> list[str]:
        """Returns the command that reads a text from standard input. What is behind `--stdin` may
        differ from text to text behind one preloaded header."""
        return [*self.toolchain.command, *self.options, "--json", "--stdin", *args]

    def sandbox_env(self, scratch: Path) -> dict[str, str]:
        return {**self.process_env(), "HOME": str(scratch), "TMPDIR": str(scratch)}

    def header_for(self, code: str) -> str:
        """Returns the lines to put in front of a text; none if it has a header of its own."""
        return "" if split_header(code).end_offset else self.header

    def readable(self) -> tuple[Path, ...]:
        """Returns all that a Lean process has to read beside the system's folders."""
        if self.toolchain.prefix:
            wanted = [self.toolchain.prefix, self.toolchain.program]
        else:
            wanted = [self.toolchain.program.parent, LAUNCHER, *python_folders()]
        wanted += (*self.toolchain.shared_libraries, *self.folders())
        return tuple(dict.fromkeys(path for path in wanted if path.exists()))

    def find_olean(self, module: str) -> Path | None:
        """Finds the compiled file of ``module`` (``Mathlib.Data.Nat.Basic``) as Lean does."""
        return find_module(module_parts(module), self.folders())

    def folders(self) -> tuple[Path, ...]:
        """Returns the folders in which Lean looks for modules, the toolchain's own last."""
        library = self.toolchain.library
        return (*self.search_path, *([library] if library else []))

    def missing(self, header: Header) -> tuple[str, ...]:
        """Returns the modules that a text with this header imports and that are missing here."""
        wanted = header.imports if header.is_prelude else ("Init", *header.imports)
        return tuple(module for module in wanted if self.find_olean(module) is None)

    def lost(self, modules: Iterable[str]) -> tuple[str, ...]:
        """Returns those of the modules that could be imported at opening, and cannot by now. Where
        nothing of a library is left, its name stands for each of its modules."""
        found, folders = [], self.folders()
        for module in modules:
            parts = module_parts(module)
            if find_folder(parts[0], folders) is None:
                is_lost = any(library_of(name) == parts[0] for name in self.seen)
            else:
                is_lost = _file_of(parts) in self.seen and find_module(parts, folders) is None
            found += [module] if is_lost else []
        return tuple(found)

    def after(self, earlier: Environment) -> Environment:
        """Returns the environment as one that was opened in the place of an earlier one; with the
        same Lean, it has seen what that has seen."""
        ours, theirs = self.toolchain, earlier.toolchain
        if (ours.version, ours.commit) != (theirs.version, theirs.commit):
            return self
        return replace(self, seen=self.seen | earlier.seen)

    def libraries(self) -> tuple[str, ...]:
        """Returns the first parts of all importable modules' names, such as ``Mathlib``."""
        found: set[str] = set()
        for folder in self.folders():
            with contextlib.suppress(OSError):
                names = os.listdir(folder)
                found |= {name.removesuffix(".olean") for name in names if name.endswith(".olean")}
        return tuple(sorted(found))

    def roots(self, modules: Iterable[str]) -> str:
        """Returns a header that imports these modules' libraries as a whole, as far as they can
        be."""
        libraries = dict.fromkeys(quote(module_parts(module)[0]) for module in modules)
        lines = [f"import {name}" for name in libraries if self.find_olean(name)]
        return "\n".join(["prelude", *lines]) if lines else ""

    def explain_import(self, code: str) -> str:
        """Returns for people which imports are missing, what there is, and what to do."""
        missing = self.missing(split_header(code))
        lacks = f"lacks {', '.join(missing[:5])}" if missing else "lacks a module that is needed"
        has = some_of(self.libraries(), 10) or "no library"
        near = "".join(map(self._nearest, missing[:2]))
        return (
            f"the environment {self.name!r} {lacks}; it has {has} "
            f"(Lean {self.toolchain.version}){near}. Choose the environment that has it with "
            "--env, and serve it with: leanq worker --env NAME=FOLDER, the folder of a Lake "
            "project that is built"
        )

    def _nearest(self, missing: str) -> str:
        """Returns which modules may have been meant by a missing one; "" for none."""
        names = (file.removesuffix(".olean").split("/") for file in self.seen)
        found = nearest(module_parts(missing), names)
        shown = ", ".join(".".join(map(quote, parts)) for parts in found)
        return shown and f". Nearest to {missing}: {shown}"

    def changed(self) -> bool:
        """Returns whether any of its files has another size, time or inode than at opening; the
        fingerprint may well be the same."""
        try:
            return _scan(self.toolchain, self.search_path, self.project).stamp() != self.stamp
        except OSError:
            return True


def module_parts(module: str) -> tuple[str, ...]:
    """Returns the parts of a module's name (``Mathlib.Data.Nat.Basic``)."""
    return tuple(quoted or plain for quoted, plain in _NAME_PART.findall(module))


def _file_of(parts: Sequence[str]) -> str:
    return f"{'/'.join(parts)}.olean"


def python_folders() -> tuple[Path, ...]:
    python = Path(sys.executable).resolve()
    prefixes = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    return (*map(Path, sorted(prefixes)), python, python.parent.parent / "lib")


def open_environment(
    name: str,
    path: Path | None,
    *,
    lean: str | None = None,
    cache: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    options: Sequence[str] = (),
    options_of_project: bool = False,
) -> Environment:
    """Finds the Lean of an environment and takes its fingerprint. ``path`` is a Lake project, a
    folder of compiled modules, or None for the toolchain's own library (with the wheel: Core).
    ``lean`` is the value of ``--lean``, ``cache`` the folder for files to keep between starts.
    ``options`` are Lean's for all texts, each ``-DNAME=VALUE``, besides the project's own
    ``leanOptions`` with ``options_of_project``. Raises ToolchainError."""
    cache = cache_folder(cache, environ)
    folder = _checked_folder(name, path) if path is not None else None
    toolchain, search_path = find_toolchain_and_path(lean, folder, environ)
    project = None
    if folder is not None and is_lake_project(folder):
        project = folder
    elif folder is not None:
        search_path = (folder,)
    of_project = lean_options.of_project(name, project) if options_of_project else []
    options = lean_options.ordered([*of_project, *options])
    if options:
        lean_options.check(name, toolchain, options, environ)
    if toolchain.source == "wheel":
        search_path = (*search_path, _core(toolchain, cache, environ))
    # Lean's implicit imports are there; every toolchain but the wheel brings them.
    has_init = any((each / "Init.olean").is_file() for each in search_path)
    header = "" if has_init or toolchain.source != "wheel" else _CORE_HEADER
    memory = (
        cache / "hashes" / f"{hash_bytes(os.fsencode(folder or toolchain.program)).hex()[:32]}.json"
    )
    try:
        scan = _scan(toolchain, search_path, project)
        if folder is not None and project is None and not scan.folders[0]:
            raise ToolchainError(
                f"environment {name}: {folder} holds neither a lakefile nor compiled modules"
                " (.olean); name a Lake project or the folder that its modules are compiled to"
            )
        if project is not None:
            check_project(name, toolchain, project)
        compiled = (*scan.folders[: len(search_path)], scan.beside)
        modules = [(file.name, file.path) for each in compiled for file in each]
        if library := toolchain.library:
            modules += ((each, f"{library}/{each}") for each in module_names(library, LEANS_OWN))
        check_builds(name, toolchain, search_path, modules, environ)
        brought: dict[File, str] = {}
        for place, files in zip(search_path, scan.folders, strict=False):
            brought |= baked(place, files) if files else {}
        hashes = content_hashes(scan.files(), memory, brought)
    except OSError as error:
        raise ToolchainError(
            f"environment {name}: cannot read {error.filename} ({error.strerror});"
            " make it readable to the worker, and leave it as it is meanwhile"
        ) from error
    fingerprint = _fingerprint(toolchain, options, header, scan, hashes)
    return Environment(
        name=name,
        toolchain=toolchain,
        project=project,
        search_path=search_path,
        options=options,
        fingerprint=fingerprint,
        header=header,
        cache=cache,
        stamp=scan.stamp(),
        found={file.path: file for file in scan.files()},
        seen=frozenset(_importable(toolchain, search_path, scan)),
    )


class _Scan(NamedTuple):
    program: File
    folders: list[list[File]]
    """Yields the compiled modules of each folder of the search path, then the project's own
    files."""
    beside: list[File]
    """The compiled modules that stand in Lean's own folder and are none of Lean's own."""
    hidden: list[str]
    """The libraries that a folder without a module of theirs hides: Lean looks in no further
    one."""
    links: list[tuple[str, int, int]]
    """The links on the way to the folders, as they were made: one may lead elsewhere and back."""

    def files(self) -> list[File]:
        return [file for folder in (*self.folders, self.beside) for file in folder]

    def stamp(self) -> str:
        return hash_bytes(repr(self).encode()).hex()


def _scan(toolchain: Toolchain, search_path: Sequence[Path], project: Path | None) -> _Scan:
    # As for Lean, a library that is not compiled yet is an empty folder of the search path.
    folders = [compiled_modules(folder) if folder.is_dir() else [] for folder in search_path]
    own, beside = toolchain.library, list[File]()
    if own is not None and own.is_dir():
        beside = compiled_modules(own, LEANS_OWN)
    hidden = _hidden(search_path, folders, beside)
    if project is not None:
        # A project's manifest and compiled modules stand for its packages.
        sources = files_below(
            str(project),
            _PROJECT_FILES,
            lambda name: not name.startswith(".") and name != "lake-packages",
        )
        folders.append(sorted(sources))
    above = dict.fromkeys(each for path in search_path for each in (path, *path.parents))
    status = {str(path): path.lstat() for path in above if path.is_symlink()}
    links = [(path, each.st_ino, each.st_ctime_ns) for path, each in status.items()]
    return _Scan(File.at(toolchain.program), folders, beside, hidden, links)


def _hidden(
    search_path: Sequence[Path], folders: Sequence[Sequence[File]], beside: Sequence[File]
) -> list[str]:
    known = [{library_of(file.name) for file in files} for files in folders]
    found = []
    for library in sorted(LEANS_OWN.union(*known, map(library_of, (f.name for f in beside)))):
        folder = find_folder(library, search_path)
        if folder is not None and library not in known[(at := search_path.index(folder))]:
            found.append(f"{at} {library}")
    return found


def _importable(toolchain: Toolchain, search_path: Sequence[Path], scan: _Scan) -> Iterator[str]:
    """Yields the names of the files of all modules that no other folder hides."""
    names = [[file.name for file in files] for files in scan.folders[: len(search_path)]]
    folders = [*search_path]
    if own := toolchain.library:
        folders.append(own)
        names.append([*(file.name for file in scan.beside), *module_names(own, LEANS_OWN)])
    decides = functools.cache(lambda library: find_folder(library, folders))
    for folder, found in zip(folders, names, strict=True):
        modules = (name for name in found if name.endswith(".olean"))
        yield from (name for name in modules if decides(library_of(name)) == folder)


def _fingerprint(
    toolchain: Toolchain,
    options: Sequence[str],
    header: str,
    scan: _Scan,
    hashes: Mapping[str, str],
) -> str:
    digest = hashlib.blake2b(digest_size=32, person=b"leanq-env-1")

    def add(*words: str) -> None:
        # Lengths before contents: no two lists of words give the same bytes.
        encoded = [os.fsencode(word) for word in words]
        digest.update(len(encoded).to_bytes(8))
        for word in encoded:
            digest.update(len(word).to_bytes(8) + word)

    add("lean", toolchain.version, toolchain.commit)
    add("options", *options)
    add("header", header)
    folders = [("folder", folder) for folder in scan.folders]
    folders += [("beside", scan.beside)] if scan.beside else []
    for kind, folder in folders:
        add(kind, str(len(folder)))
        for file in folder:
            add(file.name, hashes[file.path])
    if scan.hidden:
        add("hidden", *scan.hidden)
    return digest.hexdigest()


def _core(toolchain: Toolchain, cache: Path, environ: Mapping[str, str]) -> Path:
    """Returns the folder of the compiled Core for the wheel's Lean, and makes it if it is missing.
    A rename makes it appear whole; of several processes that make it, the first wins."""
    source = _CORE_SOURCE.read_bytes()
    made = cache / "core" / f"{toolchain.commit}-{hash_bytes(source).hex()[:16]}"
    if (made / "Core.olean").is_file():
        return _checked_core(made)
    try:
        make_folders(made.parent)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=made.parent) as scratch:
            Path(scratch, "Core.lean").write_bytes(source)
            folder = Path(scratch, "core")
            folder.mkdir(0o755)
            command = (*toolchain.command, "-o", "core/Core.olean", "Core.lean")
            done = ask(command, environ, Path(scratch))
            if done.returncode != 0:
                free_bytes = shutil.disk_usage(scratch).free
                if free_bytes < _CORE_NEEDS_BYTES:
                    raise _full(made.parent, free_bytes)
                raise ToolchainError(
                    f"Lean {toolchain.version} cannot compile {_CORE_SOURCE}: {last_words(done)};"
                    f" install the versions that belong together: {to_install('local')}"
                )
            with Path(folder, "Core.olean").open("rb") as olean:
                os.fchmod(olean.fileno(), 0o644)
                os.fsync(
                    olean.fileno()
                )  # Otherwise a loss of power could leave an empty one for good.
            try:
                folder.rename(made)
            except OSError:
                if not (made / "Core.olean").is_file():
                    raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(made.parent, shutil.disk_usage(cache).free) from error
        raise ToolchainError(
            f"cannot write {made} ({error.strerror}); name a writable cache folder with LEANQ_CACHE"
        ) from error
    return _checked_core(made)


def _checked_core(made: Path) -> Path:
    """Returns the folder of Core; raises ToolchainError if another user could have changed it."""
    for path in (made.parent, made, made / "Core.olean"):
        if not is_ours(path.stat()):
            raise ToolchainError(
                f"other users can write to {path}, which every text may import: delete it, or let "
                "it be this user's alone, or name another cache folder with LEANQ_CACHE"
            )
    return made


def _full(folder: Path, free_bytes: int) -> ToolchainError:
    return ToolchainError(
        f"the disk of the cache folder {folder} is full ({free_bytes >> 20} MB free), and Core"
        f" needs {_CORE_NEEDS_BYTES >> 20} MB there; free some, or name a folder on another disk"
        " with LEANQ_CACHE"
    )


def _checked_folder(name: str, path: Path) -> Path:
    folder = path.expanduser().absolute()
    if not folder.is_dir():
        raise ToolchainError(
            f"environment {name}: there is no folder {folder};"
            " name a Lake project or a folder of compiled modules"
        )
    if os.pathsep in str(folder):
        raise ToolchainError(
            f"environment {name}: {folder} has a {os.pathsep!r} in its name,"
            " which LEAN_PATH cannot hold; rename it"
        )
    return folder


def cache_folder(cache: Path | None, environ: Mapping[str, str]) -> Path:
    """Returns the folder for files to keep: ``cache``, LEANQ_CACHE, or the user's."""
    if cache is None and (named := environ.get("LEANQ_CACHE")):
        cache = Path(named)
    if cache is not None:
        return cache.expanduser().absolute()
    shared = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(shared):
        shared = os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(shared, "leanq")


# Whether anything was written in an environment's folders, as the kernel tells (inotify).
#
# To look at all files of a large library takes 150 ms, and each verdict waits for a look. A watch
# that has heard nothing since the last look saves it. It hears nothing of other machines, so
# network file systems are never quiet; nor of writes by another name of a file or through memory,
# which the look every few seconds finds.

_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
# Modified, attributes, closed after writing, moved, created, deleted, and the folder itself gone.
_MASK = 0x2 | 0x4 | 0x8 | 0x40 | 0x80 | 0x100 | 0x200 | 0x400 | 0x800
# File systems on which all writes pass this kernel.
_LOCAL = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "squashfs", "erofs")
)
_EVENT_BYTES = 1 << 16


class Watch:
    """A watch over the folders of an environment's files; over none, it is never quiet. Blocks for
    as long as it takes to find these folders."""

    def __init__(self, environment: Environment | None = None) -> None:
        self._fd = -1
        self._is_quiet = False
        if environment is None:
            return
        folders = _folders(environment)
        try:
            if not _are_local(folders):
                return
            libc = ctypes.CDLL(None, use_errno=True)
            self._fd = libc.inotify_init1(_NONBLOCK_CLOEXEC)
            for folder in folders if self._fd >= 0 else ():
                if libc.inotify_add_watch(self._fd, os.fsencode(folder), _MASK) < 0:
                    raise OSError(ctypes.get_errno(), "inotify_add_watch", folder)
        except (OSError, AttributeError):
            self.close()

    def begin(self) -> None:
        """Forgets what was heard: a look at all files begins."""
        self._is_quiet = self._fd >= 0
        self._hear()

    def is_quiet(self) -> bool:
        """Returns whether nothing was heard since the last :meth:`begin`."""
        if self._is_quiet and self._hear():
            self._is_quiet = False
        return self._is_quiet

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._is_quiet = False

    def _hear(self) -> bool:
        heard = False
        with contextlib.suppress(BlockingIOError):
            while self._fd >= 0 and os.read(self._fd, _EVENT_BYTES):
                heard = True
        return heard


def _folders(environment: Environment) -> list[str]:
    """Returns the folders of all files, and of what links among them lead to."""
    places = [str(folder) for folder in environment.search_path]
    places += [os.path.dirname(path) for path in environment.found]
    places.append(os.path.dirname(environment.toolchain.program))
    folders = set(filter(os.path.isdir, places))
    folders |= {os.path.dirname(os.path.realpath(path)) for path in environment.found}
    folders |= set(map(os.path.realpath, tuple(folders)))
    return sorted(folders)


def _are_local(folders: Iterable[str]) -> bool:
    kinds = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, behind = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape")
        kinds[point] = behind.split()[0]

    def kind_of(folder: str) -> str:
        while folder not in kinds and folder != "/":
            folder = os.path.dirname(folder)
        return kinds.get(folder, "")

    return all(kind_of(os.path.realpath(each)) in _LOCAL for each in folders)
