"""Sends the same texts to leanq and to a server with Kimina Lean Server's interface.

    python bench/versus.py http://lean.example:8000 texts/

leanq is what LEANQ_URL or ``leanq up`` names. The other server is asked at ``/api/check``, eight
texts at a time as its client does, with LEAN_SERVER_API_KEY if that is set. Both have the same
texts in the same order, one server after the other, round by round. Prints for each: texts a
second, the p50 and p95 of a call, and what became of the texts; then the texts of which one server
says that they are proved and the other does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from leanq import LeanQClient, LeanQError

_BATCH = 8
_CALL_S = 600.0

Seen = dict[str, str]
"""What became of each text: ``proved``, ``not proved``, or ``no answer``."""


class Kimina:
    """The other server, by HTTP."""

    def __init__(self, url: str, env: str | None) -> None:
        self._url, self._env = f"{url.rstrip('/')}/api/check", env
        self._key = os.environ.get("LEAN_SERVER_API_KEY", "")

    def check(self, texts: Sequence[tuple[str, str]], timeout_s: int) -> Seen:
        snippets = [{"id": name, "code": code} for name, code in texts]
        body: dict[str, Any] = {"snippets": snippets, "timeout": timeout_s}
        if self._env:
            body["environment"] = self._env
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        asked = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(asked, timeout=_CALL_S) as answer:
                results = json.load(answer)["results"]
        except (OSError, ValueError) as error:
            print(f"  {error}")
            return dict.fromkeys((name for name, _ in texts), "no answer")
        return {each["id"]: _kimina_says(each) for each in results}


def _kimina_says(result: dict[str, Any]) -> str:
    """Reads a result as Kimina's client does: an error message or a ``sorry`` is no proof."""
    if result.get("error"):
        return "no answer"
    response = result.get("response") or {}
    severities = {message["severity"] for message in response.get("messages") or ()}
    is_proved = "error" not in severities and not response.get("sorries")
    return "proved" if is_proved and "message" not in response else "not proved"


class LeanQ:
    """leanq, by its own client."""

    def __init__(self, lean: LeanQClient, env: str | None) -> None:
        self._lean, self._how = lean, {"env": env} if env else {}

    def check(self, texts: Sequence[tuple[str, str]], timeout_s: int) -> Seen:
        how: Any = {"timeout_s": timeout_s, **self._how}
        futures = [(name, self._lean.check(code, **how)) for name, code in texts]
        return {name: _leanq_says(future) for name, future in futures}


def _leanq_says(future: Any) -> str:
    try:
        verdict = future.result(_CALL_S).verdict
    except LeanQError as error:
        print(f"  {error}")
        return "no answer"
    if verdict == "accepted":
        return "proved"
    no = verdict in ("rejected", "incomplete", "exhausted", "unverified")
    return "not proved" if no else "no answer"


def run(
    server: Kimina | LeanQ, texts: Sequence[tuple[str, str]], timeout_s: int, calls: int
) -> tuple[Seen, float, list[float]]:
    """Returns what became of the texts, the seconds for all, and the seconds of each call."""
    took_s: list[float] = []

    def one(some: Sequence[tuple[str, str]]) -> Seen:
        began_s = time.monotonic()
        seen = server.check(some, timeout_s)
        took_s.append(time.monotonic() - began_s)
        return seen

    began_s = time.monotonic()
    with ThreadPoolExecutor(calls) as pool:
        starts = range(0, len(texts), _BATCH)
        parts = pool.map(one, [texts[start : start + _BATCH] for start in starts])
        seen = {name: end for part in parts for name, end in part.items()}
    return seen, time.monotonic() - began_s, took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="the server with Kimina's interface")
    parser.add_argument("folder", type=Path, help="with .lean files")
    parser.add_argument("--env", help="an environment's name, for leanq and for a leanq gateway")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for a text")
    parser.add_argument("--calls", type=int, default=5, help="calls at a time, of 8 texts each")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    texts = [(str(path), path.read_text()) for path in sorted(given.folder.rglob("*.lean"))]
    rates: dict[str, list[float]] = {"leanq": [], "the other": []}
    calls: dict[str, list[float]] = {name: [] for name in rates}
    seen: dict[str, Seen] = {}
    with LeanQClient() as lean:
        servers = {"leanq": LeanQ(lean, given.env), "the other": Kimina(given.url, given.env)}
        for _ in range(given.rounds):
            for name, server in servers.items():
                seen[name], all_s, took_s = run(server, texts, given.timeout, given.calls)
                rates[name].append(len(texts) / all_s)
                calls[name] += took_s
    for name in rates:
        p50, p95 = (statistics.quantiles(calls[name], n=20)[at] for at in (9, 18))
        print(
            f"{name}: {statistics.median(rates[name]):.1f} texts/s, a call's p50 {p50:.2f} s and "
            f"p95 {p95:.2f} s, {dict(Counter(seen[name].values()))}"
        )
    for text, _ in texts:
        ours, theirs = seen["leanq"].get(text), seen["the other"].get(text)
        if ours != theirs:
            print(f"  {text}: leanq {ours}, the other {theirs}")


if __name__ == "__main__":
    main()
