"""Such texts through the gateway, by every route that a text can take, with real Lean."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fleets import working
from support.gateway.gateways import Gateway, new_gateway
from support.gateway.kimina_reading import documented, reading
from support.lean.cheats import TABLE, open_libraries, target, text

from leanq.gateway.kimina_results import LIBRARIES
from leanq.lean.driver import LeanDriver
from leanq.lean.environment import Environment
from leanq.lean.run.fork_server import ForkRules
from leanq.queue.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def _selected() -> Sequence[str]:
    """One text of each kind of cheat, by the first word of its name, for each end that there is.
    test_cheats.py has all of them, by the drivers' replies."""
    kinds = {
        (name.partition("_")[0], row.get("check"), row.get("verify"), "allow" in row): name
        for name, row in TABLE.items()
        if "xfail" not in row
    }
    return [*kinds.values()]


SELECTED = _selected()
NAMES = [name for name in SELECTED if "check" in TABLE[name]]
TIMEOUT_S = 60
# On an overloaded machine, for all texts of an environment.
ALL_S = 300.0

Results = dict[str, dict[str, Any]]


@pytest.fixture(params=["lean", "server"])
def kind(request: pytest.FixtureRequest) -> str:
    """Of the driver."""
    return str(request.param)


@pytest.fixture
async def gateway(
    kind: str,
    settings: Settings,
    core: Environment,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Gateway]:
    """One whose only environment has the name of its driver's kind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "library"
    folder.mkdir()
    environment = replace(open_libraries(core, cache, folder), name=kind)
    forks = ForkRules() if kind == "lean" else None
    made = LeanDriver(lambda: environment, slots=2, forks=forks)
    async with (
        working(settings, made, slots=2),
        new_gateway(settings, environment=kind) as gateway,
    ):
        gateway.http.timeout = ALL_S
        yield gateway


def expected(name: str, operation: str, kind: str) -> str:
    """The words of the table. Forks show what Lean evaluates of a text."""
    row = TABLE[name]
    watched = row.get("watched") if kind == "lean" and operation == "check" else None
    return str(watched or row[operation])


def may_be_told_as_proved(name: str, kind: str) -> bool:
    """Whether a check without any allowed axiom accepts a text, by its table."""
    return expected(name, "check", kind) == "accepted" and "allow" not in TABLE[name]


def assert_nothing_is_proved_that_is_not(results: Results, kind: str) -> None:
    told = {name: reading(result) for name, result in results.items()}
    assert {name for name in told if told[name] == "valid"} == {
        name for name in NAMES if may_be_told_as_proved(name, kind)
    }
    says = documented()
    meant = {name: says[results[name]["leanq"]["verdict"]] for name in NAMES}
    # A server that lacks a library says so, and tells nothing about the text.
    lacking = {
        name
        for name in NAMES
        if results[name]["leanq"]["reason"] == "unknown_import"
        and LIBRARIES.intersection(re.findall(r"import (?:all )?(\w+)", text(name)))
    }
    assert told == {**meant, **dict.fromkeys(lacking, "server_error")}


async def kiminas_results(gateway: Gateway, **how: Any) -> Results:
    """What a client of 2.x is told of each text."""
    snippets = [{"id": name, "code": text(name)} for name in NAMES]
    body = {"snippets": snippets, "timeout": TIMEOUT_S, **how}
    answer = await gateway.http.post("/api/check", json=body)
    return {result["id"]: result for result in answer.json()["results"]}


async def older_results(gateway: Gateway, route: str, field: str) -> Results:
    """What a client of 1.x is told of each text, which it sends in a field of either name."""
    codes = [{"custom_id": name, field: text(name)} for name in NAMES]
    answer = await gateway.http.post(route, json={"codes": codes, "timeout": TIMEOUT_S})
    return {result["custom_id"]: result for result in answer.json()["results"]}


async def batch_results(gateway: Gateway, bodies: Sequence[dict[str, Any]]) -> Results:
    lines = "".join(f"{json.dumps(body)}\n" for body in bodies)
    answer = await gateway.http.post("/v1/batch", content=lines)
    return {line["id"]: line["result"] for line in map(json.loads, answer.text.splitlines())}


async def single_results(gateway: Gateway, bodies: Sequence[dict[str, Any]]) -> Results:
    async def one(body: dict[str, Any]) -> tuple[str, Any]:
        fields = {**body}
        operation, label = fields.pop("op"), fields.pop("id")
        return label, (await gateway.http.post(f"/v1/{operation}", json=fields)).json()

    return dict(await asyncio.gather(*map(one, bodies)))


def v1_bodies() -> list[dict[str, Any]]:
    """Each text as each operation that its table has it for."""
    bodies = []
    for operation in ("check", "verify"):
        for name in SELECTED:
            row = TABLE[name]
            if operation in row:
                body = {"op": operation, "id": f"{operation} {name}", "code": text(name)}
                if operation == "verify":
                    body |= {"target": target(name), "holes": row.get("holes", [])}
                # As much as a text with imports has by the other interface.
                how = {"timeout_s": 2 * TIMEOUT_S, "allow_axioms": row.get("allow", [])}
                bodies.append({**body, **how})
    return bodies


def words(result: Mapping[str, Any]) -> str:
    """A result's words as the table has them."""
    return " ".join(filter(None, (result.get("verdict", str(result)), result.get("reason"))))


async def test_no_route_tells_a_client_that_a_cheat_is_proved(gateway: Gateway, kind: str) -> None:
    bodies = v1_bodies()
    # At once, so that what is the same by several routes is elaborated once.
    *kiminas, by_batch, one_by_one = await asyncio.gather(
        kiminas_results(gateway),
        older_results(gateway, "/verify", "proof"),
        older_results(gateway, "/one_pass_verify_batch", "code"),
        batch_results(gateway, bodies),
        single_results(gateway, bodies),
    )
    for results in kiminas:
        assert_nothing_is_proved_that_is_not(results, kind)
    said = {
        body["id"]: expected(name, operation, kind)
        for body in bodies
        for operation, _, name in [body["id"].partition(" ")]
    }
    for results in (by_batch, one_by_one):
        assert {label: words(result) for label, result in results.items()} == said

    refused = await kiminas_results(gateway, infotree="full")
    assert {reading(result) for result in refused.values()} == {"server_error"}
