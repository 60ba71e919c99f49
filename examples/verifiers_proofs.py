"""A `verifiers` environment over a fleet (`pip install 'leanq[verifiers]'`), and its evaluation.

This module is the environment: with its folder on PYTHONPATH, ``vf-eval verifiers-proofs`` and
prime-rl find it by its name. As a program it evaluates a model behind an OpenAI-compatible URL:

    python examples/verifiers_proofs.py problems.jsonl http://127.0.0.1:8000/v1 MODEL --turns 3

The fleet is that of LEANQ_URL or `leanq up`.
"""

import argparse
import asyncio
import sys

try:
    import verifiers.v1 as vf

    from leanq.trainers.verifiers_taskset import LeanEnv, LeanTaskset
except ImportError as error:
    sys.exit(f"{error}: pip install 'leanq[verifiers]'")

__all__ = ["LeanEnv", "LeanTaskset"]


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("problems", "base_url", "model"):
        parser.add_argument(name)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--samples", type=int, default=1)
    given = parser.parse_args()

    taskset = {"id": "verifiers-proofs", "data": given.problems}
    config = vf.resolve_env_config({"taskset": taskset, "turns": given.turns})
    env = vf.load_environment(config)
    model = vf.ModelContext(given.model, vf.EvalClientConfig(base_url=given.base_url))
    async with env.serving():
        slots = [slot for task in env.taskset for slot in env.slots(task, given.samples)]
        episodes = await asyncio.gather(*(env.run_slot(slot, model) for slot in slots))
    for episode in episodes:
        [trace] = episode.traces
        # An episode without a verdict of Lean's has errors, and no reward.
        reward = trace.reward if trace.ok else trace.errors[-1].message
        print(episode.task.data.id, trace.num_turns, reward)


if __name__ == "__main__":
    asyncio.run(main())
