"""Counts the false proofs that Lean takes by itself, and those that leanq accepts.

The texts are those of tests/cheats that prove another statement than their target's, or nothing;
they run on the wheel's Lean. What a server says that goes by Lean's messages alone is ``lean``.
Prints a line of JSON, and before it the names of what leanq accepted, which should be none.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment, open_environment
from leanq.lean.run.plain import plain_lean
from leanq.lean.sandbox.sandbox import Limits
from leanq.states import MemoryStates

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.lean.cheats import TABLE, open_libraries, request

_LIMITS = Limits(cpu_s=60, wall_s=120, memory_bytes=2 << 30)


def false_texts() -> list[str]:
    """Returns the names of texts that ``verify`` must not accept."""
    return [name for name, row in TABLE.items() if row.get("verify", "accepted") != "accepted"]


async def count(environment: Environment, names: list[str]) -> dict[str, int]:
    """Returns how many texts plain Lean takes without an error or a ``sorry``, and how many
    ``verify`` accepts."""
    taken, accepted = 0, []
    driver = LeanDriver(lambda: environment, slots=1)
    try:
        await driver.open(MemoryStates())
        async with plain_lean(environment, 1) as plain:
            for name in names:
                asked = request("verify", name)
                said = await plain.read(asked.code, _LIMITS)
                taken += bool(said and said.verdict == "accepted")
                if (await driver.run(asked)).verdict == "accepted":
                    accepted.append(name)
    finally:
        await driver.close()
    for name in accepted:
        print(f"accepted: {name}")
    return {"texts": len(names), "lean": taken, "leanq": len(accepted)}


def main() -> None:
    names = false_texts()
    with tempfile.TemporaryDirectory(prefix="leanq-bench-") as folder:
        cache, libraries = Path(folder, "cache"), Path(folder, "libraries")
        libraries.mkdir()
        core = open_environment("core", None, cache=cache)
        counts = asyncio.run(count(open_libraries(core, cache, libraries), names))
    print(json.dumps(counts))
    sys.exit(counts["leanq"] > 0)


if __name__ == "__main__":
    main()
