"""Campaigns as jobs of RQ: submit, list, show, pause, resume, cancel, retry.

A job carries its campaign as JSON. Beside the job, RQ's Redis has a hash ``QUEUE:ID`` with control
fields:

- ``command``: ``pause`` or ``cancel``; empty for a campaign that may run;
- ``started_with``: the fingerprint of the data. The first coordinator to open the journal writes
  it; from then on, results at the campaign's path are its own;
- ``retry``: ``1`` if the rows of these results without a verdict of Lean's have to be checked
  again.

Progress stands in the job's meta, where rq-dashboard shows it; only coordinators write it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any

import redis
import rq
from rq.exceptions import (
    DeserializationError,
    DuplicateJobError,
    InvalidJobOperation,
    NoSuchJobError,
)
from rq.intermediate_queue import IntermediateQueue
from rq.job import Dependency, Job
from rq.registry import BaseRegistry
from rq.serializers import JSONSerializer
from rq.utils import decode_redis_hash

from leanq.campaigns.campaign import Campaign, State
from leanq.campaigns.submitted import SubmittedCampaign
from leanq.errors import UsageError
from leanq.producer.request_builder import DEFAULT_ENVIRONMENT

# Unlimited in practice: on preemptible machines, coordinators die all day.
RETRIES = 1_000_000

DIGEST = "digest"
"""The name in a job's meta of the digest that ``Campaigns.submit_once`` got."""

_RESULT_TTL_S = 30 * 86_400
_FAILURE_TTL_S = 365 * 86_400
_JOB = "leanq.campaigns.rq_job.coordinate"
# The fields of RQ's job that campaigns need.
_JOB_FIELDS = (
    *("data", "origin", "description", "status", "meta", "timeout", "ttl"),
    *("created_at", "enqueued_at", "started_at", "ended_at", "last_heartbeat", "worker_name"),
    *("result_ttl", "failure_ttl", "result", "exc_info", "dependency_ids", "enqueue_at_front"),
    *("retries_left", "retry_intervals", "number_of_retries"),
)
NO_CAMPAIGN = "refused: this job is no campaign, and a campaign worker runs nothing else"

_DEQUEUE_TIMEOUT_S = 10
_ID_PREFIX = "campaign-"


class CampaignError(Exception):
    """Says why a campaign's job ended without results: it was cancelled, or cannot run."""


class CampaignJob(Job):
    """A job that runs a campaign, and nothing else.

    Whoever can write RQ's Redis can write its jobs. So no name in a job's data is imported, neither
    a function nor a callback, and no webhook is sent.
    """

    def restore(self, raw_data: dict[Any, Any]) -> Any:
        fields = decode_redis_hash(raw_data)
        super().restore({name: fields[name] for name in _JOB_FIELDS if name in fields})

    @property
    def func(self) -> Any:
        """The coordinator; raises CampaignError if the job asks for anything else."""
        if not is_campaign(self):
            raise CampaignError(NO_CAMPAIGN)
        return super().func

    @property
    def should_retry(self) -> bool:
        return super().should_retry and is_campaign(self)


class CampaignQueue(rq.Queue):
    """RQ's queue with shorter timeouts. After 10 s, instead of 15 minutes, another worker takes
    over the maintenance of a dead one. After 10 s, instead of a minute, a job is requeued whose
    worker died between dequeuing and starting it."""

    job_class = CampaignJob

    def acquire_maintenance_lock(self) -> bool:
        return bool(self.connection.set(self.registry_cleaning_key, 1, nx=True, ex=10))

    @property
    def intermediate_queue(self) -> IntermediateQueue:
        return _DequeuedJobs(self.key, self.connection)


class _DequeuedJobs(IntermediateQueue):
    """Jobs that a worker has dequeued and not started."""

    def should_be_cleaned_up(self, job_id: str) -> bool:
        seen = self.get_first_seen(job_id)
        return seen is not None and datetime.now(UTC) - seen > timedelta(seconds=_DEQUEUE_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class CampaignStatus(SubmittedCampaign):
    """A submitted campaign with what its owner alone may know.

    Attributes:
        starts_at: when a scheduled campaign starts.
        after: the campaigns that a waiting one waits for.
        resumed: what the last coordinator found done, if it resumed the campaign.
        error: why the campaign failed, or why its next start is delayed.
        digest: the one that ``Campaigns.submit_once`` got.
    """

    campaign: Campaign
    starts_at: datetime | None
    after: Sequence[str]
    resumed: str | None
    error: str | None
    digest: str | None

    def shown(self) -> SubmittedCampaign:
        """Returns the part that callers see, without the places of its files."""
        return SubmittedCampaign(*(getattr(self, each.name) for each in fields(SubmittedCampaign)))


class Campaigns:
    """The campaigns that were submitted to RQ by the leanq with this LEANQ_PREFIX.

    Methods raise UsageError for an unknown campaign or one whose state does not allow the call, and
    redis.RedisError if RQ's server does not answer.
    """

    def __init__(self, connection: redis.Redis, prefix: str) -> None:
        self._connection = connection
        self.queue = CampaignQueue(
            queue_name(prefix), connection=connection, serializer=JSONSerializer
        )

    def submit(self, campaign: Campaign, *, delay_s: float = 0.0, after: Sequence[str] = ()) -> str:
        """Submits a campaign and returns its id. It starts now, after ``delay_s`` seconds, or once
        the campaigns ``after`` have finished."""
        if delay_s and after:
            raise UsageError("a campaign starts at a time or after others, not both")
        id_ = f"{_ID_PREFIX}{secrets.token_hex(4)}"
        how = _job_options(campaign, id_)
        if after:
            how["depends_on"] = Dependency([self._job(other) for other in after])
        if delay_s:
            self.queue.enqueue_in(timedelta(seconds=delay_s), _JOB, **how)
        else:
            self.queue.enqueue(_JOB, **how)
        return id_

    def id_of(self, *names: str) -> str:
        """Returns the id of the campaign that callers know by these names."""
        # All queues of RQ's Redis share one space of ids.
        named = repr((self.queue.name, *names)).encode()
        return f"{_ID_PREFIX}{blake2b(named, digest_size=16).hexdigest()}"

    def submit_once(self, campaign: Campaign, id_: str, digest: str) -> bool:
        """Submits a campaign with this id, to start now; returns False if RQ knows one already.

        ``digest`` is of what was asked for; the campaign's status keeps it.
        """
        how = _job_options(campaign, id_)
        if not self._connection.exists(Job.key_for(id_)):
            # A forgotten campaign's commands are not for the new one of the same id.
            self._connection.delete(_control_key(self.queue.name, id_))
        try:
            self.queue.enqueue(_JOB, unique=True, meta={DIGEST: digest}, **how)
        except DuplicateJobError:
            return False
        return True

    def list(self) -> Iterator[CampaignStatus]:
        """Yields all campaigns that RQ still knows, in no order."""
        ids = {*self.queue.get_job_ids()}
        for name in ("started", "deferred", "scheduled", "finished", "failed", "canceled"):
            # Without cleanup: finding dead jobs is the workers' task.
            ids.update(self._registry(name).get_job_ids(cleanup=False))
        for job in CampaignJob.fetch_many([*ids], self._connection, serializer=JSONSerializer):
            if job is not None and is_campaign(job):
                yield self._status(job)

    def show(self, id_: str) -> CampaignStatus:
        return self._status(self._job(id_))

    def pause(self, id_: str) -> None:
        """Pauses a campaign: withdraws its requests in flight, and keeps its records."""
        job = self._expect(id_, "waiting", "scheduled", "queued", "running")
        write_control(job, command="pause")

    def resume(self, id_: str) -> None:
        write_control(self._expect(id_, "paused", "pausing"), command="")
        self.requeue_resumed(id_)

    def requeue_resumed(self, id_: str) -> None:
        """Requeues a campaign that was resumed while it was being paused.

        Its worker calls this after it has scheduled the paused job. Every idle worker looks for
        such campaigns too, in case that worker has died.
        """
        job = self._job(id_)
        # A campaign that was paused before it started was never moved.
        if job.meta.get("paused") and read_control(job, "command") != "pause":
            with contextlib.suppress(InvalidJobOperation):  # not scheduled yet, or no longer
                self._enqueue(job, self.queue.scheduled_job_registry)

    def requeue_all_resumed(self) -> None:
        for id_ in self.queue.scheduled_job_registry.get_job_ids():
            with contextlib.suppress(UsageError):  # no campaign, or gone
                self.requeue_resumed(id_)

    def cancel(self, id_: str) -> None:
        """Ends a campaign; its journal stays, for ``retry``."""
        job = self._expect(id_, "waiting", "scheduled", "queued", "running", "pausing", "paused")
        write_control(job, command="cancel")
        if not job.is_started:
            job.cancel()

    def retry(self, id_: str) -> None:
        """Runs a campaign again. One that failed or was cancelled resumes from its journal; a
        finished one checks its rows without a verdict of Lean's again."""
        job = self._expect(id_, "failed", "cancelled", "finished")
        for registry in map(self._registry, ("failed", "canceled", "finished")):
            if job.id in registry:
                write_control(job, command="", retry="1")
                self._enqueue(job, registry)
                return
        raise UsageError(f"the campaign {id_} is just ending; try again in a second")

    def _registry(self, name: str) -> BaseRegistry:
        registry: BaseRegistry = getattr(self.queue, f"{name}_job_registry")
        return registry

    def _enqueue(self, job: Job, registry: BaseRegistry) -> None:
        job.retries_left = RETRIES
        # Set and not removed, since RQ does not save an empty meta.
        job.meta |= {"paused": False, "error": None}
        # RQ gives ended jobs a time to live.
        self._connection.persist(job.key)
        registry.requeue(job)

    def _expect(self, id_: str, *states: State) -> Job:
        job = self._job(id_)
        state = self._status(job).state
        if state not in states:
            raise UsageError(f"the campaign {id_} is {state}; expected {', '.join(states)}")
        return job

    def _job(self, id_: str) -> Job:
        try:
            job = CampaignJob.fetch(id_, self._connection, serializer=JSONSerializer)
        except (NoSuchJobError, ValueError):  # no such job, or not even a job's id
            job = None
        if job is None or job.origin != self.queue.name or not is_campaign(job):
            raise UsageError(f"no campaign {id_!r}; 'leanq campaign list' shows all")
        return job

    def _status(self, job: Job) -> CampaignStatus:
        progress = job.meta.get("progress", {})
        state, starts_at, after = _state(job, read_control(job, "command")), None, []
        if state == "scheduled":
            with contextlib.suppress(NoSuchJobError):  # it has just been enqueued
                starts_at = self.queue.scheduled_job_registry.get_scheduled_time(job)
        elif state == "waiting":
            after = [other.id for other in job.fetch_dependencies()]
        campaign = Campaign.of(job.args[0])
        return CampaignStatus(
            id=job.id,
            state=state,
            environment=campaign.plan.options.get("env", DEFAULT_ENVIRONMENT),
            campaign=campaign,
            submitted_at=job.created_at,
            starts_at=starts_at,
            after=after,
            rows=progress.get("rows", 0),
            total=progress.get("total"),
            counts=progress.get("counts", {}),
            bad_rows=job.meta.get("bad_rows", []),
            warnings=job.meta.get("warnings", []),
            resumed=job.meta.get("resumed"),
            error=job.meta.get("error"),
            digest=job.meta.get(DIGEST),
        )


def is_campaign(job: Job) -> bool:
    """Returns whether the job runs a campaign, as far as its data says; imports nothing."""
    try:
        if (job.func_name, job.instance, job.kwargs) != (_JOB, None, {}):
            return False
        (spec,) = job.args
        Campaign.of(spec)
    except (DeserializationError, ValueError, TypeError, KeyError, UsageError):
        return False
    return True


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
    # A campaign that was resumed while it was being paused is about to be requeued.
    return "scheduled" if status == "scheduled" and not job.meta.get("paused") else "queued"


def queue_name(prefix: str) -> str:
    """Returns the name of RQ's queue for the campaigns of the leanq with this prefix."""
    return f"{prefix}-campaigns"


def _job_options(campaign: Campaign, id_: str) -> dict[str, Any]:
    return {
        "args": (campaign.spec(),),
        "job_id": id_,
        "description": f"leanq campaign {campaign.data} > {campaign.out}",
        "retry": rq.Retry(max=RETRIES),
        "job_timeout": -1,
        "result_ttl": _RESULT_TTL_S,
        "failure_ttl": _FAILURE_TTL_S,
    }


def _control_key(queue: str, id_: str) -> str:
    return f"{queue}:{id_}"


def write_control(job: Job, **fields: str) -> None:
    key = _control_key(job.origin, job.id)
    with job.connection.pipeline() as pipe:
        for name, text in fields.items():
            pipe.hset(key, name, text)
        pipe.expire(key, _FAILURE_TTL_S)
        pipe.execute()


def read_control(job: Job, name: str) -> str:
    """Returns a control field of a campaign's job; empty if it is not set."""
    found: Any = job.connection.hget(_control_key(job.origin, job.id), name)
    return found.decode() if found else ""
