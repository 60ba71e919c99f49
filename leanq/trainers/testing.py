"""For users' own tests: clients without a fleet that answer as a test wants, and a real queue.

As a pytest plugin (``pytest_plugins = ["leanq.trainers.testing"]`` in conftest.py) it brings these
fixtures:

- ``fake_lean``: a ``FakeLeanQClient``, new for each test;
- ``lean_queue``: the settings of a queue with real Lean, for a whole session, on this machine;
- ``lean``: a ``leanq.LeanQClient`` of that queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from leanq.client import AsyncLeanQClient, LeanQClient
from leanq.errors import (
    LeanQError,
    LostError,
    UnknownEnvironmentError,
    UnknownStateError,
)
from leanq.lean.goals.holes import find_holes
from leanq.producer.future_client import LoopThread
from leanq.producer.outstanding import conflict
from leanq.producer.request_builder import DEFAULT_ENVIRONMENT, PreparedRequest
from leanq.producer.route import Route, TaskRoute, Waiter
from leanq.queue.requests import Operation, Reason, Reply, Request, Sorry, Verdict, content_of
from leanq.queue.settings import Settings

_REASONS: dict[Verdict, Reason] = {
    "unverified": "runs_programs",
    "incomplete": "sorry",
    "rejected": "lean_error",
    "exhausted": "heartbeats",
    "unjudged": "judge_limit",
    "timeout": "cpu_time",
    "memory": "memory",
    "crashed": "process_died",
    "cancelled": "withdrawn",
    "expired": "deadline",
    "poisoned": "too_many_deaths",
}

Answer = Reply | Verdict | LeanQError | Callable[[Request], "Reply | Verdict | LeanQError"]
"""A reply, a verdict alone, an error that the client raises, or a function that returns one."""


@dataclass
class _Rule:
    op: Operation | None
    pattern: re.Pattern[str]
    answer: Answer
    delay_s: float
    left: float


@dataclass
class FakeFleet:
    """The answers of a fake client's fleet, and the requests that it got.

    Without rules, a text is ``accepted``, or ``incomplete`` if it has a ``sorry``; each comes with
    a goal and a state. A step, or a verification without a ``sorry``, is ``accepted``. A repeated
    request id gets the same reply.

    Attributes:
        environments: the environments that its workers offer.
        requests: all requests, in order.
        cancelled: how many requests were withdrawn before their reply.
    """

    environments: tuple[str, ...] = (DEFAULT_ENVIRONMENT,)
    requests: list[Request] = field(default_factory=list)
    cancelled: int = 0
    _rules: list[_Rule] = field(default_factory=list)
    _states: dict[str, str] = field(default_factory=dict)
    _replies: dict[str, Reply] = field(default_factory=dict)
    _contents: dict[str, str] = field(default_factory=dict)

    def on(
        self,
        text: str = "",
        answer: Answer = "accepted",
        *,
        op: Operation | None = None,
        delay_s: float = 0.0,
        times: int | None = None,
    ) -> None:
        """Adds a rule: gives ``answer`` if ``text``, a regular expression, is found in the code,
        the candidate or the tactic. If several rules fit, the last one holds.

        Args:
            answer: a verdict alone gets its most common reason.
            op: the operation that the rule is for; all unless given.
            delay_s: how long the reply takes, in seconds.
            times: how often the rule holds; without end unless given.
        """
        left = float("inf") if times is None else times
        self._rules.append(_Rule(op, re.compile(text, re.DOTALL), answer, delay_s, left))

    async def _serve(self, prepared: PreparedRequest[Any], waiter: Waiter) -> Reply:
        submission = prepared.submission
        environment = submission.environment
        if prepared.request.state and not environment:
            if prepared.request.state not in self._states:
                raise UnknownStateError(
                    f"the queue does not know the state {prepared.request.state}"
                )
            environment = self._states[prepared.request.state]
        if environment not in self.environments:
            known = ", ".join(self.environments)
            raise UnknownEnvironmentError(
                f"no worker has ever offered the environment {environment!r}; known: {known}"
            )
        content = content_of(environment, submission.digest)
        if self._contents.setdefault(submission.request_id, content) != content:
            raise conflict(submission.request_id)
        waiter.acknowledged()
        if (reply := self._replies.get(submission.request_id)) is not None:
            return reply
        request = prepared.request
        self.requests.append(request)
        rule = self._rule(request)
        delay_s = rule.delay_s if rule else 0.0
        if submission.deadline_ms and delay_s * 1000 > submission.deadline_ms:
            await asyncio.sleep(submission.deadline_ms / 1000)
            reply = Reply("expired", reason="deadline")
        else:
            await asyncio.sleep(delay_s)
            reply = self._reply(request, rule, environment)
        reply = structs.replace(reply, request_id=submission.request_id, worker="fake", attempts=1)
        self._replies[submission.request_id] = reply
        return reply

    def _rule(self, request: Request) -> _Rule | None:
        text = request.tactic if request.op == "step" else request.code
        for rule in reversed(self._rules):
            if rule.op in (None, request.op) and rule.left and rule.pattern.search(text):
                rule.left -= 1
                return rule
        return None

    def _reply(self, request: Request, rule: _Rule | None, environment: str) -> Reply:
        if rule is None:
            return self._unasked(request, environment)
        answer = rule.answer(request) if callable(rule.answer) else rule.answer
        if isinstance(answer, LeanQError):
            raise answer
        if isinstance(answer, str):
            answer = self._worded(request, answer, environment)
        for state in (answer.state, *(sorry.state for sorry in answer.sorries)):
            if state:
                self._states[state] = environment
        return answer

    def _unasked(self, request: Request, environment: str) -> Reply:
        if request.op in ("check", "verify") and find_holes(request.code):
            return self._worded(request, "incomplete", environment)
        if request.op == "import":
            return Reply(state=self._new_state("imported", environment))
        if request.op == "export":
            return Reply(payload=request.state.encode())
        if request.op == "echo":
            return Reply(payload=request.payload)
        return Reply("accepted", axioms=())

    def _worded(self, request: Request, verdict: Verdict, environment: str) -> Reply:
        reason = _REASONS.get(verdict)
        if verdict != "incomplete":
            return Reply(verdict, reason=reason, axioms=() if verdict == "accepted" else None)
        if request.op == "step":
            state = self._new_state(f"{request.state} {request.tactic}", environment)
            goals = (f"⊢ what {request.tactic} leaves",)
            return Reply(verdict, state=state, goals=goals, reason="goals_remain")
        return Reply(verdict, sorries=tuple(self._sorries(request, environment)), reason=reason)

    def _sorries(self, request: Request, environment: str) -> Iterator[Sorry]:
        for hole in find_holes(request.code):
            before = request.code[: hole.offset]
            line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1)
            state = None
            if request.op == "check":
                state = self._new_state(f"{request.code} {hole.offset}", environment)
            yield Sorry(line, column, "⊢ goal", state, line, column + len("sorry"))

    def _new_state(self, name: str, environment: str) -> str:
        state = hashlib.blake2b(name.encode(), digest_size=32).hexdigest()
        self._states[state] = environment
        return state


class _FakeRoute(TaskRoute):
    """The route of a fake client."""

    def __init__(self, fleet: FakeFleet) -> None:
        super().__init__("the client was closed before the request ended")
        self._fleet = fleet

    async def open(self) -> None:
        pass

    async def answer(self, prepared: PreparedRequest[Any], waiter: Waiter) -> Reply:
        return await self._fleet._serve(prepared, waiter)

    def attach(self, request_id: str, waiter: Waiter) -> None:
        reply = self._fleet._replies.get(request_id)
        waiter.ended(reply or LostError(f"the queue does not know the request {request_id}"))

    def cancel(self, request_id: str, waiter: Waiter) -> bool:
        is_withdrawn = super().cancel(request_id, waiter)
        self._fleet.cancelled += is_withdrawn
        return is_withdrawn


class FakeLeanQClient(LeanQClient):
    """A ``leanq.LeanQClient`` without a queue. It checks its arguments as a real client does,
    and its replies come from ``fleet``.

    Examples:
        >>> with FakeLeanQClient() as lean:
        ...     lean.fleet.on("nonsense", "rejected")
        ...     lean.fleet.on("slow", "timeout", delay_s=0.01)
        ...     [lean.check(code).result().verdict for code in ("p", "nonsense", "slow", "sorry")]
        ['accepted', 'rejected', 'timeout', 'incomplete']
    """

    def __init__(self, fleet: FakeFleet | None = None, **how: Any) -> None:
        self.fleet = fleet or FakeFleet()
        super().__init__("unix:///fake", **how)

    def _route_to_queue(self) -> Route:
        return _FakeRoute(self.fleet)


class FakeAsyncLeanQClient(AsyncLeanQClient):
    """A fake ``leanq.AsyncLeanQClient``, as ``FakeLeanQClient``."""

    def __init__(self, fleet: FakeFleet | None = None, **how: Any) -> None:
        self.fleet = fleet or FakeFleet()
        super().__init__("unix:///fake", **how)

    def _route_to_queue(self) -> Route:
        return _FakeRoute(self.fleet)


@pytest.fixture
def fake_lean() -> Iterator[FakeLeanQClient]:
    """Yields a client without a fleet; ``fake_lean.fleet.on(...)`` sets its answers."""
    with FakeLeanQClient() as client:
        yield client


@pytest.fixture(scope="session")
def lean_queue() -> Iterator[Settings]:
    """Yields a queue with a worker and real Lean, embedded for the session. Tests are skipped if it
    cannot be had, and fail if CI is set."""
    from leanq.lean.driver import LeanDriver, worker_cache
    from leanq.lean.environment import open_environment
    from leanq.lean.run.fork_server import ForkRules
    from leanq.local import EmbeddedServer, running
    from leanq.worker import Worker

    try:
        server = EmbeddedServer()
        settings = server.settings()
        slots = len(os.sched_getaffinity(0))
        driver = LeanDriver(
            lambda: open_environment(DEFAULT_ENVIRONMENT, None),
            slots=slots,
            cache=worker_cache(settings),
            forks=ForkRules(compare_every=settings.compare_every),
        )
        worker = Worker(settings, [driver], slots=slots)
        thread, stack = LoopThread("leanq-testing"), contextlib.AsyncExitStack()
        with contextlib.closing(server), server:
            try:
                thread.run(stack.enter_async_context(running(worker)))
                yield settings
            finally:
                thread.stop(stack.aclose)
    except LeanQError as error:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no queue with Lean here: {error}")


@pytest.fixture
def lean(lean_queue: Settings) -> Iterator[LeanQClient]:
    """Yields a client of the session's queue."""
    with LeanQClient(lean_queue) as client:
        yield client
