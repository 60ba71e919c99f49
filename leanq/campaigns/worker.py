"""RQ's forking worker, with the intervals that campaigns need on machines that come and go.

A job's sign of life lasts 15 seconds, and workers with nothing to do look each 5 for jobs without
one, so that a campaign whose machine vanished goes on within half a minute.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from types import FrameType

import redis
import rq
from rq.job import Job
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer

from ..confine import die_with_parent
from .jobs import QUEUE, CampaignQueue

log = logging.getLogger("leanq.campaign")

_LOOK_S, _SIGNS_MISSED = 5, 3
# RQ waits for jobs so much shorter than a worker is known to live.
_DEQUEUE_MARGIN_S = 15
_PAUSE_S = 1.0


class CampaignWorker(rq.Worker):
    """Runs campaigns, one at a time."""

    queue_class = CampaignQueue
    max_connection_wait_time = float(_LOOK_S)

    def __init__(self, connection: redis.Redis) -> None:
        super().__init__(
            [QUEUE],
            connection=connection,
            serializer=JSONSerializer,
            worker_ttl=_DEQUEUE_MARGIN_S + _LOOK_S,
            job_monitoring_interval=_LOOK_S,
            maintenance_interval=_LOOK_S,
        )
        self.told_to_stop = False
        self._due = RQScheduler(
            self.queues,
            connection=connection,
            serializer=JSONSerializer,
            logging_level=logging.WARNING,
        )

    def get_heartbeat_ttl(self, job: Job) -> int:
        return _LOOK_S * _SIGNS_MISSED

    def maintain_heartbeats(self, job: Job) -> None:
        try:
            super().maintain_heartbeats(job)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            # RQ would quit, and take a campaign down that waits for the server as well.
            log.warning("RQ's server: %s", error)

    def run_maintenance_tasks(self) -> None:
        """Also puts into the queue what was to begin by now. RQ has a process of its own for that,
        which outlives a worker that is killed."""
        super().run_maintenance_tasks()
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

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        self.told_to_stop = True
        super().request_stop(signum, frame)

    def handle_warm_shutdown_request(self) -> None:
        # A campaign takes hours, a machine that is taken away leaves seconds. Its journal is whole
        # at any moment, and what is in flight is waited for by whoever goes on.
        if self.horse_pid:
            self.kill_horse(signal.SIGTERM)


def work(connection: redis.Redis, *, burst: bool = False) -> None:
    """Runs campaigns until SIGTERM or SIGINT, or until there is none left to begin.

    A campaign that runs then goes back into the queue. LEANQ_URL names the queue that they use.
    """
    os.environ["LEANQ_CAMPAIGN_WORKER"] = str(os.getpid())
    while True:
        stopped = False
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            worker = CampaignWorker(connection)
            try:
                worker.work(burst=burst, logging_level="WARNING")
            finally:
                stopped = worker.told_to_stop
            if burst:
                return
        if stopped:
            return
        log.warning("RQ's server is out of reach; trying again")
        time.sleep(_PAUSE_S)
