"""The coordinator: reads rows, keeps a window of requests in flight, and journals the replies.

It may die at any moment. The next coordinator opens the same journal and resumes at the cursor. It
submits what was in flight under the same request ids, so the queue answers with a stored reply or
joins the running request.
"""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, Protocol

from leanq.campaigns.dataset import BadRow, Dataset, Row
from leanq.campaigns.journal import Journal
from leanq.campaigns.report.outcomes import one_line
from leanq.campaigns.results import cancelled, of_error, of_reply
from leanq.client import AsyncLeanQClient
from leanq.errors import (
    ClosedError,
    LeanQError,
    QueueError,
    ToolchainError,
    UnknownEnvironmentError,
    UsageError,
)
from leanq.fleet.shown import duration
from leanq.lean.goals.completions import Outcome, best_of, outcome_of
from leanq.producer.request_builder import (
    DEFAULT_ENVIRONMENT,
    ECHO_ENVIRONMENT,
    Check,
    RequestBuilder,
)
from leanq.queue.requests import Reason, Reply
from leanq.queue.settings import Settings

Command = Literal["run", "pause", "cancel"]
End = Literal["finished", "paused", "cancelled"]

# Between two commits of the journal; after each, the observer may pause or cancel.
_COMMIT_S = 0.5
# The most bytes of texts in flight, beside the window's number of requests.
_MAX_IN_FLIGHT_BYTES = 64 << 20
# If so many coordinators in a row die without a record, the campaign itself kills them.
_MAX_FRUITLESS_STARTS = 20
# If most texts end with one of these reasons, the environment is to blame.
_ENVIRONMENT_REASONS: tuple[Reason, ...] = ("unknown_import", "judge_unavailable")
_FIRST_REPLIES = 50
_MESSAGE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Plan:
    """How a campaign's rows are checked; raises UsageError for invalid options.

    Attributes:
        options: those of each check, as in ``leanq.producer.request_builder.Check``.
        window: requests in flight at a time.
        first_success: whether a problem's other attempts are cancelled at its first success.
    """

    options: Check = field(default_factory=Check)
    window: int = 1000
    first_success: bool = False

    def __post_init__(self) -> None:
        # Otherwise every row would end with the same error. Any URL serves here.
        RequestBuilder(Settings("unix:///-"), "default").shared(self.options)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a campaign has come: ``rows`` done, of ``total`` (``None`` if unknown).

    ``unsolved``: problems without an accepted attempt so far; ``None`` without ``first_success``.
    """

    total: int | None
    rows: int
    counts: Mapping[str, int]
    unsolved: int | None = None


class Observer(Protocol):
    """Takes a campaign's reports, and gives it commands."""

    def resumes(self, text: str) -> None:
        """Called once, before the first row, if earlier coordinators left results; ``text`` says
        how many rows have some."""

    async def update(self, progress: Progress) -> Command:
        """Called twice a second and at the end; returns what the coordinator does next."""

    def bad_row(self, line: int, error: str) -> None:
        """Reports a row that cannot be checked, and why."""

    def warn(self, text: str) -> None:
        """Warns that the campaign runs, but probably not as the user meant it."""


class Coordinator:
    """Runs one campaign, from its journal's cursor to the end of its data.

    Calls ``settled`` with the row, the sample's number, the text that was read and the reply; it
    must not raise.
    """

    def __init__(
        self,
        client: AsyncLeanQClient,
        dataset: Dataset,
        journal: Journal,
        plan: Plan,
        observer: Observer,
        settled: Callable[[Row, int, str, Reply], None] | None = None,
    ) -> None:
        self._client = client
        self._settled = settled
        self._dataset = dataset
        self._journal = journal
        self._plan = plan
        self._observer = observer
        self._total = dataset.total()
        self._token = journal.token.encode()
        # How many samples are outstanding, by line in the order of reading. The next coordinator
        # resumes at the first.
        self._open_rows: dict[int, int] = {}
        self._next = journal.cursor
        # Rows read so far, without blank lines.
        self._rows = journal.rows
        self._in_flight: dict[asyncio.Task[None], Row] = {}
        self._in_flight_bytes = 0
        # Tasks of problems with attempts in flight, of which one success is enough.
        self._siblings: dict[str | int, set[asyncio.Task[None]]] = {}
        self._first_replies: list[Reply] = []
        self._wake = asyncio.Event()
        self._fault: BaseException | None = None

    async def run(self) -> End:
        """Checks the rows that are left, until all are done or the observer pauses or cancels the
        campaign.

        It then withdraws the requests in flight from the queue.

        Raises:
            UnavailableError: the queue was unreachable for longer than the client's
                ``unavailable_timeout_s``.
            UnknownEnvironmentError: no worker has ever offered the environment.
            ToolchainError: a worker's Lean cannot read a library that a row imports.
            UsageError: the results cannot be written, or every coordinator of this campaign dies.
        """
        if self._journal.fruitless_starts > _MAX_FRUITLESS_STARTS:
            # A retry gets as many starts again.
            self._journal.rotate_token()
            self._commit()
            raise UsageError(
                f"the campaign has failed: {_MAX_FRUITLESS_STARTS} coordinators in a row died "
                "without a single result"
            )
        if rows := self._journal.found_rows:
            text = f"{rows:,} of {self._total:,} rows have results"
            if (row_s := self._journal.row_s) is not None:
                left_s = (self._total - rows) * row_s
                text += f"; at the pace so far the rest takes {duration(left_s)}"
            self._observer.resumes(text)
        reading = asyncio.ensure_future(self._read())
        watching = asyncio.ensure_future(self._watch())
        end: End = "finished"
        done = False
        try:
            await asyncio.wait((reading, watching), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
                done = True
            else:
                end = watching.result()
        finally:
            try:
                if not done:
                    self._journal.rotate_token()
                    self._commit()
            except UsageError:
                # The next coordinator uses the same request ids, so they must not be cancelled.
                await self._client.close(withdraw=False)
                raise
            finally:
                every = (reading, watching, *self._in_flight)
                for task in every:
                    task.cancel()
                await asyncio.gather(*every, return_exceptions=True)
        self._commit()
        if len(self._first_replies) < _FIRST_REPLIES:
            self._warn_of_environment()
        await self._observer.update(self._progress())
        return end

    async def _read(self) -> None:
        for row in self._dataset.rows(self._next):
            await self._start(row)
        while self._in_flight:
            await self._wait_for_room(1)

    async def _start(self, row: Row | BadRow) -> None:
        await self._wait_for_room()
        journal = self._journal
        self._next = row.line + 1
        self._rows += 1
        if isinstance(row, Row) and (line := journal.line_of(row.id, row.line)) != row.line:
            row = BadRow(row.line, row.id, f"line {line} has the same id")
        if isinstance(row, BadRow):
            if not journal.has(row.line, 0):
                journal.add(of_error(row, None, row.error))
                self._observer.bad_row(row.line, row.error)
            return
        if self._plan.first_success:
            journal.add_problem(problem(row))
        samples = [i for i in range(len(row.codes)) if not journal.has(row.line, i)]
        if samples:
            self._open_rows[row.line] = len(samples)
        for i in samples:
            await self._wait_for_room()
            self._send(row, i)

    def _send(self, row: Row, sample: int) -> None:
        task = asyncio.create_task(self._check(row, sample))
        self._in_flight[task] = row
        self._in_flight_bytes += sum(map(len, row.codes[sample]))
        task.add_done_callback(lambda task: self._ended(task, sample))

    async def _check(self, row: Row, sample: int) -> None:
        if self._plan.first_success:
            if self._journal.is_solved(problem(row)):
                self._journal.add(cancelled(row, sample))
                return
            # Only once the task runs: cancelled before, it could leave no record.
            self._siblings.setdefault(problem(row), set()).add(_this_task())
        try:
            text, reply = await self._ask(row, sample)
            if reply.reason == "library_unreadable":
                raise ToolchainError(
                    f"the campaign stops, as line {row.line} imports what Lean cannot read: "
                    f"{one_line(reply.messages[-1].text, _MESSAGE_CHARS)}; mend the library, and "
                    "run the campaign again: it goes on where it was"
                )
            record = of_reply(row, sample, text, reply)
            if len(self._first_replies) < _FIRST_REPLIES:
                self._first_replies.append(reply)
                if len(self._first_replies) == _FIRST_REPLIES:
                    self._warn_of_environment()
            if self._settled:
                self._settled(row, sample, text, reply)
        except (QueueError, ClosedError, UnknownEnvironmentError, ToolchainError):
            # The row is not to blame.
            raise
        except LeanQError as error:
            record = of_error(row, sample, str(error))
            self._observer.bad_row(row.line, str(error))
        except asyncio.CancelledError:
            if not (self._plan.first_success and self._journal.is_solved(problem(row))):
                raise
            record = cancelled(row, sample)
        self._journal.add(record)
        if self._plan.first_success and record["verdict"] == "accepted":
            self._solve(row)

    async def _ask(self, row: Row, sample: int) -> tuple[str, Reply]:
        """Returns the text of a code that is accepted, or else the first one that its verdict rests
        on, and the reply to it."""

        async def ask(numbered: tuple[int, str]) -> tuple[tuple[str, Reply], Outcome]:
            number, text = numbered
            reply = await self._reply(row, text, self._request_id(row, sample, number, text))
            return (text, reply), outcome_of(reply)

        found = await best_of(enumerate(row.codes[sample]), ask)
        assert found
        return found

    async def _reply(self, row: Row, text: str, request_id: str) -> Reply:
        options: Check = {**self._plan.options, "request_id": request_id}
        if options.get("env") == ECHO_ENVIRONMENT:
            of_echo: Any = {name: value for name, value in options.items() if name in _ECHO_OPTIONS}
            await self._client.echo(text.encode(), **of_echo)
            return Reply(request_id=request_id)
        if row.target is None:
            return await self._client.check(text, **options)
        return await self._client.verify(row.target, text, holes=row.holes, **options)

    def _request_id(self, row: Row, sample: int, number: int, text: str) -> str:
        place = f"{row.line} {sample}" + f" {number}" * bool(number)
        digest = blake2b(place.encode(), key=self._token, digest_size=12).digest()
        name = urlsafe_b64encode(digest).decode()
        # Equal texts go to the same shard, where their checks can meet.
        digest = blake2b(text.encode(), digest_size=4).digest()
        return f"{int.from_bytes(digest) % self._client.settings.shards}-{name}"

    def _solve(self, row: Row) -> None:
        self._journal.solve(problem(row))
        for sibling in self._siblings[problem(row)]:
            if sibling is not _this_task():
                sibling.cancel()

    def _warn_of_environment(self) -> None:
        """Warns if most of the first replies fail for one reason that lies in the environment."""
        first, env = self._first_replies, self._plan.options.get("env", DEFAULT_ENVIRONMENT)
        for reason in _ENVIRONMENT_REASONS:
            replies = [each for each in first if each.reason == reason]
            if 2 * len(replies) > len(first):
                texts = (message.text for each in replies for message in each.messages[:1])
                message = one_line(" ".join(next(texts, "").split()), _MESSAGE_CHARS)
                self._observer.warn(
                    f"{len(replies):,} of the first {len(first):,} results have the reason "
                    f"{reason} in the environment {env!r}{': ' if message else ''}{message}; is it "
                    "the environment that the data is written for?"
                )

    def _ended(self, task: asyncio.Task[None], sample: int) -> None:
        row = self._in_flight.pop(task)
        self._in_flight_bytes -= sum(map(len, row.codes[sample]))
        if siblings := self._siblings.get(problem(row)):
            siblings.discard(task)
            if not siblings:
                del self._siblings[problem(row)]
        if task.cancelled() or task.exception():
            if not task.cancelled():
                self._fault = self._fault or task.exception()
        else:
            self._open_rows[row.line] -= 1
            if not self._open_rows[row.line]:
                del self._open_rows[row.line]
        self._wake.set()

    async def _wait_for_room(self, window: int | None = None) -> None:
        """Waits until one more request may be in flight."""
        # Rows that need no check have to yield to the other tasks, too.
        await asyncio.sleep(0)
        window = window or self._plan.window
        while len(self._in_flight) >= window or (
            self._in_flight and self._in_flight_bytes > _MAX_IN_FLIGHT_BYTES
        ):
            self._wake.clear()
            await self._wake.wait()
            if self._fault:
                break
        if self._fault:
            raise self._fault

    async def _watch(self) -> End:
        while True:
            await asyncio.sleep(_COMMIT_S)
            self._commit()
            command = await self._observer.update(self._progress())
            if command != "run":
                return "paused" if command == "pause" else "cancelled"

    def _progress(self) -> Progress:
        return Progress(
            self._total,
            self._rows - len(self._open_rows),
            dict(self._journal.counts),
            self._journal.unsolved if self._plan.first_success else None,
        )

    def _commit(self) -> None:
        self._journal.commit(next(iter(self._open_rows), self._next))


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def problem(row: Row) -> str | int:
    """Returns the problem that the row is an attempt at; a row without one is its own problem."""
    return row.id if row.problem is None else row.problem


_ECHO_OPTIONS = frozenset({"tenant", "priority", "request_id", "campaign"})
