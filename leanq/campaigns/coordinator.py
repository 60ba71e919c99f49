"""The coordinator: reads rows, keeps a window of requests in flight, and journals what comes back.

It may die at any moment. Whoever opens the same journal next reads on from the cursor, and asks for
what was in flight by the same request ids, so that the queue gives a reply that is there, or
attaches to a run that goes on, rather than check twice.
"""

from __future__ import annotations

import asyncio
import sqlite3
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, Protocol

from leanq.campaigns.dataset import BadRow, Data, Row
from leanq.campaigns.journal import Cursor, Journal, Order
from leanq.campaigns.results import cancelled, of_error, of_reply
from leanq.client import AsyncLeanQClient
from leanq.errors import (
    ClosedError,
    LeanQError,
    LostError,
    QueueError,
    UnknownEnvironmentError,
    UsageError,
)
from leanq.producer.request_builder import ECHO_ENVIRONMENT, Check, RequestBuilder
from leanq.queue.requests import Reply
from leanq.queue.settings import Settings

Command = Literal["go on", "pause", "cancel"]

# Every so long (s) what has come is made durable, and somebody may have a say.
_COMMIT_S = 0.5
# What is in flight at a time: its texts' bytes, beside the number that the window allows.
_MOST_BYTES = 64 << 20
# A coordinator that dies so often without a single record takes itself down.
_MOST_BARREN = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """How a campaign's rows are checked.

    Attributes:
        options: of each check, as :class:`~leanq.producer.request_builder.Check` has them.
        window: requests in flight at a time.
        first_success: whether a problem's other attempts end with its first success.
        order: of the records in the results.

    Raises:
        UsageError: options that no check can have.
    """

    options: Check = field(default_factory=Check)
    window: int = 1000
    first_success: bool = False
    order: Order = "input"

    def __post_init__(self) -> None:
        # Or else each row would be told so. Which queue it is has no say.
        RequestBuilder(Settings("unix:///-"), "default").shared(self.options)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a campaign is: rows done of all (None: unknown), and records by their kind."""

    total: int | None
    rows: int
    counts: Mapping[str, int]


class Watcher(Protocol):
    """Whoever follows a campaign."""

    async def look(self, progress: Progress) -> Command:
        """Called twice a second and at the end; what the coordinator is to do."""

    def bad(self, line: int, error: str) -> None:
        """A row that could not be checked, and why."""


@dataclass(slots=True)
class _Open:
    """A row that is not done: where it is found, and how many of its samples are outstanding.

    The cursor may be before the row, at lines that are blank.
    """

    cursor: Cursor
    left: int


class Coordinator:
    """Runs one campaign, from where its journal is to the end of its data."""

    def __init__(
        self, client: AsyncLeanQClient, data: Data, journal: Journal, plan: Plan, watcher: Watcher
    ) -> None:
        self._client = client
        self._data = data
        self._journal = journal
        self._plan = plan
        self._watcher = watcher
        self._total = data.total()
        self._token = journal.token.encode()
        # By line, in the order of reading: the first is where a successor would begin.
        self._open: dict[int, _Open] = {}
        self._next = journal.cursor
        # Read so far. Lines do not tell, since those that are blank are no rows.
        self._rows = journal.rows
        self._flying: dict[asyncio.Task[None], Row] = {}
        self._bytes = 0
        # Of problems with attempts in flight, where one success is enough.
        self._siblings: dict[str | int, set[asyncio.Task[None]]] = {}
        self._wake = asyncio.Event()
        self._fault: BaseException | None = None

    async def run(self) -> Command:
        """Checks what is left; what ended it: ``go on`` where everything is done.

        What it was told to leave is withdrawn from the queue.

        Raises:
            UnavailableError: the queue was out of reach for longer than the client's patience.
            UnknownEnvironmentError: no worker has ever offered the environment.
            UsageError: RESULTS cannot be written, or coordinators die over this campaign.
        """
        if self._journal.barren > _MOST_BARREN:
            # Whoever asks for it once more gets as many.
            self._journal.give_up()
            self._commit()
            text = f"{_MOST_BARREN} coordinators have died over it without a single result"
            raise UsageError(f"the campaign is given up: {text}")
        reading = asyncio.ensure_future(self._read())
        watching = asyncio.ensure_future(self._watch())
        command: Command = "go on"
        done = False
        try:
            await asyncio.wait((reading, watching), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
                done = True
            else:
                command = watching.result()
        except sqlite3.Error as error:
            raise self._journal.fault(error) from None
        finally:
            try:
                if not done:
                    self._journal.give_up()
                    self._commit()
            except UsageError:
                # Whoever goes on asks by the same request ids, and would be told that they are
                # cancelled.
                await self._client.close(withdraw=False)
                raise
            finally:
                await self._stop(reading, watching)
        self._commit()
        await self._watcher.look(self._look())
        return command

    async def _read(self) -> None:
        cursor = self._next
        for row in self._data.rows(cursor.line, cursor.start):
            await self._begin(row)
        while self._flying:
            await self._room(1)

    async def _begin(self, row: Row | BadRow) -> None:
        await self._room()
        journal, cursor = self._journal, self._next
        self._next = Cursor(row.line + 1, row.next)
        self._rows += 1
        if isinstance(row, Row) and (line := journal.line_of(row.id, row.line)) != row.line:
            row = BadRow(row.line, row.next, row.id, f"line {line} has the same id")
        if isinstance(row, BadRow):
            if not journal.has(row.line, 0):
                journal.add(of_error(row, None, row.error))
                self._watcher.bad(row.line, row.error)
            return
        samples = [i for i in range(len(row.codes)) if not journal.has(row.line, i)]
        if samples:
            self._open[row.line] = _Open(cursor, len(samples))
        for i in samples:
            await self._room()
            self._send(row, i)

    def _send(self, row: Row, sample: int) -> None:
        task = asyncio.create_task(self._check(row, sample))
        self._flying[task] = row
        self._bytes += len(row.codes[sample])
        task.add_done_callback(lambda task: self._landed(task, sample))

    async def _check(self, row: Row, sample: int) -> None:
        code = row.codes[sample]
        if self._plan.first_success:
            if self._journal.is_solved(problem(row)):
                self._journal.add(cancelled(row, sample))
                return
            # Only now that it runs: cancelled before that, it could leave no record.
            self._siblings.setdefault(problem(row), set()).add(_this_task())
        try:
            record = of_reply(row, sample, await self._ask(code, self._request_id(row, sample)))
        except (QueueError, LostError, ClosedError, UnknownEnvironmentError):
            # Nothing is wrong with this row.
            raise
        except LeanQError as error:
            record = of_error(row, sample, str(error))
            self._watcher.bad(row.line, str(error))
        except asyncio.CancelledError:
            if not (self._plan.first_success and self._journal.is_solved(problem(row))):
                raise
            record = cancelled(row, sample)
        self._journal.add(record)
        if self._plan.first_success and record["verdict"] == "accepted":
            self._solve(row)

    async def _ask(self, code: str, request_id: str) -> Reply:
        options: Check = {**self._plan.options, "request_id": request_id}
        if options.get("env") == ECHO_ENVIRONMENT:
            placing: Any = {name: value for name, value in options.items() if name in _PLACING}
            await self._client.echo(code.encode(), **placing)
            return Reply(request_id=request_id)
        return await self._client.check(code, **options)

    def _request_id(self, row: Row, sample: int) -> str:
        text = f"{row.line} {sample}".encode()
        name = urlsafe_b64encode(blake2b(text, key=self._token, digest_size=12).digest()).decode()
        # The same text goes to the same shard, where its checks can meet.
        digest = blake2b(row.codes[sample].encode(), digest_size=4).digest()
        return f"{int.from_bytes(digest) % self._client.settings.shards}-{name}"

    def _solve(self, row: Row) -> None:
        self._journal.solve(problem(row))
        for sibling in self._siblings[problem(row)]:
            if sibling is not _this_task():
                sibling.cancel()

    def _landed(self, task: asyncio.Task[None], sample: int) -> None:
        row = self._flying.pop(task)
        self._bytes -= len(row.codes[sample])
        if siblings := self._siblings.get(problem(row)):
            siblings.discard(task)
            if not siblings:
                del self._siblings[problem(row)]
        if task.cancelled() or task.exception():
            if not task.cancelled():
                self._fault = self._fault or task.exception()
        else:
            self._settled(row)
        self._wake.set()

    def _settled(self, row: Row) -> None:
        opened = self._open[row.line]
        opened.left -= 1
        if not opened.left:
            del self._open[row.line]

    async def _room(self, window: int | None = None) -> None:
        """Waits until one more may be in flight."""
        # A long run of rows that need no check must let others live too.
        await asyncio.sleep(0)
        window = window or self._plan.window
        while len(self._flying) >= window or (self._flying and self._bytes > _MOST_BYTES):
            self._wake.clear()
            await self._wake.wait()
            if self._fault:
                break
        if self._fault:
            raise self._fault

    async def _watch(self) -> Command:
        while True:
            await asyncio.sleep(_COMMIT_S)
            self._commit()
            command = await self._watcher.look(self._look())
            if command != "go on":
                return command

    def _look(self) -> Progress:
        return Progress(self._total, self._rows - len(self._open), dict(self._journal.counts))

    def _commit(self) -> None:
        first = next(iter(self._open.values()), None)
        self._journal.commit(first.cursor if first else self._next)

    async def _stop(self, *tasks: asyncio.Task[Any]) -> None:
        flying = [*self._flying]
        for task in (*tasks, *flying):
            task.cancel()
        await asyncio.gather(*tasks, *flying, return_exceptions=True)


def _this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def problem(row: Row) -> str | int:
    """What the row is an attempt at."""
    return row.id if row.problem is None else row.problem


_PLACING = frozenset({"tenant", "priority", "request_id"})
