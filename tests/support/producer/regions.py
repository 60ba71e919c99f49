"""What the tests of clients with several clusters share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from leanq.client import LeanQClient, LeanQFuture
from support.fleets import look
from support.producer.routes import thread_of
from support.servers import Server

DEADLINE_S = 20.0


def urls(*servers: Server) -> list[str]:
    return [server.settings.url for server in servers]


def counted(name: str, *servers: Server) -> int:
    return sum(look(server.settings).counters.get(name, 0) for server in servers)


def in_its_thread(lean: LeanQClient, call: Callable[[], None]) -> None:
    done = threading.Event()
    thread = thread_of(lean)
    assert thread.call(call)
    assert thread.call(done.set)
    assert done.wait(DEADLINE_S)


def results(futures: list[LeanQFuture[Any]]) -> list[Any]:
    assert not wait(futures, DEADLINE_S).not_done
    return [future.result() for future in futures]


def payloads(count: int, start: int = 0, head: str = "") -> list[bytes]:
    return [f"{head}{n}".encode() for n in range(start, start + count)]
