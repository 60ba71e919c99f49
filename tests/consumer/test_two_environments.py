"""Workers that offer different environments under one name: verdicts then depend on the worker."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

import pytest
from support.fleets import Recorder, working
from support.terminals import Terminal

from leanq.fleet.prometheus import exposition, fleet_samples
from leanq.fleet.stats import fleet_stats
from leanq.queue.settings import Settings

ONE, OTHER = "1" * 64, "2" * 64


class Slow(Recorder):
    @property
    def about(self) -> Mapping[str, object]:
        return {"driver": "echo", "degraded": "its oracle is out"}


class Judged(Recorder):
    @property
    def about(self) -> Mapping[str, object]:
        return {"driver": "lean", "lean": "4.28.0", "kernel": "4.35.0"}


class Fingerprinted(Recorder):
    def __init__(self, fingerprint: str) -> None:
        super().__init__()
        self.fingerprint = fingerprint

    @property
    def about(self) -> Mapping[str, object]:
        return {"driver": "echo", "fingerprint": self.fingerprint}


async def different(settings: Settings) -> float:
    """The metric: how many environments are offered as ``echo``."""
    page = exposition(fleet_samples(await fleet_stats(settings)))
    (line,) = (row for row in page.splitlines() if row.startswith("leanq_environment_fingerprints"))
    assert 'environment="echo"' in line
    return float(line.split()[-1])


async def test_workers_that_differ_are_seen_everywhere(
    settings: Settings, terminal: Terminal, caplog: pytest.LogCaptureFixture
) -> None:
    terminal.use(settings)
    async with working(settings, Fingerprinted(ONE)):
        async with working(settings, Fingerprinted(ONE)):
            assert await different(settings) == 1
            assert "differs" not in terminal.run("status").out
            assert not caplog.records
        async with working(settings, Fingerprinted(OTHER)):
            (warning,) = caplog.records
            assert warning.levelno == logging.WARNING
            assert f"'echo': its fingerprint is {OTHER[:12]} here and {ONE[:12]} (1) there" in (
                warning.getMessage()
            )
            assert await different(settings) == 2
            shown = terminal.run("status").out
            assert "differs     echo is not the same on all workers" in shown
            both = ", ".join(sorted([ONE[:12], OTHER[:12]]))
            assert any(
                line.startswith("echo ") and line.endswith(both) for line in shown.splitlines()
            )
            record = json.loads(terminal.run("status", "--json").out)
            assert record["environments"]["echo"]["fingerprints"] == {ONE: 1, OTHER: 1}
            # And which worker has which.
            workers = [row["fingerprints"]["echo"] for row in record["workers"]]
            assert sorted(workers) == [ONE, OTHER]


async def test_a_new_version_after_the_old_one_has_gone_is_no_trouble(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async with working(settings, Fingerprinted(ONE)):
        pass
    async with working(settings, Fingerprinted(OTHER)):
        assert await different(settings) == 1
    assert not caplog.records


async def test_a_worker_whose_files_change_says_what_it_offers_now(settings: Settings) -> None:
    driver = Fingerprinted(ONE)
    async with working(settings, driver) as worker:
        driver.fingerprint = OTHER
        await worker.consumers[0].membership.join()
        (stats,) = (await fleet_stats(settings)).environments.values()
        assert stats.fingerprints == {OTHER: 1}


async def test_a_worker_that_is_slower_than_it_should_be_is_named_with_the_reason(
    settings: Settings, terminal: Terminal
) -> None:
    terminal.use(settings)
    async with working(settings, Slow()), working(settings, Recorder()):
        lines = [line for line in terminal.run("status").out.splitlines() if "oracle" in line]
        assert [line.split(" on ")[0] for line in lines] == ["degraded    echo"]
        assert lines[0].endswith(": its oracle is out")
        record = json.loads(terminal.run("status", "--json").out)
        assert [row["degraded"] for row in record["workers"]].count({}) == 1
        assert "degraded" not in record["environments"]["echo"]
        page = exposition(fleet_samples(await fleet_stats(settings)))
        assert 'leanq_workers_degraded{environment="echo"} 1.0' in page


async def test_the_kernel_of_an_environment_is_named(
    settings: Settings, terminal: Terminal
) -> None:
    terminal.use(settings)
    async with working(settings, Judged()):
        assert "  4.28.0, kernel 4.35.0  " in terminal.run("status").out
        record = json.loads(terminal.run("status", "--json").out)
        assert record["environments"]["echo"]["kernel"] == "4.35.0"
        page = exposition(fleet_samples(await fleet_stats(settings)))
        labels = 'environment="echo",kernel="4.35.0",lean="4.28.0"'
        assert f"leanq_environment_info{{{labels}}} 1.0" in page
