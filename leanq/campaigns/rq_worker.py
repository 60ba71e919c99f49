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
from rq.worker import WorkerStatus

from leanq.campaigns.rq_queue import CampaignError, CampaignQueue, Campaigns, queue_name
from leanq.lean.sandbox.isolation import die_with_parent

log = logging.getLogger("leanq.campaign")

_LOOK_S, _SIGNS_MISSED = 5, 3
# RQ waits for jobs so much shorter than a worker is known to live.
_DEQUEUE_MARGIN_S = 15
_PAUSE_S, _LISTEN_S = 1.0, 0.5


class CampaignWorker(rq.Worker):
    """Runs campaigns, one at a time."""

    queue_class = CampaignQueue
    max_connection_wait_time = float(_LOOK_S)

    def __init__(self, connection: redis.Redis, prefix: str, told_to_stop: threading.Event) -> None:
        super().__init__(
            [queue_name(prefix)],
            connection=connection,
            serializer=JSONSerializer,
            worker_ttl=_DEQUEUE_MARGIN_S + _LOOK_S,
            job_monitoring_interval=_LOOK_S,
            maintenance_interval=_LOOK_S,
        )
        self._told_to_stop = told_to_stop
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

    def subscribe(self) -> None:
        # RQ lets two threads use this connection, when the worker ends; that can crash it.
        self.pubsub = self.connection.pubsub()
        self.pubsub.subscribe(**{self.pubsub_channel_name: self.handle_payload})
        listener: Any = self.pubsub.run_in_thread(
            sleep_time=_LISTEN_S, daemon=True, exception_handler=self._not_heard
        )
        self.pubsub_thread = listener

    def unsubscribe(self) -> None:
        listener: Any = self.pubsub_thread
        if listener:
            listener.stop()
            self._torn_down.set()
            # It closes the connection.
            listener.join(timeout=_PAUSE_S)

    def _not_heard(self, error: Exception, *_: Any) -> None:
        if not self._torn_down.is_set():
            log.warning("RQ's server: %s", error)
            self._torn_down.wait(_PAUSE_S)

    def teardown(self) -> None:
        # First, as where the server is away nothing else is done.
        if not self.is_horse:
            self.unsubscribe()
        super().teardown()

    def heartbeat(self, timeout: int | None = None, pipeline: Pipeline | None = None) -> None:
        # What a signal raises is lost where that comes amid a destructor or a line of the log.
        if self._told_to_stop.is_set() and self.get_state() != WorkerStatus.BUSY:
            raise StopRequested
        super().heartbeat(timeout, pipeline)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        self._told_to_stop.set()
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
    # A signal may come amid a line.
    logging.raiseExceptions = False
    told_to_stop = threading.Event()

    def stop(_signum: int, _frame: FrameType | None) -> None:
        told_to_stop.set()
        raise StopRequested

    with contextlib.suppress(StopRequested):
        while not told_to_stop.is_set():
            # Until a worker has handlers of its own, and when it has ended, there is nothing to
            # hand back.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, stop)
            with _patience():
                worker = CampaignWorker(connection, prefix, told_to_stop)
                try:
                    worker.work(burst=burst, logging_level="WARNING")
                finally:
                    # RQ tears down no worker that was still about to begin.
                    worker.unsubscribe()
                if burst or told_to_stop.is_set():
                    return
            log.warning("RQ's server is out of reach; trying again")
            told_to_stop.wait(_PAUSE_S)


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
