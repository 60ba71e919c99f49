"""Campaigns as jobs of RQ: sent, listed, held, ended and taken up again.

A job carries its campaign as JSON. Beside it, in RQ's Redis, stands a hash ``QUEUE:ID``:

- ``command``: what the coordinator is to do, if not to go on;
- ``begun``: the fingerprint of the data, once some coordinator has opened the journal, so that
  results that are there are the campaign's own;
- ``retry``: whether results that are there are taken up again.

How far it is stands in the job's meta, where rq-dashboard shows it; only coordinators write that.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import redis
import rq
from rq.exceptions import DeserializationError, InvalidJobOperation, NoSuchJobError
from rq.intermediate_queue import IntermediateQueue
from rq.job import Dependency, Job
from rq.registry import BaseRegistry
from rq.serializers import JSONSerializer

from leanq.campaigns.campaign import Campaign
from leanq.errors import UsageError

# Deaths are no fault of a campaign's: a fleet of preemptible machines has them all day.
RETRIES = 1_000_000

State = Literal[
    "waiting",
    "scheduled",
    "queued",
    "running",
    "pausing",
    "paused",
    "cancelling",
    "finished",
    "failed",
    "cancelled",
]

_RESULT_TTL_S = 30 * 86_400
_FAILURE_TTL_S = 365 * 86_400
_JOB = "leanq.campaigns.rq_job.coordinate"
_TAKEN_UP_S = 10


class CampaignError(Exception):
    """What RQ shows of a campaign that ends without results: cancelled, or impossible."""


class CampaignQueue(rq.Queue):
    """RQ's queue; a worker that dies amid its maintenance does not hold it up for 15 minutes, nor
    a job for a minute that it had just taken."""

    def acquire_maintenance_lock(self) -> bool:
        return bool(self.connection.set(self.registry_cleaning_key, 1, nx=True, ex=10))

    @property
    def intermediate_queue(self) -> IntermediateQueue:
        return _Taken(self.key, self.connection)


class _Taken(IntermediateQueue):
    """Jobs that a worker has taken and not begun."""

    def should_be_cleaned_up(self, job_id: str) -> bool:
        seen = self.get_first_seen(job_id)
        return seen is not None and datetime.now(UTC) - seen > timedelta(seconds=_TAKEN_UP_S)


@dataclass(frozen=True, slots=True)
class Sent:
    """A campaign that was sent.

    Attributes:
        rows: rows done, of all if that is known.
        counts: records by verdict.
        begins: when, where it is scheduled.
        after: where it waits, the campaigns that have to finish first.
        bad: the first of its bad rows, with their lines.
        error: why it failed, or was put off.
    """

    id: str
    state: State
    campaign: Campaign
    sent: datetime
    begins: datetime | None
    after: Sequence[str]
    rows: int
    total: int | None
    counts: Mapping[str, int]
    bad: Sequence[str]
    error: str | None


class Campaigns:
    """The campaigns of one leanq in an RQ.

    Args:
        prefix: as LEANQ_PREFIX, which keeps several leanqs apart in one Redis.

    Raises (all methods):
        UnavailableError: RQ's Redis does not answer.
        UsageError: no such campaign, or it is in no state for that.
    """

    def __init__(self, connection: redis.Redis, prefix: str) -> None:
        self._connection = connection
        self.queue = CampaignQueue(
            queue_name(prefix), connection=connection, serializer=JSONSerializer
        )

    def submit(self, campaign: Campaign, *, delay_s: float = 0.0, after: Sequence[str] = ()) -> str:
        """Sends a campaign, to begin after ``delay_s`` seconds or after others have finished.

        Returns its id.
        """
        if delay_s and after:
            raise UsageError("a campaign begins at a time or after others, not both")
        id_ = f"campaign-{secrets.token_hex(4)}"
        how: dict[str, Any] = {
            "args": (campaign.spec(),),
            "job_id": id_,
            "description": f"leanq campaign {campaign.data} > {campaign.out}",
            "retry": rq.Retry(max=RETRIES),
            "job_timeout": -1,
            "result_ttl": _RESULT_TTL_S,
            "failure_ttl": _FAILURE_TTL_S,
        }
        if after:
            how["depends_on"] = Dependency([self._job(other) for other in after])
        if delay_s:
            self.queue.enqueue_in(timedelta(seconds=delay_s), _JOB, **how)
        else:
            self.queue.enqueue(_JOB, **how)
        return id_

    def list(self) -> Iterator[Sent]:
        """All that RQ still knows, in no order."""
        queue = self.queue
        registries = (
            queue.started_job_registry,
            queue.deferred_job_registry,
            queue.scheduled_job_registry,
            queue.finished_job_registry,
            queue.failed_job_registry,
            queue.canceled_job_registry,
        )
        ids = dict.fromkeys(queue.get_job_ids())
        for registry in registries:
            # Whoever looks leaves it to the workers to judge who is dead.
            ids.update(dict.fromkeys(registry.get_job_ids(cleanup=False)))
        for job in Job.fetch_many([*ids], self._connection, serializer=JSONSerializer):
            if job is not None and _is_campaign(job):
                yield self._sent(job)

    def show(self, id_: str) -> Sent:
        """One of them."""
        return self._sent(self._job(id_))

    def pause(self, id_: str) -> None:
        """Holds it: what is in flight is withdrawn, and what has come is kept."""
        note(self._expect(id_, "waiting", "scheduled", "queued", "running"), command="pause")

    def resume(self, id_: str) -> None:
        """Lets a campaign go on that was paused."""
        note(self._expect(id_, "paused", "pausing"), command="")
        self.let_go(id_)

    def let_go(self, id_: str) -> None:
        """Puts a paused campaign back into the queue, if nobody wants it paused any more.

        Whoever puts it away looks once more after that, so that none stays there who was resumed
        meanwhile.
        """
        job = self._job(id_)
        # One that was paused before it began is still where it was.
        if job.meta.get("paused") and noted(job, "command") != "pause":
            with contextlib.suppress(InvalidJobOperation):  # it is not there yet, or not any more
                self._enqueue(job, self.queue.scheduled_job_registry)

    def let_all_go(self) -> None:
        """Lets go whoever was resumed, where whoever has put it away died before it looked."""
        for id_ in self.queue.scheduled_job_registry.get_job_ids():
            with contextlib.suppress(UsageError):  # it is no campaign, or gone
                self.let_go(id_)

    def cancel(self, id_: str) -> None:
        """Ends it; what has come stays beside its results, for ``retry``."""
        job = self._expect(id_, "waiting", "scheduled", "queued", "running", "pausing", "paused")
        note(job, command="cancel")
        if not job.is_started:
            job.cancel()

    def retry(self, id_: str) -> None:
        """Takes one up again that failed or was cancelled, or that finished: then for those of its
        rows that have no verdict of Lean's."""
        job = self._expect(id_, "failed", "cancelled", "finished")
        queue = self.queue
        for registry in (
            queue.failed_job_registry,
            queue.canceled_job_registry,
            queue.finished_job_registry,
        ):
            if job.id in registry:
                note(job, command="", retry="1")
                self._enqueue(job, registry)
                return
        raise UsageError(f"the campaign {id_} is just ending; try again")

    def _enqueue(self, job: Job, registry: BaseRegistry) -> None:
        job.retries_left = RETRIES
        # Not taken out, as RQ saves none that is empty.
        job.meta |= {"paused": False, "error": None}
        # RQ has given what has ended a time-to-live.
        self._connection.persist(job.key)
        registry.requeue(job)

    def _expect(self, id_: str, *states: State) -> Job:
        job = self._job(id_)
        state = self._sent(job).state
        if state not in states:
            raise UsageError(f"the campaign {id_} is {state}")
        return job

    def _job(self, id_: str) -> Job:
        try:
            job = Job.fetch(id_, self._connection, serializer=JSONSerializer)
        except NoSuchJobError:
            job = None
        if job is None or job.origin != self.queue.name or not _is_campaign(job):
            raise UsageError(f"no campaign {id_!r}; 'leanq campaign list' shows those there are")
        return job

    def _sent(self, job: Job) -> Sent:
        command = noted(job, "command")
        progress = job.meta.get("progress", {})
        state, begins, after = _state(job, command), None, []
        if state == "scheduled":
            with contextlib.suppress(NoSuchJobError):  # its time has just come
                begins = self.queue.scheduled_job_registry.get_scheduled_time(job)
        elif state == "waiting":
            after = [other.id for other in job.fetch_dependencies()]
        return Sent(
            id=job.id,
            state=state,
            campaign=Campaign.of(job.args[0]),
            sent=job.created_at,
            begins=begins,
            after=after,
            rows=progress.get("rows", 0),
            total=progress.get("total"),
            counts=progress.get("counts", {}),
            bad=job.meta.get("bad", ()),
            error=job.meta.get("error"),
        )


def _is_campaign(job: Job) -> bool:
    """Whether it is not somebody's other job who has put it into this queue."""
    try:
        return job.func_name == _JOB
    except DeserializationError:
        return False


def _state(job: Job, command: str) -> State:
    status = job.get_status(refresh=False)
    if status in ("failed", "stopped", "canceled"):
        return "cancelled" if command == "cancel" else "failed"
    if status == "finished":
        return "finished"
    if status == "started":
        return "pausing" if command == "pause" else "cancelling" if command else "running"
    if command == "pause":
        return "paused"
    if status == "deferred":
        return "waiting"
    # One that was resumed while it was put away is about to be let go.
    return "scheduled" if status == "scheduled" and not job.meta.get("paused") else "queued"


def queue_name(prefix: str) -> str:
    """RQ's queue for the campaigns of the leanq with this prefix."""
    return f"{prefix}-campaigns"


def _notes(job: Job) -> str:
    return f"{job.origin}:{job.id}"


def note(job: Job, **fields: str) -> None:
    """Writes what is noted beside a campaign's job."""
    key = _notes(job)
    with job.connection.pipeline() as pipe:
        for name, text in fields.items():
            pipe.hset(key, name, text)
        pipe.expire(key, _FAILURE_TTL_S)
        pipe.execute()


def noted(job: Job, name: str) -> str:
    """What is noted beside a campaign's job, or nothing."""
    found: Any = job.connection.hget(_notes(job), name)
    return found.decode() if found else ""
