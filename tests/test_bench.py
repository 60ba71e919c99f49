"""The benchmarks' own parts, where a defect would look like one of a queue."""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

_BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """That of a server as the benchmarks have it."""
    monkeypatch.syspath_prepend(_BENCH)
    with importlib.import_module("servers").server() as found:
        yield found
    for name in ("servers", "load"):
        sys.modules.pop(name, None)


@pytest.fixture
def monitor(url: str) -> Iterator[Any]:
    """Counts what the server is told, and has begun with it."""
    made = importlib.import_module("load").Monitor(url)
    made.start()
    deadline = time.monotonic() + 10
    with redis.Redis.from_url(url) as connection:
        while not monitors(connection):
            assert time.monotonic() < deadline
    yield made
    made.close()


def monitors(server: redis.Redis) -> list[str]:
    return [each["id"] for each in server.client_list() if each["cmd"] == "monitor"]


def test_each_figure_of_the_readme_has_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(_BENCH)
    readme = (_BENCH.parent / "README.md").read_text()
    table = readme.partition("\n## Figures\n")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][2:]
    found = list(importlib.import_module("figures").figures(readme))
    assert len(found) == len(rows) >= 4
    for each in found:
        script, *_ = each.command.split()
        assert each.seen > 0
        assert each.key in (_BENCH.parent / script).read_text()


def test_commands_are_counted_until_the_monitor_stops(url: str, monitor: Any) -> None:
    with redis.Redis.from_url(url) as connection:
        for _ in range(5):
            connection.ping()
    assert monitor.stop() >= 5


def test_a_monitor_that_the_server_closes_ends_its_load(url: str, monitor: Any) -> None:
    """And the load does not wait for it without end."""
    ends: list[str] = []

    def stop() -> None:
        try:
            ends.append(str(monitor.stop()))
        except ConnectionError as error:
            ends.append(str(error))

    with redis.Redis.from_url(url) as connection:
        connection.client_kill_filter(_id=monitors(connection)[0])
    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    thread.join(10)
    assert ends == ["MONITOR ended early: the server closed the connection"]
