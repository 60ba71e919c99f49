"""A bench for the forks of the judge that says how many files its process has had.

``python -m support.lean.judge_bench`` reads orders as a list of JSON, and prints their answers as
one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from leanq.lean.judge.judge_forks import Files, Forks


class CountingBench:
    """Answers by an order's ``kind``."""

    def __init__(self) -> None:
        self._number = 0
        self._kind = ""
        self._prints_s = 0.0

    def answer(self, order: dict[str, Any], files: Files) -> dict[str, Any]:
        """Returns the file's number in its process, and the file."""
        self._number += 1
        self._kind = order["kind"]
        if self._kind == "dies":
            os._exit(3)
        self._prints_s = order.get("prints_s", 0.0)
        spin(order.get("spins_s", 0.0))
        [[file]] = files
        if self._kind == "refuses":
            return {"rule": "kernel_refused", "number": self._number, "file": file.decode()}
        return {
            "proved": self._kind != "disagrees",
            "number": self._number,
            "file": file.decode(),
        }

    def statements(self) -> Iterator[str]:
        """Yields two statements, unless the file was refused."""
        for each in ("a", "b") if self._kind != "refuses" else ():
            spin(self._prints_s)
            yield each
            if self._kind == "dies as it prints":
                os._exit(4)

    def start_anew(self) -> bool:
        """Returns False where a real bench has threads."""
        return self._kind != "has threads"


def spin(cpu_s: float) -> None:
    """Uses so much CPU time."""
    end_s = time.process_time() + cpu_s
    while time.process_time() < end_s:
        pass


def main() -> None:
    """Answers all orders in turn."""
    forks = Forks(CountingBench(), ())
    found = []
    for order in json.load(sys.stdin):
        file = order.pop("file").encode()
        limits = {"cpu_s": 60, "memory_bytes": 1 << 30, "sizes": [[len(file)]]}
        found.append(json.loads(forks.answer({**order, **limits}, [[file]])))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
