"""The kernel images of an environment: what its modules declare, as the judge's Lean imports it.

Each module is transcribed once (:mod:`leanq.lean.judge.transcriber`) and kept under the hash of its
content. For each state of an environment's files there is a folder of hard links to these images.
A state is which file belongs to which module, each file's size, times and inode, and the content of
those that were just changed. The folder fills as headers need more; `KernelImages.prepare_all`
fills it at once. ::

    kernel-images/KEY/                KEY: the judge's Lean, and the code that transcribes
      store/AB/DIGEST.olean           the image of a module
      store/AB/DIGEST.json            what is known of the module
      views/STATE/A/B.olean           a link, under the module's name
      views/STATE/.index.json         what is known of all modules in this folder

Whoever can write there can prove anything. So folders and files are made for this user alone to
write to, whatever the umask is, and anything else in their place is refused. No candidate's process
sees them.

All functions block.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from leanq.errors import AuditError
from leanq.lean.environment import Environment, module_parts
from leanq.lean.judge.judge_lean import JudgeLean
from leanq.lean.judge.transcriber import OF_CHARACTERS, OF_LIST
from leanq.lean.run.files import (
    File,
    compiled_modules,
    content_hashes,
    hash_bytes,
    is_ours,
    keep,
    make_folders,
    make_ours,
    read_kept,
    unsettled,
)
from leanq.lean.run.image import ASTRAY, Image, Name
from leanq.lean.run.layouts import Damaged, header
from leanq.lean.run.olean import code_with, display, find_modules, read_bytes
from leanq.lean.sandbox.sandbox import bare_python
from leanq.lean.text import split_header

log = logging.getLogger("leanq.worker")

_PROCESSES = 2
_PARTS = (".olean", ".olean.server", ".olean.private")
_VIEWS_KEPT = 64
_SAY_EVERY_S = 2.0
_MAX_BYTES = 1 << 30


class Prepared(NamedTuple):
    """The images that a header needs.

    Attributes:
        folder: where the judge's Lean finds them.
        modules: how many modules the header leads to.
        constants: how many constants they declare.
        layout: of the library's files, in words.
    """

    folder: Path
    modules: int
    constants: int
    layout: str


class _Fact(NamedTuple):
    """What is known of a module."""

    imports: tuple[Name, ...]
    constants: int
    known: tuple[str, ...]
    """The names that the kernel knows among those that it declares."""
    image_bytes: int
    digest: str
    """Names the image; the hash of the module's parts, and of what was added to it."""


class KernelImages:
    """The images of one environment, as its files are when they are first asked for.

    Args:
        lean: the judge's.

    Attributes:
        progress: how many images are made, in words; "" while none are being made.
    """

    def __init__(self, environment: Environment, lean: JudgeLean) -> None:
        self.progress = ""
        self._environment, self._lean = environment, lean
        self._root = environment.cache / "kernel-images"
        self._lock = threading.Lock()
        self._facts: dict[Name, _Fact] = {}
        self._files: dict[str, File] = {}
        self._paths: dict[Name, str] = {}
        self._content: Mapping[str, str] = {}
        self._folders: set[Name] = set()
        self._state = ""
        self._store = ""
        self._view: Path | None = None
        self._homes: dict[str, Name] = {}

    def library_state(self) -> str:
        """Returns a name of what the library's modules declare, and of the judge's Lean; makes
        their images if they are missing.

        Raises:
            AuditError: as `prepare` does.
        """
        with self._lock:
            view = self._opened()
            self._homes = self._library_homes(view)
            closure = self._closure(view, _library(self._environment))
            made = sorted((display(each), self._facts[each].digest) for each in closure)
            return f"{view.parents[1].name}/{hash_bytes(repr(made).encode()).hex()[:32]}"

    def prepare(self, modules: Sequence[Name]) -> Prepared:
        """Returns the images of these modules and of all that they import; makes those that are
        missing.

        Raises:
            AuditError: a module is missing, or cannot be transcribed; or one beside the library
                declares a name that the kernel knows.
        """
        with self._lock:
            view = self._opened()
            if not self._homes:
                self._homes = self._library_homes(view)
            closure = self._closure(view, modules)
            for module in closure:
                for name in self._facts[module].known:
                    if self._homes.get(name) != module:
                        raise AuditError(
                            f"the module {display(module)} declares {name}, which the kernel knows "
                            "by its name, and it is not this environment's library"
                        )
            return self._prepared(view, closure)

    def prepare_all(self) -> tuple[Prepared, dict[str, str]]:
        """Makes the images of all modules; returns them, and why some cannot be transcribed."""
        with self._lock:
            view = self._opened()
            self._homes = self._library_homes(view)
            faults = self._make(view, [*self._paths])
            return self._prepared(view, [*self._facts]), faults

    def forget_lost(self) -> bool:
        """Forgets images that are no longer there, as after a clean-up of old files; returns
        whether there are any."""
        with self._lock:
            view, facts = self._view, self._facts
            self._facts = {
                module: fact
                for module, fact in facts.items()
                if view and _is_whole(_place(view, module), fact.image_bytes)
            }
            self._homes = {}
            return len(self._facts) < len(facts)

    def _prepared(self, view: Path, modules: Sequence[Name]) -> Prepared:
        constants = sum(self._facts[module].constants for module in modules)
        path = self._path(_library(self._environment)[0])
        with open(path, "rb") as file:
            start = file.read(64)
        try:
            layout = f"files of Lean {header(start).lean or '4.9 to 4.13'} (layout {start[5]})"
        except Damaged as error:
            raise AuditError(f"{path} cannot be read any more: {error}") from None
        return Prepared(view, len(modules), constants, layout)

    def _library_homes(self, view: Path) -> dict[str, Name]:
        """Returns the module of the environment's library that declares each name that the kernel
        knows."""
        modules = _library(self._environment)
        closure = self._closure(view, modules)
        homes = {name: module for module in closure for name in self._facts[module].known}
        of_list, of_characters = display(OF_LIST), display(OF_CHARACTERS)
        if of_list not in homes and of_characters in homes:
            # A library before Lean 4.26: its kernel read texts by another name.
            home = homes[of_characters]
            if faults := self._make(view, [home], adds_of_list=True):
                raise AuditError(f"{display(home)} cannot be transcribed: {faults[display(home)]}")
            homes[of_list] = home
        return homes

    def _closure(self, view: Path, modules: Sequence[Name]) -> list[Name]:
        """Returns the modules and all that they import, after making their images."""
        seen, todo = dict.fromkeys(modules), [*modules]
        lacking: list[Name] = []
        while todo or lacking:
            if not todo:
                if faults := self._make(view, lacking):
                    [(first, why), *_] = faults.items()
                    raise AuditError(f"{first} cannot be read for the judge's kernel: {why}")
                todo, lacking = lacking, []
            module = todo.pop()
            fact = self._facts.get(module)
            if fact is None:
                lacking.append(module)
                fact = _read_fact(self._image(self._digest(module, self._hashes())))
            # A file is read before it is transcribed only so that the work goes in parallel.
            imports = fact.imports if fact else self._read_imports(module)
            fresh = [each for each in imports if each not in seen]
            seen |= dict.fromkeys(fresh)
            todo += fresh
        return [*seen]

    def _read_imports(self, module: Name) -> Sequence[Name]:
        try:
            image = Image([read_bytes(Path(self._path(module)).resolve(), _MAX_BYTES)])
            return [each.module for each in image.imports()]
        except (Damaged, IndexError) as error:
            why = str(error) if isinstance(error, Damaged) else ASTRAY
            raise AuditError(
                f"{display(module)} cannot be read for the judge's kernel: {why}"
            ) from None

    def _path(self, module: Name) -> str:
        path = self._paths.get(tuple(map(str, module)))
        if path is None:
            raise AuditError(f"the environment has no module {display(module)}")
        return path

    def _opened(self) -> Path:
        """Returns the folder of links, and learns what is known of its modules."""
        if self._view is not None:
            # Folders that are in use are not the ones to delete.
            with contextlib.suppress(OSError):
                os.utime(self._view)
                for folder in (self._view, *self._view.parents[:3]):
                    _take(folder)
                return self._view
        self._facts, self._homes, self._folders = {}, {}, set()
        root = self._root
        make_folders(root.parent)
        _take(root)
        libraries = [File.at(path) for path in self._lean.libraries]
        hashes = content_hashes(libraries, root / "libraries.json")
        code = code_with(
            *map("judge/{}".format, ("kernel", "known_names", "rebuild", "transcriber"))
        )
        key = hash_bytes("".join(hashes[file.path] for file in libraries).encode() + code)
        # Not anew: the self-test was about these files.
        self._state = self._state or self._look()
        base = root / key.hex()[:16]
        view = base / "views" / self._state
        is_new = not view.is_dir()
        for folder in (base, base / "store", view.parent, view):
            _take(folder)
        self._store = f"{base}/store"
        if is_new:
            with _alone(base / "lock"):
                _prune(base)
        else:
            self._learn(view)
        self._view = view
        return view

    def _look(self) -> str:
        """Finds the environment's files; returns a name of their state."""
        self._files = {}
        for folder in self._environment.folders():
            if folder.is_dir():
                found = compiled_modules(folder)
                self._files |= {f.path: f for f in found if f.path.endswith(_PARTS)}
        self._paths = dict(find_modules(self._environment.folders(), self._files))
        # Such a file may change once more, and look the same.
        young = sorted(unsettled(self._files.values()))
        content = [self._hashes().get(file.path) for file in young]
        state = ([*self._paths.items()], [*self._files.values()], content)
        return hash_bytes(repr(state).encode()).hex()[:32]

    def _learn(self, view: Path) -> None:
        """Learns what this process, or another one, has put into the folder."""
        with contextlib.suppress(ValueError, TypeError):
            for name, imports, constants, known, *rest in json.loads(
                read_kept(view / ".index.json") or b"[]"
            ):
                module = tuple(name)
                fact = _Fact(tuple(map(tuple, imports)), constants, tuple(known), *rest)
                is_new = module not in self._facts
                if is_new and _is_whole(_place(view, module), fact.image_bytes):
                    self._facts[module] = fact

    def _keep(self, view: Path) -> None:
        rows = [(module, *fact) for module, fact in self._facts.items()]
        keep(view / ".index.json", json.dumps(rows, separators=(",", ":")).encode())

    def _make(
        self, view: Path, modules: Sequence[Name], *, adds_of_list: bool = False
    ) -> dict[str, str]:
        """Links the images of modules into the folder, after making those that no environment has
        yet; returns why some cannot be made."""
        base = view.parents[1]
        faults: dict[str, str] = {}
        with _alone(base / "lock"):
            self._learn(view)
            hashes = self._hashes()
            jobs: dict[Name, dict[str, Any]] = {}
            for module in modules:
                if module in self._facts and not adds_of_list:
                    continue
                image = self._image(self._digest(module, hashes, adds_of_list=adds_of_list))
                _take(Path(image).parent)
                jobs[module] = {
                    "module": module,
                    "path": self._path(module),
                    "hashes": self._part_hashes(module, hashes),
                    "image": image,
                    "adds_of_list": adds_of_list,
                }
            missing = [job for job in jobs.values() if _read_fact(job["image"]) is None]
            if missing:
                faults = self._transcribe(missing)
            for module, job in jobs.items():
                fact = _read_fact(job["image"])
                if fact is None:
                    faults.setdefault(display(module), "no image was written")
                    continue
                self._facts[module] = fact
                self._link(job["image"], view, module)
            self._keep(view)
        return faults

    def _link(self, image: str, view: Path, module: Name) -> None:
        above, folder = module[:-1], view
        if above not in self._folders:
            for part in above:
                folder /= str(part)
                _take(folder)
            self._folders.add(above)
        place = _place(view, module)
        new = Path(f"{place}.{os.getpid()}")
        new.unlink(missing_ok=True)
        try:
            os.link(image, new)
        except OSError:  # a file system, or its rules, may allow no link
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(image, "rb") as old, open(os.open(new, flags, 0o444), "wb") as copy:
                shutil.copyfileobj(old, copy, 1 << 20)
        new.replace(place)
        new.unlink(missing_ok=True)  # it stays if the two were one file

    def _image(self, digest: str) -> str:
        return f"{self._store}/{digest[:2]}/{digest}.olean"

    def _digest(
        self, module: Name, hashes: Mapping[str, str], *, adds_of_list: bool = False
    ) -> str:
        """Returns the name of a module's image."""
        words = [*self._part_hashes(module, hashes), str(adds_of_list)]
        return hash_bytes(" ".join(words).encode()).hex()

    def _part_hashes(self, module: Name, hashes: Mapping[str, str]) -> list[str]:
        stem = self._path(module).removesuffix(".olean")
        return [hashes[each] for part in _PARTS if (each := stem + part) in hashes]

    def _hashes(self) -> Mapping[str, str]:
        """Returns the hashes of all files that are as they were found."""
        if not self._content:
            folders = "\0".join(map(str, self._environment.folders()))
            memory = self._root / f"hashes-{hash_bytes(os.fsencode(folders)).hex()[:32]}.json"
            self._content = content_hashes([*filter(_is_as_found, self._files.values())], memory)
        return self._content

    def _transcribe(self, jobs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Has processes write the images; returns why some were not written."""
        started = said = time.monotonic()
        done, faults = 0, dict[str, str]()
        self.progress = f"kernel images are being made: 0 of {len(jobs):,}"

        def heard(line: Mapping[str, Any], job: Mapping[str, Any]) -> None:
            nonlocal done, said
            done += 1
            if "fault" in line:
                faults[display(tuple(line["module"]))] = line["fault"]
            else:
                keep(Path(job["image"]).with_suffix(".json"), json.dumps(line).encode())
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                self.progress = f"kernel images are being made: {done:,} of {len(jobs):,}"
                log.info("%s: %s", self._environment.name, self.progress)

        # Large modules stand together, so each process gets every second one.
        shares = [share for n in range(_PROCESSES) if (share := jobs[n::_PROCESSES])]
        try:
            with ThreadPoolExecutor(len(shares)) as pool:
                for each in [pool.submit(self._run, share, heard) for share in shares]:
                    each.result()
        finally:
            self.progress = ""
        took_s = time.monotonic() - started
        log.info("kernel images of %s: made %d in %.1f s", self._environment.name, done, took_s)
        return faults

    def _run(self, jobs: Sequence[Mapping[str, Any]], heard: Any) -> None:
        """Has one process do some jobs."""
        by_module = {tuple(job["module"]): job for job in jobs}
        first = {"libraries": [str(path) for path in self._lean.libraries]}
        order = "".join(json.dumps(each) + "\n" for each in (first, *jobs))
        command = bare_python("leanq.lean.judge.transcriber")
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
            start_new_session=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(order.encode())
                process.stdin.close()
            for line in process.stdout:
                said = json.loads(line)
                heard(said, by_module[tuple(said["module"])])
            words = process.stderr.read().decode(errors="replace").strip()
        if process.returncode:
            log.warning("kernel images: %s", words[-1000:] or f"exit code {process.returncode}")


def _library(environment: Environment) -> tuple[Name, ...]:
    """Returns the modules that a text without a header imports."""
    header = split_header(environment.header)
    names = [*([] if header.is_prelude else ["Init"]), *header.imports]
    return tuple(map(module_parts, names))


def _read_fact(image: str) -> _Fact | None:
    """Returns what is known of a module whose image is there."""
    try:
        said = json.loads(read_kept(Path(image).with_suffix(".json")) or b"null")
        imports, size_bytes = tuple(map(tuple, said["imports"])), said["image_bytes"]
        if _is_whole(image, size_bytes):
            known, digest = tuple(said["known"]), Path(image).stem
            return _Fact(imports, said["constants"], known, size_bytes, digest)
    except (ValueError, KeyError, TypeError):
        pass
    return None


def _is_as_found(file: File) -> bool:
    try:
        return File.of(file.name, file.path, os.stat(file.path)) == file
    except OSError:
        return False


def _is_whole(image: str, size_bytes: int) -> bool:
    """Returns whether an image is a file of this size that no other user can have written."""
    try:
        status = os.lstat(image)
    except OSError:
        return False
    return is_ours(status) and stat.S_ISREG(status.st_mode) and status.st_size == size_bytes


def _place(view: Path, module: Name) -> str:
    return "/".join(map(str, (view, *module))) + ".olean"


def _take(folder: Path) -> None:
    """Makes a folder unless it is there; raises AuditError if other users can write to it."""
    if not make_ours(folder, 0o755):
        raise AuditError(
            f"other users can write to {folder}, from which the judge's kernel imports: delete it, "
            "or let it belong to the worker's user alone, or name another cache folder with "
            "LEANQ_CACHE"
        )


def _prune(base: Path) -> None:
    """Deletes the folders of links that were used longest ago, and images without a link."""
    views = sorted((base / "views").iterdir(), key=lambda view: view.stat().st_mtime_ns)
    for view in views[:-_VIEWS_KEPT]:
        shutil.rmtree(view, ignore_errors=True)
    if len(views) > _VIEWS_KEPT:
        for image in (base / "store").glob("*/*.olean"):
            if image.stat().st_nlink == 1:
                image.unlink()
                image.with_suffix(".json").unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits until no other process makes images here."""
    with open(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
