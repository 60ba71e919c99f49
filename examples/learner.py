"""Rollout workers, a fleet and a learner that know each other by a replay memory alone.

``python examples/learner.py`` starts a fleet on this machine (`leanq up`), unless ``LEANQ_URL``
names a queue or `leanq up` runs. Each rollout worker samples tactics from the policy that the
learner published last, has them verified, and writes what became of them into the memory. The
learner reads them in order, and draws samples beside, in which successes weigh more. In earnest
each of the three is a program of its own, in any number; the policy is a model, whose checkpoint
has the offset in it.
"""

import asyncio
import contextlib
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping

from leanq import AsyncLeanQClient, LeanQClient, UsageError
from leanq.trainers import ReplayBounds, ReplayEntry, ReplayMemory

STATEMENTS = {
    "swap": "theorem and_swap (p q : Prop) (h : And p q) : And q p := ",
    "left": "theorem and_left (p q : Prop) (h : And p q) : p := ",
    "self": "theorem self (p : Prop) (h : p) : p := ",
}
PROOFS = ["h", "h.left", "h.right", "And.intro h.right h.left", "And.intro h.left h.right"]
MEMORY, BOUNDS = "learner-example", ReplayBounds(entries=10_000, max_mb=16, weighted=True)
ROLLOUTS, ATTEMPTS = 2, 80


async def rollout(seed: int) -> None:
    """A rollout worker: proves by the latest policy, and remembers."""
    rng = random.Random(seed)
    async with AsyncLeanQClient() as lean, ReplayMemory(MEMORY, bounds=BOUNDS) as memory:
        policy: Mapping[str, list[float]] = {}
        version = 0

        async def follow() -> None:
            nonlocal policy, version
            async for value in memory.watch():
                policy, version = value.fields, value.version

        async def attempt() -> None:
            problem = rng.choice([*STATEMENTS])
            (proof,) = rng.choices(PROOFS, policy.get(problem))
            tags = {"problem": problem, "policy": str(version)}
            statement = STATEMENTS[problem]
            reply = await lean.verify(f"{statement}sorry", statement + proof)
            earned = 1.0 if reply.verdict == "accepted" else 0.0
            # Successes are rare at first, so samples have more of them.
            weight = 1.0 + 4.0 * earned
            memory.add(
                ReplayEntry.of(reply, proof, rewards={"proof": earned}, tags=tags, weight=weight)
            )

        following = asyncio.create_task(follow())
        for _ in range(0, ATTEMPTS, 8):
            await asyncio.gather(*(attempt() for _ in range(8)))
        following.cancel()


async def learn() -> None:
    """A learner: reads all entries once, in order, and publishes a better policy."""
    async with ReplayMemory(MEMORY, bounds=BOUNDS) as memory:
        # Kept with the checkpoint, in earnest: a learner that is killed goes on from there.
        offset, seen, won = 0, Counter[str](), Counter[str]()
        scores = {problem: [1.0] * len(PROOFS) for problem in STATEMENTS}
        while seen.total() < ROLLOUTS * ATTEMPTS:
            batch = await memory.read(offset, limit=48, wait_s=60)
            if not len(batch):
                raise SystemExit("nobody has written for a minute; do workers run? (leanq status)")
            offset = batch.offset
            for entry in batch:
                problem = entry.tags["problem"]
                seen[problem] += 1
                won[problem] += entry.verdict == "accepted"
            # Old entries again, the successes among them more often.
            for entry in await memory.sample(32, weighted=True):
                score = scores[entry.tags["problem"]]
                place = PROOFS.index(entry.text)
                score[place] = max(0.02, score[place] * (1.3 if entry.rewards["proof"] else 0.9))
                score[:] = [each / max(score) for each in score]
            await memory.publish(scores)
        for problem, score in scores.items():
            best = PROOFS[score.index(max(score))]
            print(f"{problem}: {won[problem]} of {seen[problem]} proved, mostly by {best}")
        await memory.drop()


@contextlib.asynccontextmanager
async def fleet() -> AsyncIterator[None]:
    """A queue with a worker on this machine, where there is none yet."""
    if is_up():
        yield
        return
    command = (sys.executable, "-m", "leanq", "up")
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
    try:
        async with asyncio.timeout(60):
            while not is_up():
                if process.returncode is not None:
                    raise SystemExit("leanq up has ended; run it by itself to see why")
                await asyncio.sleep(0.1)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def is_up() -> bool:
    try:
        LeanQClient().close()
    except UsageError:
        return False
    return True


async def main() -> None:
    async with fleet():
        async with ReplayMemory(MEMORY) as memory:
            # Of an earlier run that was stopped.
            await memory.drop()
        await asyncio.gather(learn(), *map(rollout, range(ROLLOUTS)))


if __name__ == "__main__":
    asyncio.run(main())
