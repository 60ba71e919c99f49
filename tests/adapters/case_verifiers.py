"""verifiers: episodes of one turn and of three, by a model that answers from a table."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verifiers
import verifiers.v1 as vf

from adapters.cheats import CHEATS, HEAD, HONEST, PROOF, STATEMENT, directly
from adapters.scripted_model import scripted_model

COUNT = 16


async def episodes(problems: Path, url: str, turns: int, **task: Any) -> dict[str, Any]:
    """Each problem's one trace."""
    taskset = {"id": "verifiers-proofs", "data": str(problems), "task": task}
    env = vf.load_environment(vf.resolve_env_config({"taskset": taskset, "turns": turns}))
    model = vf.ModelContext("scripted", vf.EvalClientConfig(base_url=url))
    limit = asyncio.Semaphore(8)
    async with env.serving():
        slots = [slot for each in env.taskset for slot in env.slots(each)]
        found = await asyncio.gather(*(env.run_slot(slot, model, limit) for slot in slots))
    return {episode.task.data.id: episode.traces[0] for episode in found}


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """The fleet claims nothing."""
    _tell("pause")
    try:
        yield
    finally:
        _tell("resume")


def _tell(command: str) -> None:
    argv = [sys.executable, "-m", "leanq", command, "--env", "default"]
    subprocess.run(argv, check=True, timeout=60, stdout=subprocess.DEVNULL)


def problems_of(path: Path, names: list[str]) -> Path:
    rows = [{"id": n, "statement": f"{STATEMENT} -- problem_{n}."} for n in names]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def main(folder: Path) -> None:
    file = folder / "problems.jsonl"
    # What cannot stand in JSON of an answer is no answer of a model.
    cheats = {name: text for name, text in CHEATS.items() if text.isprintable() or "\n" in text}
    cheats.pop("half_a_surrogate_pair", None)
    texts = {**HONEST, **{f"cheat_{name}": text for name, text in cheats.items()}}
    answers = {f"problem_{name}.": [text or " "] for name, text in texts.items()}
    with scripted_model(answers) as url:
        found = asyncio.run(episodes(problems_of(file, list(texts)), url, 1))
    assert all(trace.ok for trace in found.values()), [trace.errors for trace in found.values()]
    rewards = {name: trace.reward for name, trace in found.items()}
    assert rewards == {name: float(name in HONEST) for name in texts}, rewards

    wrong = f"```lean\n{HEAD}And.intro h.left h.right\n```"
    turns = {"second": [wrong, HEAD + PROOF], "never": [wrong], "sorry": [STATEMENT, HEAD + PROOF]}
    with scripted_model({f"problem_{name}.": each for name, each in turns.items()}) as url:
        found = asyncio.run(episodes(problems_of(file, list(turns)), url, 3))
    outcome = {name: (trace.num_turns, trace.reward) for name, trace in found.items()}
    assert outcome == {"second": (2, 1.0), "never": (3, 0.0), "sorry": (2, 1.0)}, outcome
    said = "\n".join(str(message.content) for message in found["never"].messages)
    assert "Lean says: rejected" in said, said
    said = "\n".join(str(message.content) for message in found["sorry"].messages)
    assert "⊢ q ∧ p" in said, said

    # A fleet that does not answer is an episode's error, and no reward.
    with paused(), scripted_model({"problem_": [HEAD + PROOF]}) as url:
        found = asyncio.run(episodes(problems_of(file, ["a"]), url, 1, stall_s=1.0))
    assert not found["a"].ok
    assert "StalledError" in found["a"].errors[-1].message, found["a"].errors
    assert found["a"].rewards["proved"] is None, found["a"].rewards

    direct = directly(96)
    names = [f"n{number}" for number in range(COUNT)]
    with scripted_model({f"problem_{n}.": [f"{HEAD}{PROOF} -- {n}"] for n in names}) as url:
        began = time.monotonic()
        found = asyncio.run(episodes(problems_of(file, names), url, 1))
        rate = COUNT / (time.monotonic() - began)
    assert all(trace.reward == 1.0 for trace in found.values())
    print(json.dumps({"version": verifiers.__version__, "per_s": rate, "direct_per_s": direct}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
