"""RQ's forking worker, with the intervals that campaigns need on machines that come and go.

A job's heartbeat expires after 15 seconds, and idle workers look for expired ones every 5. So a
campaign whose machine vanished resumes within half a minute.
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
from rq.exceptions import DeserializationError, StopRequested
from rq.job import Job
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer
from rq.worker import WorkerStatus

from leanq.campaigns.rq_queue import (
    NO_CAMPAIGN,
    CampaignError,
    CampaignJob,
    CampaignQueue,
    Campaigns,
    queue_name,
)
from leanq.lean.sandbox.isolation import die_with_parent

log = logging.getLogger("leanq.campaign")

_HEARTBEAT_S, _HEARTBEATS_MISSED = 5, 3
# RQ waits for jobs by so much less than a worker's time-to-live.
_DEQUEUE_MARGIN_S = 15
_RECONNECT_S, _LISTEN_S = 1.0, 0.5


class CampaignWorker(rq.Worker):
    """Runs campaigns, one at a time, and refuses other jobs."""

    queue_class = CampaignQueue
    max_connection_wait_time = float(_HEARTBEAT_S)

    def __init__(self, connection: redis.Redis, prefix: str, stopping: threading.Event) -> None:
        super().__init__(
            [queue_name(prefix)],
            connection=connection,
            job_class=CampaignJob,
            serializer=JSONSerializer,
            worker_ttl=_DEQUEUE_MARGIN_S + _HEARTBEAT_S,
            job_monitoring_interval=_HEARTBEAT_S,
            maintenance_interval=_HEARTBEAT_S,
        )
        self._stopping = stopping
        self._campaigns = Campaigns(connection, prefix)
        self._listener_stopped = threading.Event()
        self._scheduler = RQScheduler(
            self.queues,
            connection=connection,
            serializer=JSONSerializer,
            logging_level=logging.WARNING,
        )

    def _set_ip_address(self, connection: redis.Redis) -> None:
        """Asks the server for no address: deploy/users.acl denies that, and nothing needs it."""
        self.ip_address = "unknown"

    def get_heartbeat_ttl(self, job: Job) -> int:
        return _HEARTBEAT_S * _HEARTBEATS_MISSED

    def maintain_heartbeats(self, job: Job) -> None:
        with _tolerating_outages():
            super().maintain_heartbeats(job)

    def set_current_job_working_time(
        self, current_job_working_time: float, pipeline: Pipeline | None = None
    ) -> None:
        with _tolerating_outages():
            super().set_current_job_working_time(current_job_working_time, pipeline)

    def run_maintenance_tasks(self) -> None:
        """Also enqueues campaigns that were resumed or are due. RQ's own scheduler process would
        outlive a worker that is killed."""
        super().run_maintenance_tasks()
        self._campaigns.requeue_all_resumed()
        self._scheduler.acquire_locks()
        self._scheduler.enqueue_scheduled_jobs()
        self._scheduler.release_locks()

    def setup_work_horse_signals(self) -> None:
        super().setup_work_horse_signals()
        parent = int(os.environ.get("LEANQ_CAMPAIGN_WORKER", 0))
        # Without its worker a campaign has no heartbeat, and another worker would start it, too.
        die_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    def handle_job_retry(self, job: Job, *args: Any, **how: Any) -> None:
        super().handle_job_retry(job, *args, **how)
        self._campaigns.requeue_resumed(job.id)

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        error = exc_info[1]
        if isinstance(error, CampaignError | DeserializationError):
            refused = isinstance(error, DeserializationError)
            log.warning("%s: %s", job.id, NO_CAMPAIGN if refused else error)
        else:
            super().handle_exception(job, *exc_info)

    def handle_work_horse_killed(self, job: Job, *how: Any) -> None:
        super().handle_work_horse_killed(job, *how)
        # RQ saves the job next, and its coordinator has written its meta since it was read.
        job.get_meta()

    def subscribe(self) -> None:
        # When a worker ends, RQ uses this connection from two threads, which can crash it.
        self.pubsub = self.connection.pubsub()
        self.pubsub.subscribe(**{self.pubsub_channel_name: self.handle_payload})
        listener: Any = self.pubsub.run_in_thread(
            sleep_time=_LISTEN_S, daemon=True, exception_handler=self._listener_failed
        )
        self.pubsub_thread = listener

    def unsubscribe(self) -> None:
        listener: Any = self.pubsub_thread
        if listener:
            listener.stop()
            self._listener_stopped.set()
            # It closes the connection.
            listener.join(timeout=_RECONNECT_S)

    def _listener_failed(self, error: Exception, *_: Any) -> None:
        if not self._listener_stopped.is_set():
            log.warning("RQ's server: %s", error)
            self._listener_stopped.wait(_RECONNECT_S)

    def teardown(self) -> None:
        # First: RQ's own teardown raises if the server is unreachable.
        if not self.is_horse:
            self.unsubscribe()
        super().teardown()

    def heartbeat(self, timeout: int | None = None, pipeline: Pipeline | None = None) -> None:
        # An exception raised by a signal handler is lost in a destructor or a logging call.
        if self._stopping.is_set() and self.get_state() != WorkerStatus.BUSY:
            raise StopRequested
        super().heartbeat(timeout, pipeline)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        self._stopping.set()
        super().request_stop(signum, frame)

    def handle_warm_shutdown_request(self) -> None:
        # A campaign takes hours, and a preempted machine has seconds. The journal is consistent at
        # any moment, and the next coordinator joins the requests in flight.
        if self.horse_pid:
            # RQ would log it as a failure.
            logging.getLogger("rq.worker").setLevel(logging.CRITICAL)
            self.kill_horse(signal.SIGTERM)


def work(connection: redis.Redis, prefix: str, *, burst: bool = False) -> None:
    """Runs campaigns until SIGTERM or SIGINT; with ``burst``, until none is left to start.

    A campaign that runs at the signal is requeued. LEANQ_URL names the queue that campaigns use.
    """
    os.environ["LEANQ_CAMPAIGN_WORKER"] = str(os.getpid())
    logging.getLogger("rq.worker").addFilter(_in_one_line)
    # A signal may interrupt a logging call.
    logging.raiseExceptions = False
    stopping = threading.Event()

    def stop(_signum: int, _frame: FrameType | None) -> None:
        stopping.set()
        raise StopRequested

    with contextlib.suppress(StopRequested):
        while not stopping.is_set():
            # There is nothing to requeue before the worker installs its own handlers, and after it
            # has ended.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, stop)
            with _tolerating_outages():
                worker = CampaignWorker(connection, prefix, stopping)
                try:
                    worker.work(burst=burst, logging_level="WARNING")
                finally:
                    # RQ does not tear down a worker that was still starting.
                    worker.unsubscribe()
                if burst or stopping.is_set():
                    return
            log.warning("RQ's server is unreachable; trying again")
            stopping.wait(_RECONNECT_S)


@contextlib.contextmanager
def _tolerating_outages() -> Iterator[None]:
    """Logs that RQ's server is unreachable, instead of ending the worker and its campaign."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as error:
        log.warning("RQ's server: %s", error)


def _in_one_line(record: logging.LogRecord) -> bool:
    if record.exc_info:
        record.msg, record.args = f"{record.getMessage()} {record.exc_info[1]!r}", ()
        record.exc_info = None
    return True
