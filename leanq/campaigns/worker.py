"""RQ's forking worker, with the intervals that campaigns need on machines that come and go.

A job's sign of life lasts 15 seconds, and workers with nothing to do look each 5 for jobs without
one, so that a campaign whose machine vanished goes on within half a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import redis
import rq
from redis.client import Pipeline
from rq.exceptions import StopRequested
from rq.job import Job
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer

from ..confine import die_with_parent
from .jobs import CampaignError, CampaignQueue, Campaigns, queue_name

log = logging.getLogger("leanq.campaign")

_LOOK_S, _SIGNS_MISSED = 5, 3
# RQ waits for jobs so much shorter than a worker is known to live.
_DEQUEUE_MARGIN_S = 15
_PAUSE_S = 1.0


class CampaignWorker(rq.Worker):
    """Runs campaigns, one at a time."""

    queue_class = CampaignQueue
    max_connection_wait_time = float(_LOOK_S)

    def __init__(self, connection: redis.Redis, prefix: str) -> None:
        super().__init__(
            [queue_name(prefix)],
            connection=connection,
            serializer=JSONSerializer,
            worker_ttl=_DEQUEUE_MARGIN_S + _LOOK_S,
            job_monitoring_interval=_LOOK_S,
            maintenance_interval=_LOOK_S,
        )
        self.told_to_stop = False
        self._campaigns = Campaigns(connection, prefix)
        self._torn_down = threading.Event()
        self._due = RQScheduler(
            self.queues,
            connection=connection,
            serializer=JSONSerializer,
            logging_level=logging.WARNING,
        )

    def get_heartbeat_ttl(self, job: Job) -> int:
        return _LOOK_S * _SIGNS_MISSED

    def maintain_heartbeats(self, job: Job) -> None:
        with _patience():
            super().maintain_heartbeats(job)

    def set_current_job_working_time(
        self, current_job_working_time: float, pipeline: Pipeline | None = None
    ) -> None:
        with _patience():
            super().set_current_job_working_time(current_job_working_time, pipeline)

    def run_maintenance_tasks(self) -> None:
        """Also puts into the queue what was resumed, or was to begin by now. For the latter RQ has
        a process of its own, which outlives a worker that is killed."""
        super().run_maintenance_tasks()
        self._campaigns.let_all_go()
        self._due.acquire_locks()
        self._due.enqueue_scheduled_jobs()
        self._due.release_locks()

    def setup_work_horse_signals(self) -> None:
        super().setup_work_horse_signals()
        parent = int(os.environ.get("LEANQ_CAMPAIGN_WORKER", 0))
        # Nobody would give signs of life for it, and another would do the same.
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    def handle_job_retry(self, job: Job, *args: Any, **how: Any) -> None:
        super().handle_job_retry(job, *args, **how)
        self._campaigns.let_go(job.id)

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        if isinstance(exc_info[1], CampaignError):
            log.warning("%s: %s", job.id, exc_info[1])
        else:
            super().handle_exception(job, *exc_info)

    def handle_work_horse_killed(self, job: Job, *how: Any) -> None:
        super().handle_work_horse_killed(job, *how)
        # The job is saved next, and its coordinator has written there since it was read.
        job.get_meta()

    def teardown(self) -> None:
        self._torn_down.set()
        try:
            super().teardown()
        finally:
            # RQ forgets it where the server is away, and it would outlive the worker.
            listener: Any = self.pubsub_thread
            if listener:
                listener.stop()
                listener.join(timeout=_PAUSE_S)

    def _pubsub_exception_handler(self, exc: Exception, *_: Any) -> None:
        # RQ would end its thread with a traceback at whatever is no lost connection.
        if not self._torn_down.is_set():
            log.warning("RQ's server: %s", exc)
            self._torn_down.wait(_PAUSE_S)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        self.told_to_stop = True
        super().request_stop(signum, frame)

    def handle_warm_shutdown_request(self) -> None:
        # A campaign takes hours, a machine that is taken away leaves seconds. Its journal is whole
        # at any moment, and what is in flight is waited for by whoever goes on.
        if self.horse_pid:
            # RQ would call it a failure.
            logging.getLogger("rq.worker").setLevel(logging.CRITICAL)
            self.kill_horse(signal.SIGTERM)


def work(connection: redis.Redis, prefix: str, *, burst: bool = False) -> None:
    """Runs campaigns until SIGTERM or SIGINT, or until there is none left to begin.

    A campaign that runs then goes back into the queue. LEANQ_URL names the queue that they use.
    """
    os.environ["LEANQ_CAMPAIGN_WORKER"] = str(os.getpid())
    logging.getLogger("rq.worker").addFilter(_in_one_line)
    with contextlib.suppress(StopRequested):
        while not _has_worked(connection, prefix, burst):
            log.warning("RQ's server is out of reach; trying again")
            time.sleep(_PAUSE_S)


def _has_worked(connection: redis.Redis, prefix: str, burst: bool) -> bool:
    """Whether a worker has come to its end. Raises StopRequested where it was told to."""
    # Until it has handlers of its own, and when it has ended, there is nothing to hand back.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    with _patience():
        worker = CampaignWorker(connection, prefix)
        try:
            worker.work(burst=burst, logging_level="WARNING")
        finally:
            if worker.told_to_stop:
                raise StopRequested
    return burst


def _stop(_signum: int, _frame: FrameType | None) -> None:
    raise StopRequested


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """RQ would quit, and take a campaign down that waits for the server as well."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as error:
        log.warning("RQ's server: %s", error)


def _in_one_line(record: logging.LogRecord) -> bool:
    if record.exc_info:
        record.msg, record.args = f"{record.getMessage()} {record.exc_info[1]!r}", ()
        record.exc_info = None
    return True
