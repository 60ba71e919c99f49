"""OpenEnv: its own client against the example's server, many sessions at once."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from openenv.core import GenericEnvClient
from support.trainers.provers import Flatterer

from adapters.cheats import STATEMENT, directly
from leanq.trainers.openenv_server import LeanEnvironment, TacticAction

COUNT, AT_ONCE = 64, 16
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "openenv_server.py"
CHEATS = {
    "sorry": "sorry",
    "admit": "admit",
    "exact_sorry": "exact sorry",
    "comment": "exact And.intro h.right /- h.left",
    "exit": "skip\n#exit",
    "next_command": "sorry\naxiom cheat (p : Prop) : p",
    "axiom": "exact cheat _",
    "nothing": "",
    "only_a_comment": "-- swap the halves",
    "nul": "\0",
    "itself": "exact and_swap p q h",
    "closes_early": "exact h",
}


async def proves(url: str, tactics: list[str], **reset: Any) -> list[tuple[float | None, bool]]:
    async with GenericEnvClient(base_url=url) as env:
        await env.reset(**reset)
        found = [await env.step({"tactic": tactic}) for tactic in tactics]
    return [(each.reward, each.done) for each in found]


async def nothing_pays_but_a_verification() -> None:
    lean = Flatterer()
    env = LeanEnvironment(lean)
    await env.reset_async(statement=STATEMENT)
    seen = await env.step_async(TacticAction(tactic="exact And.intro h.right h.left"))
    assert (seen.reward, seen.done) == (0.0, False)
    assert lean.asked[:3] == ["check", "step", "verify"]


async def scenario(url: str) -> float:
    way = ["constructor", "exact h.right", "exact h.left"]
    assert await proves(url, way, index=0) == [(0.0, False), (0.0, False), (1.0, True)]
    for name, tactic in CHEATS.items():
        [(reward, done)] = await proves(url, [tactic], index=0)
        assert not reward, name
        assert not done, name
    async with GenericEnvClient(base_url=url) as env:
        seen = await env.reset(statement=STATEMENT.replace("and_swap", "own"))
        assert seen.observation["goals"] == ["p q : Prop\nh : p ∧ q\n⊢ q ∧ p"]
        await env.step({"tactic": "constructor"})
        # Back to the first state, by its number.
        seen = await env.step({"tactic": "exact And.intro h.right h.left", "node": 0})
        assert (seen.reward, seen.done) == (1.0, True)
        state = await env.state()
        assert "own" in state["proof"], state
        assert state["step_count"] == 2, state
        for wrong in ({"tactic": "skip"}, {"tactic": "skip", "node": 9}):
            with pytest.raises(RuntimeError, match="reset first"):
                await env.step(wrong)
    for statement in ("theorem t : Nonsense := sorry", "def a := 1"):
        with pytest.raises(RuntimeError, match="statement that Lean takes"):
            await proves(url, [], statement=statement)

    limit = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        async with limit:
            text = STATEMENT.replace("and_swap", f"t{number}")
            tactics = ["exact And.intro h.right h.left"]
            assert await proves(url, tactics, statement=text) == [(1.0, True)]

    began = time.monotonic()
    await asyncio.gather(*map(one, range(COUNT)))
    return COUNT / (time.monotonic() - began)


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(EXAMPLE), str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server does not listen"
                time.sleep(0.1)
        asyncio.run(nothing_pays_but_a_verification())
        direct = directly(96)
        rate = asyncio.run(scenario(f"http://127.0.0.1:{port}"))
    finally:
        server.terminate()
        server.wait(20)
    told = {"version": version("openenv"), "per_s": rate, "direct_per_s": direct}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
