"""Drivers: what turns an operation into Lean's answer.

A driver serves one environment: one environment, in the way that its program allows. All speak
the protocol below, and the worker knows nothing else of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from leanq.queue.requests import Reply, Request
from leanq.states import States


class Driver(Protocol):
    """One way to answer requests of one environment.

    Attributes:
        environment: the environment's name, under which clients ask for it.
        about: what people may want to know of it: fingerprint, versions; ``degraded``: why it is
            slower on this machine than it should be, where it is.
    """

    environment: str

    @property
    def about(self) -> Mapping[str, object]: ...

    async def open(self, states: States) -> None:
        """Makes ready to answer; raises WorkerError where it never will.

        ``states`` is where states are kept, for this driver and all others of the queue.
        """

    async def describe(self) -> str:
        """What answers, where it is from, and whether it can accept, in a line for people."""

    async def run(self, request: Request) -> Reply:
        """Lean's verdict, or the infrastructure's, or why the request makes no sense here.
        ``warm`` in it: what it left running would make others with the same first affinity fast.

        Cancelling it stops whatever it started before the cancellation is complete.

        Raises:
            ToolchainError: Lean does not work on this machine, whatever the request was.
            WorkerError: this machine failed at the request, which may be what broke it.
        """

    async def prove(self) -> None:
        """Tries whether it can answer; raises WorkerError where it cannot."""

    async def close(self) -> None:
        """Ends every process that it started."""
