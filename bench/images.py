"""Measures kernel images: those of a library, a start with them kept, and one changed module.

    python bench/images.py LEAN FOLDER

LEAN is the program of another Lean than the wheel's, FOLDER its compiled library or another folder
of modules (`copies.py` writes one of Mathlib's size). CPU time is that of this process and all its
children. A judge that imports a module of `--imports` is measured as well, with what it alone holds
in memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from processes import used

from leanq.lean.environment import Environment, open_environment
from leanq.lean.judge.judge_client import Judges
from leanq.lean.judge.judge_lean import judge_lean
from leanq.lean.judge.kernel_images import KernelImages
from leanq.lean.text import Header

_SETTLED_S = 2.5  # the hashes of younger files are not remembered


def main() -> None:
    """Measures once, in a cache folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lean")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--changed", default="Init/Prelude.olean", metavar="FILE")
    parser.add_argument("--imports", default="Init", metavar="MODULE")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="leanq-images-") as folder:
        library, cache = Path(folder, "library"), Path(folder, "cache")
        shutil.copytree(given.folder, library, copy_function=os.link)
        module = tuple(given.imports.split("."))

        def opened() -> tuple[Environment, KernelImages]:
            environment = open_environment(
                "bench", library, lean=given.lean, cache=cache, environ={}
            )
            return environment, KernelImages(environment, judge_lean(environment.toolchain))

        time.sleep(_SETTLED_S)
        environment, images = opened()
        with _measured("all modules"):
            found, faults = images.prepare_all()
        size = sum(path.stat().st_size for path in (cache / "kernel-images").rglob("store/*/*"))
        print(f"{found.modules} modules, {found.constants} constants, {len(faults)} faults")
        print(f"{size / 2**20:.0f} MiB of images")
        print(f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MiB at most")
        asyncio.run(_served(environment))
        environment, images = opened()
        with _measured("a start with images kept"):
            images.prepare([module])
        asyncio.run(_import(environment, given.imports))
        changed = library / given.changed
        data = bytearray(changed.read_bytes())
        data[48] ^= 1  # a digit of the commit
        changed.unlink()
        changed.write_bytes(data)
        with _measured(f"{given.changed} changed, until it is served"):
            environment, images = opened()
            images.prepare([module])
            asyncio.run(_served(environment))
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs")


async def _served(environment: Environment) -> None:
    """Has the judge test itself, as a worker does before it serves."""
    judges = Judges(environment, slots=1)
    try:
        if why := await judges.unavailable():
            raise SystemExit(why)
    finally:
        await judges.close()


async def _import(environment: Environment, module: str) -> None:
    """Prints what a judge's process takes that imports a module."""
    judges = Judges(environment, slots=1)
    try:
        began_s = time.monotonic()
        header = Header("", 0, (module,), is_module=False, is_prelude=True)
        if await judges.axioms(header, []) is None:
            raise SystemExit(f"the judge cannot import {module}")
        took_s = time.monotonic() - began_s
        cpu_s, private_mb = max(used("judge_process"))
        print(f"import {module}: {cpu_s:.2f} s of CPU, {took_s:.2f} s, {private_mb:.0f} MB private")
    finally:
        await judges.close()


@contextmanager
def _measured(what: str) -> Iterator[None]:
    began_s, spent_s = time.monotonic(), _cpu_s()
    yield
    print(f"{what}: {_cpu_s() - spent_s:.2f} s of CPU, {time.monotonic() - began_s:.2f} s")


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main()
