"""Drivers turn operations into Lean's answers. The worker knows no more of them than this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from leanq.queue.requests import Reply, Request
from leanq.states import States


class Driver(Protocol):
    """Answers requests of one environment, whose name clients ask for. ``about``: facts for people:
    fingerprint, versions, and as ``degraded`` why it is slower here than it should be."""

    environment: str

    @property
    def about(self) -> Mapping[str, object]: ...

    async def open(self, states: States) -> None:
        """Gets ready to answer, with states kept there; raises WorkerError if it never will."""

    async def describe(self) -> str:
        """Returns a line for people: the program, its origin, and whether it can accept."""

    async def run(self, request: Request) -> Reply:
        """Returns Lean's verdict, the infrastructure's, or why the request makes no sense here.
        ``warm`` in it: the processes left running make other requests with the same first affinity
        fast. A cancellation waits until all that it started has stopped.

        Raises ToolchainError if Lean does not work on this machine, whatever the request was, and
        WorkerError if this machine failed at the request, which may have broken it.
        """

    async def prove(self) -> None:
        """Tries whether it can answer; raises WorkerError if it cannot."""

    async def close(self) -> None:
        """Ends every process that it started."""
