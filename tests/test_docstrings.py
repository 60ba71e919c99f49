"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import asyncio
import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import leanq
import leanq.trainers
from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.local import Pool
from leanq.producer.future_client import FutureClient
from leanq.queue.requests import reward
from leanq.queue.settings import Settings
from leanq.trainers.rewards import LeanReward
from leanq.trainers.search import ProofSearch

CLASSES = (AsyncLeanQClient, LeanQClient, LeanReward, Pool, ProofSearch, reward)
PUBLIC = {
    **{each.__name__: each for each in CLASSES},
    **{
        f"{home.__name__}.{name}": method
        for home in (LeanQClient, FutureClient)
        for name, method in vars(home).items()
        if inspect.isfunction(method) and not name.startswith("_")
    },
}
# They have nothing to show: an end, a test's bytes, and the half of another example.
WITHOUT = {"FutureClient.close", "FutureClient.echo", "FutureClient.export"}


def examples(name: str) -> Iterator[doctest.DocTest]:
    found = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name)
    return (test for test in found if test.examples)


def test_what_is_public_has_an_example() -> None:
    assert {name for name in PUBLIC if not any(examples(name))} == WITHOUT


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PUBLIC) - WITHOUT))
def test_an_example_prints_what_it_says(
    name: str, fleet: Settings, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEANQ_CACHE", str(cache))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("LEANQ_URL", fleet.url)
    monkeypatch.setenv("LEANQ_PREFIX", fleet.prefix)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    with LeanQClient() as lean:
        for test in examples(name):
            rooms = (leanq, leanq.trainers)
            given = {each: getattr(room, each) for room in rooms for each in room.__all__}
            test.globs = {**given, "asyncio": asyncio, "lean": lean}
            assert runner.run(test).failed == 0
