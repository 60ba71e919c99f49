"""What clients refuse, what is refused to them, and how they say so: in one line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.fleets import Recorder, look, serving, until
from support.servers import own_server

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.errors import (
    LeanQError,
    QueueFullError,
    RequestError,
    UnavailableError,
    UnknownEnvironmentError,
    UsageError,
)
from leanq.local import EmbeddedServer
from leanq.queue.settings import Settings

DEADLINE_S = 20.0


pytestmark = pytest.mark.usefixtures("swept")


USAGE: dict[str, Callable[[LeanQClient], object]] = {
    "1 or 2, got 3": lambda lean: lean.echo(b"", priority=3),
    "1 or 2, got -1": lambda lean: lean.echo(b"", priority=-1),
    "priority must be an integer, got 0.5": lambda lean: lean.echo(b"", priority=0.5),  # type: ignore[arg-type]
    "timeout must lie between": lambda lean: lean.check("x", timeout_s=-1),
    "seconds, got nan": lambda lean: lean.check("x", timeout_s=float("nan")),
    "memory must lie between": lambda lean: lean.check("x", memory_mb=0),
    "delay must lie between": lambda lean: lean.echo(b"", delay_s=-1),
    "deadline_s must be above 0, got 0": lambda lean: lean.check("x", deadline_s=0),
    "the text is empty": lambda lean: lean.check(" \n"),
    "NUL": lambda lean: lean.check("example : True := trivial\0"),
    "not Unicode": lambda lean: lean.check("example \ud800"),
    "tenant 'a b'": lambda lean: lean.check("x", tenant="a b"),
    "environment ''": lambda lean: lean.check("x", env=""),
}


def test_what_makes_no_sense_is_refused_before_it_is_sent(settings: Settings) -> None:
    with LeanQClient(settings) as lean:
        for text, wrong in USAGE.items():
            with pytest.raises(UsageError, match=text) as refused:
                wrong(lean)
            assert "\n" not in str(refused.value)
        # A misspelt option must not pass for one that was left out.
        with pytest.raises(TypeError, match="'timeout'"):
            lean.check("x", timeout=5)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="'env'"):
            lean.echo(b"", env="x")  # type: ignore[call-arg]
    assert "submitted" not in look(settings).counters


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("ftp://localhost", UsageError),
        ("http://lean.example", UsageError),
        ("http://127.0.0.1:1", UnavailableError),
        ("redis://localhost:nope", UsageError),
        ("redis://localhost?colour=blue", UsageError),
        ("redis://:secret@127.0.0.1:1", UnavailableError),
        ("unix://:secret@/nowhere/server.sock", UnavailableError),
    ],
)
async def test_a_url_that_leads_nowhere_is_one_line(url: str, error: type[LeanQError]) -> None:
    before = set(threading.enumerate())
    with pytest.raises(error) as refused:
        LeanQClient(url)
    begun = set(threading.enumerate()) - before
    assert all(thread.name != "leanq-client" for thread in begun)
    with pytest.raises(error):
        async with AsyncLeanQClient(url):
            pass
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_wrong_password_is_one_line(server: EmbeddedServer) -> None:
    with pytest.raises(UnavailableError) as refused:
        LeanQClient(server.url.replace("//:", "//:not"))
    assert "\n" not in str(refused.value)


def test_an_unknown_environment_names_the_known_ones(settings: Settings) -> None:
    with LeanQClient(settings) as lean, serving(settings):
        futures = [lean.check("x", env="mathlib-4.9") for _ in range(3)]
        for future in futures:
            with pytest.raises(UnknownEnvironmentError, match=r"'mathlib-4\.9'; known: echo$"):
                future.result(DEADLINE_S)
        # What a worker cannot do is no verdict.
        with pytest.raises(RequestError, match="runs no Lean"):
            lean.check("x", env="echo").result(DEADLINE_S)


@pytest.mark.slow
def test_a_full_queue_raises_or_waits(settings: Settings) -> None:
    small = replace(settings, max_waiting=2)
    with LeanQClient(small) as patient, LeanQClient(small, when_full="raise") as quick:
        futures = [patient.echo(b"%d" % n) for n in range(5)]
        until(lambda: look(small).counters.get("submitted") == 2)
        with pytest.raises(QueueFullError, match="full for tenant 'default' in 'echo'") as full:
            quick.echo(b"").result(DEADLINE_S)
        assert full.value.retry_after_s > 0
        # Another tenant has room.
        assert quick.echo(b"", tenant="other").cancel()
        with serving(small):
            assert [future.result(DEADLINE_S) for future in futures] == [
                b"%d" % n for n in range(5)
            ]


def test_a_full_memory_raises_or_waits_while_workers_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with own_server() as server:
        driver = Recorder()
        with (
            LeanQClient(server.settings) as patient,
            LeanQClient(server.settings, when_full="raise") as quick,
            serving(server.settings, driver, slots=1),
        ):
            before = [patient.echo(b"held"), patient.echo(b"next")]
            until(lambda: driver.running == [b"held"])
            server.configure("maxmemory", "1")
            with pytest.raises(QueueFullError, match="out of memory"):
                quick.echo(b"").result(DEADLINE_S)
            later = [patient.echo(b"later") for _ in range(3)]
            driver.let_go()
            assert [future.result(DEADLINE_S) for future in before] == [b"held", b"next"]
            until(lambda: "meanwhile this client tries again every 1 s" in caplog.text)
            server.configure("maxmemory", "0")
            assert [future.result(DEADLINE_S) for future in later] == 3 * [b"later"]
    # Once in a while, and not for each request.
    assert caplog.text.count("out of memory") == 1
