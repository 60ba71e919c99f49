"""``leanq campaign run`` through a gateway: a client like any other, which resumes when killed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from support.gateway.gateways import Scripted, key_file, new_gateway
from support.terminals import Terminal, ended
from support.waiting import eventually

from leanq.campaigns.results import read_results
from leanq.gateway.keys import KeyFile
from leanq.queue.settings import Settings

CODES = [
    *(f"-- {verdict} {number}" for number in range(10) for verdict in ("accepted", "rejected")),
    *(f"-- held {number}" for number in range(3)),
]


@pytest.mark.slow
async def test_a_run_that_is_killed_goes_on_and_checks_nothing_twice(
    terminal: Terminal, settings: Settings, scripted: Scripted, tmp_path: Path
) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    rows = ({"id": number, "code": code} for number, code in enumerate(CODES))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = KeyFile(key_file(tmp_path, {"secret": "alice"}))
    async with new_gateway(settings, keys=keys) as gateway:
        terminal.environ |= {"LEANQ_URL": gateway.url, "LEANQ_KEY": "alice"}
        run = ("campaign", "run", str(data), "--out", str(out), "--json")
        for _ in range(2):
            process = terminal.start(*run)
            await eventually(
                lambda: len(scripted.seen) == len(CODES) and len(scripted.running) == 3
            )
            process.kill()
            await asyncio.to_thread(ended, process)
        # Its requests have names, so they run on without it.
        assert len(scripted.running) == 3
        assert not out.exists()
        process = terminal.start(*run)
        scripted.gate.set()
        done = await asyncio.to_thread(ended, process)
    # Some are rejected.
    assert done.code == 1, done
    assert json.loads(done.out)["counts"] == {"accepted": 13, "rejected": 10}
    found = {record["id"]: record["verdict"] for record in read_results(str(out))}
    assert found == {
        number: "rejected" if "rejected" in code else "accepted"
        for number, code in enumerate(CODES)
    }
    assert Counter(request.code for request in scripted.seen) == Counter(CODES)
