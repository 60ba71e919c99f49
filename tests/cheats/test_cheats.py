"""Texts that want to be accepted without a proof, and honest ones beside them that have to be."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import textwrap
import tomllib
from collections.abc import Awaitable, Callable, Iterable
from functools import cache as remembered
from pathlib import Path
from typing import Any

import pytest
from support.gateway.kimina_reading import reading
from support.lean.cheats import CHEATS, TABLE, open_libraries, request
from support.lean.real_texts import TEXTS
from support.lean.sites import new_site
from support.paths import ROOT

from leanq.gateway.kimina_results import result_of
from leanq.lean.environment import Environment, open_environment
from leanq.lean.run.programs import runs_programs
from leanq.queue.requests import Reply, Request

FULL: dict[str, dict[str, Any]] = tomllib.loads((CHEATS / "full_library.toml").read_text())
KINDS = ("lean", "server")

Replies = Callable[[str, str], dict[str, Reply]]


def rows(operation: str) -> list[Any]:
    """The names of the texts that the table has this operation for, with each kind of driver."""
    found = []
    for name, row in TABLE.items():
        if operation in row:
            why = row.get("xfail", {}).get(operation)
            marks = [pytest.mark.xfail(strict=True, reason=why)] if why else []
            found += [pytest.param(kind, name, marks=marks, id=f"{kind}-{name}") for kind in KINDS]
    return found


def said(reply: Reply) -> str:
    """The reply's words as the table has them."""
    assert reply.error is None, reply.error
    return " ".join(filter(None, (reply.verdict, reply.reason)))


async def a_few_at_a_time(work: Iterable[Awaitable[Reply]]) -> list[Reply]:
    """The replies, with as many processes at once as a small worker has."""
    slots = asyncio.Semaphore(4)

    async def one(each: Awaitable[Reply]) -> Reply:
        async with slots:
            return await each

    return await asyncio.gather(*map(one, work))


@pytest.fixture(scope="session")
def replies(core: Environment, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Replies:
    """What is said of all texts of an operation by a driver of a kind; asked once."""
    environment = open_libraries(core, cache, tmp_path_factory.mktemp("library"))

    async def ask(kind: str, operation: str) -> dict[str, Reply]:
        names = [name for name, row in TABLE.items() if operation in row]
        async with new_site(environment, Path(tempfile.gettempdir())) as site:
            site.kind = kind
            driver = await site.one(slots=2)
            asked = (driver.run(request(operation, name)) for name in names)
            return dict(zip(names, await a_few_at_a_time(asked), strict=True))

    @remembered
    def told(kind: str, operation: str) -> dict[str, Reply]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("scratch")))
            return asyncio.run(ask(kind, operation))

    return told


def test_every_text_is_in_its_table() -> None:
    assert {path.stem for path in CHEATS.glob("*.lean")} == set(TABLE)
    assert {path.stem for path in (CHEATS / "full_library").glob("*.lean")} == set(FULL)


def test_each_honest_text_that_is_refused_is_in_the_guarantees() -> None:
    refused = {name: text.said for name, text in TEXTS.items() if text.why}
    for name, row in {**TABLE, **FULL}.items():
        ends = {row[operation] for operation in ("check", "verify") if operation in row}
        if name.startswith("honest_") and ends != {"accepted"}:
            refused[name] = ", ".join(sorted(ends))
    page = (ROOT / "docs" / "guarantees.md").read_text()
    assert dict(re.findall(r"^\| `(\w+)` \| `(\w+ \w+)` \|", page, re.MULTILINE)) == refused


def full_text(name: str) -> str:
    return (CHEATS / "full_library" / f"{name}.lean").read_text()


@pytest.mark.parametrize(
    "name",
    [name for name in FULL if FULL[name]["check"].split(" ")[0] in ("accepted", "unverified")],
)
def test_which_texts_for_full_libraries_run_programs(name: str) -> None:
    assert (runs_programs(full_text(name)) is None) == (FULL[name]["check"] == "accepted")


@pytest.fixture(scope="session")
def full_library() -> Environment:
    """What the operator names, who has a full library."""
    folder = os.environ.get("LEANQ_CHEATS_ENV")
    if not folder:
        pytest.skip("LEANQ_CHEATS_ENV names no environment with a full library")
    return open_environment("full", Path(folder))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("kind", KINDS)
async def test_full_library(
    full_library: Environment, tmp_path: Path, kind: str, name: str
) -> None:
    row = FULL[name]
    if full_library.find_olean(row["needs"]) is None:
        pytest.skip(f"the environment has no {row['needs']}")
    async with new_site(full_library, tmp_path) as site:
        site.kind = kind
        driver = await site.one()
        reply = await driver.run(Request(op="check", code=full_text(name)))
        assert said(reply) == row["check"], reply.messages
        if "verify" in row:
            code, target = full_text(name), row["target"]
            reply = await driver.run(Request(op="verify", code=code, target=target))
            assert said(reply) == row["verify"], (reply.messages, reply.failed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "name"), rows("check"))
def test_check(replies: Replies, kind: str, name: str) -> None:
    reply = replies(kind, "check")[name]
    row = TABLE[name]
    ends = row.get("watched", row["check"]) if kind == "lean" else row["check"]
    assert said(reply) == ends, reply.messages
    # Nor is a client fooled that came from Kimina Lean Server, and reads severities alone.
    assert (reading(result_of(reply, 60)) == "valid") == (reply.verdict == "accepted")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "name"), rows("verify"))
def test_verify(replies: Replies, kind: str, name: str) -> None:
    reply = replies(kind, "verify")[name]
    assert said(reply) == TABLE[name]["verify"], (reply.messages, reply.failed)


STEPS: dict[str, dict[str, Any]] = tomllib.loads((CHEATS / "steps.toml").read_text())


LINES = ("skip",)
# Steps before the last one, so that a cheat is split over two or three, or stands in a hole of
# another tactic.
SPLITS: dict[str, tuple[str, ...]] = {
    "step": (),
    "two": ("have before : True := True.intro",),
    "three": ("refine (fun (_ : True) => ?_) True.intro", "have before : True := True.intro"),
    "inside": ("exact sorry",),
    "lines": LINES,
}
_FIRST = re.compile(r"first\n\| (.*?)\n\|.*", re.DOTALL)


def in_steps(tactic: str) -> list[str]:
    """Returns the tactics of a cheat, each for a step of its own: those of its first attempt, where
    it has several. It stays whole where a part of it leaves the hole."""
    first = _FIRST.fullmatch(tactic.strip())
    lines = textwrap.dedent(f"  {first[1]}" if first else tactic).strip().split("\n")
    if "})" in tactic or any(line[:1].strip() in ("", *"|()") for line in lines):
        return [tactic]
    return lines


@pytest.fixture(scope="session")
def step_replies(core: Environment, tmp_path_factory: pytest.TempPathFactory) -> Replies:
    """What is said of all tactics by a driver of a kind; asked once."""

    async def ask(kind: str, before: tuple[str, ...]) -> dict[str, Reply]:
        async with new_site(core, Path(tempfile.gettempdir())) as site:
            site.kind = kind
            driver = await site.one(slots=2)

            async def step(row: dict[str, Any], *before: str) -> Reply:
                checked = await driver.run(
                    Request(op="check", code=f"prelude\nimport Core\n{row['source']}")
                )
                states = [sorry.state for sorry in checked.sorries if sorry.state]
                state = states[row.get("hole", 0)]
                tactics = in_steps(row["tactic"]) if before == LINES else [row["tactic"]]
                for tactic in (*before, *row.get("before", ()), *tactics):
                    reply = await driver.run(Request(op="step", state=state, tactic=tactic))
                    state = reply.state
                    if state is None:
                        break
                return reply

            if not before:
                said = await a_few_at_a_time(map(step, STEPS.values()))
                return dict(zip(STEPS, said, strict=True))
            rows = {name: row for name, row in STEPS.items() if not name.startswith("honest_")}
            said = await a_few_at_a_time(step(row, *before) for row in rows.values())
            return dict(zip(rows, said, strict=True))

    @remembered
    def told(kind: str, operation: str) -> dict[str, Reply]:
        before = SPLITS[operation]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("scratch")))
            return asyncio.run(ask(kind, before))

    return told


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in STEPS if not name.startswith("honest")])
@pytest.mark.parametrize("split", [name for name, before in SPLITS.items() if before])
def test_step_that_is_split(step_replies: Replies, split: str, name: str) -> None:
    """What cheats in one step does not cheat behind others."""
    reply = step_replies("lean", split)[name]
    assert reply.verdict != "accepted", reply.axioms


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_step(step_replies: Replies, kind: str, name: str) -> None:
    reply = step_replies(kind, "step")[name]
    assert reply.verdict == STEPS[name]["verdict"], reply.messages
