"""Measures what texts of one-line examples cost, beside plain Lean on the same texts."""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess

from leanq import Pool

_COUNTS = (10, 40, 120)


def text(count: int, number: int) -> str:
    """Returns a text of so many examples behind `import Lean`, unlike those of other numbers."""
    lines = [f"example (a b : Nat) : a + b + {n} = b + a + {n} := by omega" for n in range(count)]
    return "\n".join(["import Lean", f"-- {number}", *lines, ""])


def plain_cpu_s(lean: str, code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([lean, "--stdin"], input=code.encode(), check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints a line for each number of examples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True, metavar="LEAN", help="A lean with a library.")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with Pool(lean=options.library, slots=1) as pool:
        pool.check(text(1, -1)).result()
        for count in _COUNTS:
            ratios: list[float] = []
            for number in range(options.rounds):
                code = text(count, number)
                plain_s = plain_cpu_s(options.library, code)
                reply = pool.check(code).result()
                assert reply.verdict == "accepted", reply
                ratios.append(reply.cpu_s / plain_s)
            print(f"{count} examples: CPU time / plain Lean's {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
