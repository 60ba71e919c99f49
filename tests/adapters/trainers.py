"""``make test-trainers``: the adapters beside the real libraries, on real Lean.

Each library gets an environment of its own, from the extra of its name, beside a queue and a worker
of this one. Prints what each install takes, and candidates per second through the adapter and by a
plain client. Where a library cannot be installed, or is larger than it may be, says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

from support.command_server import command_server
from support.paths import ROOT
from support.terminals import ended, new_terminal, wait_for_line

from leanq.local import EmbeddedServer
from leanq.queue.settings import Settings

# Megabytes of the installs, as measured, so that none is made that is too large.
LIBRARIES = {"openenv": 342, "verifiers": 386, "trl": 1168}
# TRL needs a torch, and one for CPUs is a sixth of the other; an index may have it under this name.
FIRST = {"trl": "torch==2.13.0+cpu"}
CASE_S = 300
# What a library fetches besides when it runs, by a tool that may reach no index; tried before.
_UV = "uv pip install --dry-run --reinstall --no-deps --no-config --no-cache iniconfig --python"
FETCHES = {"verifiers": _UV}
PROBE_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help="all unless given")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv" / "trainers")
    parser.add_argument("--most-mb", type=int, help="leave out installs beyond this size")
    parser.add_argument("--within", type=float, default=3600.0, help="seconds for all of it")
    given = parser.parse_args()
    ends_s = time.monotonic() + given.within
    failed = []
    with fleet() as url:
        for name in given.libraries or LIBRARIES:
            if given.most_mb and LIBRARIES[name] > given.most_mb:
                print(f"{name}: SKIPPED: it takes {LIBRARIES[name]} MB, of {given.most_mb} MB")
                continue
            folder = given.environments / name
            left_s = ends_s - time.monotonic() - CASE_S
            if why := install(name, folder, left_s):
                print(f"{name}: SKIPPED: it cannot be installed: {why}")
                continue
            if name in FETCHES and not reaches_an_index(name, folder):
                print(f"{name}: SKIPPED: uv, which fetches what it runs with, reaches no index")
                continue
            if ends_s - time.monotonic() < CASE_S:
                print(f"{name}: SKIPPED: its case may take {CASE_S} s, and that is not left")
                continue
            if not case(name, folder, url):
                failed.append(name)
    print(f"FAILED: {', '.join(failed)}" if failed else "passed, but what was skipped")
    return bool(failed)


@contextlib.contextmanager
def fleet() -> Iterator[str]:
    """A server, and a worker in a process of its own."""
    cache = Path(os.environ.get("LEANQ_CACHE") or ROOT / ".venv" / "trainers" / "cache")
    cache.mkdir(parents=True, exist_ok=True)
    with command_server(), EmbeddedServer() as server, new_terminal(cache) as terminal:
        settings = Settings(url=server.url, prefix=f"t{secrets.token_hex(6)}")
        terminal.use(settings)
        worker = terminal.start("worker", stdout=subprocess.DEVNULL)
        wait_for_line(worker.stderr, "serves")
        os.environ["LEANQ_PREFIX"] = settings.prefix
        yield server.url
        worker.terminate()
        ended(worker)


def install(name: str, folder: Path, within_s: float) -> str | None:
    """Makes the environment, unless it is there; why it cannot be made."""
    mark = folder / "installed"
    wanted = (ROOT / "pyproject.toml").read_text()
    if mark.is_file() and mark.read_text() == wanted:
        return None
    if within_s <= 0:
        return "no time is left for that"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    pip += ["--timeout", "20", "--retries", "1", "install", "--quiet", "--no-compile"]
    try:
        if name in FIRST:
            # Without it, the extra's own torch is taken.
            subprocess.run([*pip, FIRST[name]], capture_output=True, check=False, timeout=within_s)
        command = [*pip, "-e", f"{ROOT}[{name}]", "pytest>=8"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=within_s
        )
    except subprocess.TimeoutExpired:
        return f"pip takes longer than {within_s:.0f} s"
    if done.returncode:
        return " ".join(done.stderr.split())[-300:]
    print(f"{name}: {size_mb(folder)} MB installed", flush=True)
    mark.write_text(wanted)
    return None


def reaches_an_index(name: str, folder: Path) -> bool:
    """Whether the library's own tool gets packages here."""
    binaries = folder / "bin"
    tool, *words = FETCHES[name].split()
    command = [str(binaries / tool), *words, str(binaries / "python")]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def size_mb(folder: Path) -> int:
    """Megabytes of the environment's packages, without bytecode."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return round(sum(path.stat().st_size for path in files if path.suffix != ".pyc") / 1e6)


def case(name: str, folder: Path, url: str) -> bool:
    """Whether the library's case passes."""
    binaries = folder / "bin"
    environ = {
        **os.environ,
        "LEANQ_URL": url,
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'examples'}",
        # Nothing is fetched but packages.
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
    }
    with tempfile.TemporaryDirectory(prefix="leanq-") as scratch:
        began = time.monotonic()
        command = [str(binaries / "python"), "-m", f"adapters.case_{name}", scratch]
        try:
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, check=False, timeout=CASE_S
            )
        except subprocess.TimeoutExpired:
            print(f"{name}: FAILED: no end within {CASE_S} s")
            return False
    if done.returncode:
        print(f"{name}: FAILED\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return False
    told = json.loads(done.stdout.splitlines()[-1])
    ratio = told["per_s"] / told["direct_per_s"]
    print(
        f"{name} {told['version']}: passed in {time.monotonic() - began:.0f} s; "
        f"{told['per_s']:.1f} candidates/s, {ratio:.2f} of a plain client's "
        f"{told['direct_per_s']:.1f}; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return True


if __name__ == "__main__":
    sys.exit(main())
