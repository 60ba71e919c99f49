"""``make mutants``: plants bugs one at a time, and says which tests notice them.

    python -m engines.mutants [--bugs 200] [--seed N] [--group NAME] [--processes 2]

Each bug changes one place of a copy of the checkout, never the checkout. Tests that may reach the
place run on the copy: the fast ones of its room and those that import its module, as `make test`
has them, and then the slow ones of its room. One that fails, or takes too long, has noticed it,
if it passes on a clean copy. `equivalent_mutants.toml` lists changes that change nothing.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from support.paths import ROOT, TESTS

from engines import planted_bugs

_EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
# How many of a hundred bugs each group gets, and where its lines are. A bug of the scripts hurts
# the most, and no type checker sees them: half as many again as of what calls them.
_GROUPS: dict[str, tuple[int, tuple[str, ...]]] = {
    "lua": (27, ("leanq/queue/lua",)),
    "queue": (18, ("leanq/queue", "leanq/producer", "leanq/consumer", "leanq/states.py")),
    "judge": (14, ("leanq/lean/judge", "leanq/lean/run/image.py", "leanq/lean/run/olean.py")),
    "sandbox": (9, ("leanq/lean/sandbox", "leanq/lean/run")),
    "lean": (8, ("leanq/lean",)),
    "scaler": (6, ("leanq/fleet", "leanq/scale.py")),
    "campaigns": (6, ("leanq/campaigns",)),
    "gateway": (6, ("leanq/gateway",)),
    "trainers": (6, ("leanq/trainers",)),
}
# A test that hangs is ended long before; who gets that far is only on a busy machine.
_STAGE_S = 1800
_FAST = ("-m", "not slow", "--hypothesis-profile=quick", "--timeout=60")
_SLOW = ("-m", "slow")
# Test modules beside those of its room, which are the nearest by imports.
_MOST_RELATED = 12
_CODE_FAILED, _PASSED = 1, (0, 5)  # 5: there is no such test


@dataclass
class _Outcome:
    """What became of one bug."""

    group: str
    bug: planted_bugs.Bug
    noticed: str = ""
    """By which tests: ``fast``, ``slow``, or none."""
    by: str = ""
    took_s: float = 0.0


class _Tests:
    """Which test modules reach a file, by their imports."""

    def __init__(self) -> None:
        self._modules = sorted(path for path in TESTS.rglob("test_*.py") if _is_ours(path))
        files = {*ROOT.glob("leanq/**/*.py"), *TESTS.rglob("*.py")}
        self._imports = {path: {*_imported(path)} & files for path in files}
        self._texts = {path: path.read_text() for path in self._modules}

    def of(self, path: Path) -> tuple[list[Path], list[Path]]:
        """Returns those of its room, and the nearest others; the most likely first."""
        if path.suffix == ".lua":
            return self._of_script(path)
        distances = {module: self._distance(module, path) for module in self._modules}
        likely = sorted(
            self._modules,
            key=lambda module: (path.stem not in module.stem, distances[module] or 99, module),
        )
        room = TESTS / path.parent.relative_to(ROOT / "leanq")
        while not any(module.parent == room for module in likely):
            room = room.parent  # a small one is tested with the one around it
        # No test imports what runs as a process of its own.
        own = [module for module in likely if module.parent == room]
        others = [module for module in likely if module.parent != room and distances[module]]
        return own, others[:_MOST_RELATED]

    def _distance(self, module: Path, path: Path) -> int:
        """Returns after how many imports a test reaches a file; 0 if never."""
        seen, front, steps = {module}, {module}, 0
        while front:
            if path in front:
                return steps
            front = set().union(*(self._imports[each] for each in front)) - seen
            seen |= front
            steps += 1
        return 0

    def _of_script(self, path: Path) -> tuple[list[Path], list[Path]]:
        """A part is reached through its scripts, and a script by whoever tests what it is for."""
        names = planted_bugs.scripts_with(path)
        folders = {
            "replay": ("trainers/test_replay",),
            "state": ("test_states",),
            "snapshot": ("test_states", "lean/goals/test_snapshot"),
        }
        wanted = {
            place for name in names for place in folders.get(name.partition("_")[0], ("queue/",))
        }
        own = [
            module
            for module in self._modules
            if str(module.relative_to(TESTS)).startswith((*wanted,))
        ]
        # The model and the tests of each transition see the most.
        first = ("test_queue_model", "test_queue", f"test_{path.stem}")
        own.sort(key=lambda module: first.index(module.stem) if module.stem in first else -1)
        own.reverse()
        if "queue/" not in wanted:
            return own, []
        others = [each for each in self._modules if each.parent.name in ("producer", "consumer")]
        return own, others


def _is_ours(path: Path) -> bool:
    """Whether `make test` would run it on any machine, in a time that does not count."""
    return path.relative_to(TESTS).parts[0] not in ("real", "soak", "adapters", "deploy")


def _imported(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        else:
            continue
        for name in names:
            place = name.replace(".", "/")
            for root in (ROOT, TESTS):
                yield from (root / f"{place}.py", root / place / "__init__.py")


@dataclass
class _Copies:
    """A clean copy of the checkout for each process, and one on which failures are tried again."""

    folder: Path
    passes: dict[str, bool] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def make(self, name: str) -> Path:
        copy = self.folder / name
        listed = subprocess.run(
            ("git", "ls-files", "-co", "--exclude-standard", "-z"),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for each in filter(None, listed.split("\0")):
            if (ROOT / each).is_file():
                (copy / each).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / each, copy / each)
        return copy

    def fail_without(self, tests: Sequence[str]) -> bool:
        """Whether one of these tests fails without any bug: then it says nothing."""
        with self.lock:
            for test in tests:
                if test not in self.passes:
                    code, _ = _run_tests(self.folder / "clean", [test], ())
                    self.passes[test] = code == 0
            return not all(self.passes[test] for test in tests)


_RUNNING: set[subprocess.Popen[bytes]] = set()
_ENDS = threading.Event()


def _run_tests(
    copy: Path, tests: Sequence[str], options: Sequence[str]
) -> tuple[int | None, list[str]]:
    """Returns pytest's exit code, or None if it took too long, and the tests that failed.

    Raises:
        InterruptedError: this program ends.
    """
    command = (sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *options, *tests)
    environ = {**os.environ, "PYTHONPATH": str(copy)}
    # A file, since processes that outlast pytest would keep a pipe open.
    output = copy.with_suffix(".log")
    with (
        output.open("w") as file,
        subprocess.Popen(
            command, cwd=copy, env=environ, stdout=file, stderr=file, start_new_session=True
        ) as process,
    ):
        _RUNNING.add(process)
        try:
            process.wait(_STAGE_S)
        except subprocess.TimeoutExpired:
            return None, []
        finally:
            _RUNNING.discard(process)
            _kill(process)
            if _ENDS.is_set():
                raise InterruptedError
    said = output.read_text(errors="replace")
    return process.returncode, re.findall(
        r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", said, re.MULTILINE
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends pytest and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _try(outcome: _Outcome, copy: Path, copies: _Copies, tests: _Tests) -> None:
    """Plants a bug in a copy, and runs tests until one notices it."""
    bug, began_s = outcome.bug, time.monotonic()
    place = copy / bug.path.relative_to(ROOT)
    room, others = tests.of(bug.path)
    place.write_text(bug.changed())
    try:
        stages = [("fast", room, _FAST), ("fast", others, _FAST), ("slow", room, _SLOW)]
        for kind, modules, options in stages:
            names = [str(module.relative_to(ROOT)) for module in modules]
            if not names:
                continue
            without: list[str] = []
            while True:
                code, failed = _run_tests(copy, names, (*options, *without))
                if code == _CODE_FAILED and failed and copies.fail_without(failed):
                    without += [f"--deselect={test}" for test in failed]
                    continue
                break
            if code is None or code in _PASSED:
                continue
            outcome.noticed = kind
            outcome.by = ", ".join(failed) or f"code {code}"
            return
    finally:
        place.write_text(bug.text)
        outcome.took_s = time.monotonic() - began_s


def _draw(options: argparse.Namespace) -> list[_Outcome]:
    """The bugs of a seed: to each group its share, from lines that are drawn evenly."""
    shares = {
        name: weight for name, (weight, _) in _GROUPS.items() if options.group in (None, name)
    }
    drawn: list[_Outcome] = []
    taken: set[Path] = set()
    total, given = sum(shares.values()), 0
    for name, (_, places) in _GROUPS.items():
        files = [path for path in _files(places) if (path.suffix == ".lua") == (name == "lua")]
        files = [path for path in files if path not in taken]
        taken.update(files)
        if name not in shares:
            continue
        rng = random.Random(f"{options.seed} {name}")
        # Rounded so that all of them together are as many as were asked for.
        before, given = given, given + shares[name]
        count = round(options.bugs * given / total) - round(options.bugs * before / total)
        lines = [bugs for path in files for bugs in planted_bugs.by_line(path)]
        chosen = rng.sample(lines, min(count, len(lines)))
        drawn += [_Outcome(name, rng.choice(bugs)) for bugs in chosen]
    random.Random(options.seed).shuffle(drawn)
    return drawn


def _files(places: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for place in places:
        path = ROOT / place
        found += [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.lua")]
    return sorted(found)


def _table(outcomes: Sequence[_Outcome]) -> Iterator[str]:
    yield "| group | bugs | fast tests | slow ones | survived |"
    yield "| --- | --- | --- | --- | --- |"
    groups = [name for name in _GROUPS if any(each.group == name for each in outcomes)]
    for name in (*groups, "all"):
        counts = Counter(each.noticed for each in outcomes if name in (each.group, "all"))
        told = (counts.total(), counts["fast"], counts["slow"], counts[""])
        yield f"| {name} | {' | '.join(map(str, told))} |"


def main() -> int:
    """Plants and tries them; returns 1 if any survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bugs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--group", choices=_GROUPS)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    known = {(each["file"], each["old"], each["new"]) for each in _equivalent()}
    drawn = _draw(options)
    tried = [each for each in drawn if each.bug.key() not in known]
    done: list[_Outcome] = []
    tests = _Tests()
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="leanq-mutants-") as folder:
        copies = _Copies(Path(folder))
        copies.make("clean")
        free = [copies.make(f"copy{number}") for number in range(options.processes)]

        def attempt(outcome: _Outcome) -> None:
            copy = free.pop()
            _try(outcome, copy, copies, tests)
            free.append(copy)
            done.append(outcome)
            end = f"{outcome.noticed}: {outcome.by}" if outcome.noticed else "SURVIVED"
            where = f"{outcome.group} {outcome.bug.path.relative_to(ROOT)}:{outcome.bug.line}"
            print(f"{len(done)}/{len(tried)} {where} {end} ({outcome.took_s:.0f} s)", flush=True)

        pool = ThreadPoolExecutor(options.processes)
        try:
            for future in [pool.submit(attempt, each) for each in tried]:
                future.result()
        finally:
            _ENDS.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*_RUNNING]:
                _kill(process)
            pool.shutdown()
            _report(options.seed, done, len(drawn) - len(tried))
    return int(any(not each.noticed for each in done))


def _end(*_: object) -> NoReturn:
    # `timeout` sends it twice, and the report takes a moment.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def _equivalent() -> list[dict[str, str]]:
    found: list[dict[str, str]] = tomllib.loads(_EQUIVALENT.read_text()).get("equivalent", [])
    return found


def _report(seed: int, done: Sequence[_Outcome], equivalent: int) -> None:
    for each in done:
        if not each.noticed:
            old, new = each.bug.text.splitlines(), each.bug.changed().splitlines()
            print()
            name = str(each.bug.path.relative_to(ROOT))
            print("\n".join(difflib.unified_diff(old, new, name, each.bug.kind, n=2, lineterm="")))
    print("", *_table(done), "", f"seed {seed}; {equivalent} more change nothing", sep="\n")


if __name__ == "__main__":
    sys.exit(main())
