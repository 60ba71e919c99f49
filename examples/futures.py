"""For users of concurrent.futures: `leanq up` in one terminal, this in another.

What `check` returns is a `concurrent.futures.Future`, so `as_completed`, `wait` and `cancel` are
used as with any executor; only that `cancel` also stops requests that run already.
"""

import sys
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait

from leanq import LeanQClient, Reply, UsageError

THEOREM = "prelude\nimport Core\ntheorem and_swap (p q : Prop) (h : And p q) : And q p := "
PROOFS = ["And.intro h.left h.right", "sorry", "And.intro h.right h.left", "⟨h.2, h.1⟩"]


def verdicts(lean: LeanQClient, proofs: Iterable[str]) -> dict[str, str | None]:
    """The verdict on each proof, with ``as_completed``."""
    futures: dict[Future[Reply], str] = {lean.check(THEOREM + proof): proof for proof in proofs}
    return {futures[done]: done.result().verdict for done in as_completed(futures)}


def first_proof(lean: LeanQClient, proofs: Iterable[str]) -> str | None:
    """The first that Lean accepts, with ``wait``; the others are cancelled."""
    futures: dict[Future[Reply], str] = {lean.check(THEOREM + proof): proof for proof in proofs}
    waiting = set(futures)
    try:
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                if future.result().verdict == "accepted":
                    return futures[future]
        return None
    finally:
        for future in waiting:
            future.cancel()


if __name__ == "__main__":
    try:
        client = LeanQClient()
    except UsageError as error:
        sys.exit(str(error))
    with client:
        for proof, verdict in verdicts(client, PROOFS).items():
            print(f"{verdict:12} {proof}")
        print("the first:  ", first_proof(client, PROOFS))
