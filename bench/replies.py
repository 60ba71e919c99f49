"""Compares the messages of replies with what plain Lean prints, on texts of the user's; see
README.md.

Each ``.lean`` file of a folder is checked in a fork, by a Lean of its own, and with Lean's language
server in place of forks. The library is that of the tests (``LEANQ_TEST_LIBRARY``, or one built in
the cache folder). Texts of the module system have the library's files of that. Prints a line for
each text of which leanq says something else, and for each way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leanq.lean import driver as lean_driver
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment
from leanq.lean.run.documents import DocumentRules
from leanq.lean.run.plain import PlainLean, difference, plain_lean
from leanq.lean.sandbox.sandbox import Limits
from leanq.lean.text import split_header
from leanq.queue.requests import Request
from leanq.states import MemoryStates

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.lean.eager_forks import EagerForkServer
from support.lean.libraries import LAYOUTS, NoLibraryError, layouts, library

_PLAIN_S = 300.0
_PLAIN_MB = 6000
_NEVER = DocumentRules(served_from=1 << 30)
_WAYS: Mapping[str, Mapping[str, Any]] = {
    "forks": {"documents": _NEVER},
    "lean": {"documents": _NEVER, "forks": None},
    "server": {"documents": DocumentRules(served_from=1, compare_every=0), "forks": None},
}


async def compare(environment: Environment, texts: Mapping[str, str], slots: int) -> bool:
    """Prints the comparison of texts. Returns whether all messages are plain Lean's."""
    drivers = {
        way: LeanDriver(lambda: environment, slots=slots, **options)
        for way, options in _WAYS.items()
    }
    counts = {way: Counter[str]() for way in _WAYS}
    may_run = asyncio.Semaphore(slots)
    limits = Limits(_PLAIN_S, 2 * _PLAIN_S, _PLAIN_MB << 20)

    async def one(plain: PlainLean, name: str, text: str) -> None:
        async with may_run:
            expected = await plain.read(text, limits)
            if expected is None:
                print(f"  {name}: Lean itself takes too long, or dies", flush=True)
                return
            for way, driver in drivers.items():
                request = Request(op="check", code=text, timeout_s=_PLAIN_S, memory_mb=_PLAIN_MB)
                reply = await driver.run(request)
                began = "forked" if reply.spent and reply.spent.is_forked else "started"
                found = difference(expected.messages, reply)
                counts[way].update((began, str(reply.verdict), "differs" if found else "same"))
                if found:
                    print(f"  {name}, {way}, {reply.verdict}: {found}", flush=True)

    try:
        for driver in drivers.values():
            await driver.open(MemoryStates())
        async with plain_lean(environment, slots) as plain:
            await asyncio.gather(*(one(plain, *each) for each in texts.items()))
    finally:
        for driver in drivers.values():
            await driver.close()
    for way, found in counts.items():
        print(f"{way}: {found['differs']} of {len(texts)} texts differ; {dict(found)}", flush=True)
    return not any(found["differs"] for found in counts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with .lean files, behind Init, Std or Lean")
    parser.add_argument("--slots", type=int, default=os.cpu_count())
    given = parser.parse_args()
    texts = {path.name: path.read_text() for path in sorted(given.folder.rglob("*.lean"))}
    # A fork's header goes when others need its memory.
    headers = {name: split_header(text) for name, text in texts.items()}
    names = sorted(texts, key=lambda name: headers[name].text)
    lean_driver.ForkServer = EagerForkServer  # type: ignore[misc]
    same = True
    for layout in layouts():
        try:
            toolchain = library(layout)
        except NoLibraryError as error:
            raise SystemExit(f"no library to compare with: {error}") from None
        is_module = layout == LAYOUTS[1]
        some = {name: texts[name] for name in names if headers[name].is_module == is_module}
        print(f"{layout}, Lean {toolchain.lean}: {len(some)} texts")
        with tempfile.TemporaryDirectory(prefix="leanq-bench-") as cache:
            environment = toolchain.open(Path(cache))
            same = asyncio.run(compare(environment, some, given.slots)) and same
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
