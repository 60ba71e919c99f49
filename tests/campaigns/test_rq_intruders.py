"""Whoever can write RQ's Redis runs nothing on campaign workers: a real RQ on a real server."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rq
from rq.command import send_stop_job_command
from rq.job import Job
from rq.serializers import JSONSerializer
from support.campaigns.campaigns import RESUMED_S, Desk
from support.fleets import Recorder, until

from leanq.campaigns.campaign import Campaign
from leanq.campaigns.coordinator import Plan
from leanq.producer.request_builder import Check

# Leaves a trace when it is imported, and when anything of it is called.
WITNESS = """
import os
def trace(*arguments, **named):
    open(os.environ["TRACE"], "a").write("called\\n")
trace()
class Kind:
    trace = staticmethod(trace)
"""
WORKER = """
import sys, redis
sys.path.insert(0, sys.argv[1])
from leanq.campaigns.rq_worker import work
work(redis.Redis.from_url(sys.argv[2]), sys.argv[3], burst=True)
"""


class Intruder:
    """One who can write RQ's Redis, beside a worker whose machine can import ``witness``."""

    def __init__(self, desk: Desk, folder: Path) -> None:
        self.desk, self.folder, self.trace = desk, folder, folder / "trace"
        self.queue = desk.campaigns.queue
        self._prefix = self.queue.name.removesuffix("-campaigns")
        (folder / "witness.py").write_text(WITNESS)
        (folder / "data.jsonl").write_text('{"id": 1, "code": "x"}\n')

    def spec(self, data: str = "data.jsonl") -> dict[str, Any]:
        out = self.folder / f"out{len(list(self.folder.iterdir()))}"
        plan = Plan(Check(env="echo"))
        campaign = Campaign(str(self.folder / data), str(out), plan=plan)
        return dict(json.loads(json.dumps(campaign.spec())))

    def enqueue(self, function: str, *arguments: Any, **how: Any) -> Job:
        plain = rq.Queue(
            self.queue.name, connection=self.desk.connection, serializer=JSONSerializer
        )
        return plain.enqueue(function, *arguments, job_timeout=-1, **how)

    def campaign(self, data: str = "data.jsonl", **fields: str) -> Job:
        """Enqueues a campaign of which a field of the job's is another."""
        job = self.enqueue("leanq.campaigns.rq_job.coordinate", self.spec(data))
        if fields:
            self.desk.connection.hset(job.key, mapping=fields)
        return job

    def start_worker(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WORKER, str(self.folder)]
        command += [self.desk.terminal.environ["LEANQ_URL"], self._prefix]
        environ = os.environ | self.desk.terminal.environ | {"TRACE": str(self.trace)}
        return subprocess.Popen(command, env=environ, text=True, stderr=subprocess.PIPE)

    def work(self) -> str:
        """Has a worker run all that is enqueued; returns what it logged."""
        with self.start_worker() as worker:
            try:
                return worker.communicate(timeout=60)[1]
            finally:
                worker.kill()

    def leave(self) -> None:
        """Removes what RQ keeps."""
        self.desk.connection.delete(*self.desk.connection.scan_iter("rq:*"))


@pytest.fixture
def intruder(desk: Desk, tmp_path: Path) -> Iterator[Intruder]:
    made = Intruder(desk, tmp_path)
    with contextlib.ExitStack() as left:
        left.callback(made.leave)
        yield made


class _Reduced:
    def __reduce__(self) -> Any:
        return os.system, ("echo unpickled >> $TRACE",)


def _os_system(intruder: Intruder) -> Job:
    return intruder.enqueue("os.system", "echo ran >> $TRACE")


def _imported(intruder: Intruder) -> Job:
    return intruder.enqueue("witness.Kind.trace")


def _builtin(intruder: Intruder) -> Job:
    return intruder.enqueue("exec", "import witness")


def _pickled(intruder: Intruder) -> Job:
    job = intruder.campaign()
    intruder.desk.connection.hset(job.key, mapping={"data": pickle.dumps(_Reduced())})
    return job


def _instance(intruder: Intruder) -> Job:
    job = intruder.campaign()
    data = json.dumps(["leanq.campaigns.rq_job.coordinate", "x", [intruder.spec()], {}])
    intruder.desk.connection.hset(job.key, "data", data)
    return job


def _other_arguments(intruder: Intruder) -> Job:
    return intruder.enqueue("leanq.campaigns.rq_job.coordinate", {"data": 1}, 2)


def _retried(intruder: Intruder) -> Job:
    return intruder.enqueue("os.system", "echo ran >> $TRACE", retry=rq.Retry(max=1000))


def _depended_on(intruder: Intruder) -> Job:
    """A job that waits for one that is refused."""
    first = intruder.enqueue("witness.trace")
    depends = rq.job.Dependency([first], allow_failure=True)
    return intruder.enqueue("witness.trace", depends_on=depends)


@pytest.mark.slow
@pytest.mark.parametrize(
    "enqueue",
    [
        _os_system,
        _imported,
        _builtin,
        _pickled,
        _instance,
        _other_arguments,
        _retried,
        _depended_on,
    ],
)
def test_a_job_that_is_no_campaign_is_refused(
    intruder: Intruder, enqueue: Callable[[Intruder], Job]
) -> None:
    job = enqueue(intruder)
    said = intruder.work()
    assert not intruder.trace.exists(), intruder.trace.read_text()
    assert "refused: this job is no campaign" in said
    assert "Traceback" not in said
    assert job.get_status() in ("failed", "deferred")
    assert list(intruder.desk.campaigns.list()) == []


@pytest.mark.slow
def test_no_callback_webhook_or_class_of_a_job_is_used(
    intruder: Intruder, driver: Recorder
) -> None:
    names = ("success_callback_name", "failure_callback_name", "stopped_callback_name")
    fields = dict.fromkeys(names, "witness.trace")
    fields |= dict.fromkeys(("job_class", "queue_class", "serializer"), "witness.Kind")
    # To send it, RQ would connect to a server that the test does not have, and log its failure.
    hook = {"url": "http://127.0.0.1:9/", "job_status": "finished"}
    fields["webhooks"] = json.dumps([hook, hook | {"job_status": "failed"}])
    done = intruder.campaign(**fields)
    failing = intruder.campaign("missing.jsonl", **fields)
    abandoned = intruder.campaign(**fields)
    intruder.queue.remove(abandoned.id)
    intruder.desk.connection.zadd(f"rq:wip:{intruder.queue.name}", {f"{abandoned.id}:x": 1})
    said = intruder.work()
    statuses = [job.get_status() for job in (done, failing, abandoned)]
    assert statuses == ["finished", "failed", "failed"]
    assert not intruder.trace.exists()
    assert "Failed to send webhook" not in said


@pytest.mark.slow
def test_a_campaign_that_is_stopped_calls_nothing(intruder: Intruder, driver: Recorder) -> None:
    (intruder.folder / "data.jsonl").write_text('{"id": 1, "code": "held"}\n')
    job = intruder.campaign(stopped_callback_name="witness.trace")
    with intruder.start_worker() as worker:
        try:
            until(lambda: bool(driver.running), RESUMED_S)
            send_stop_job_command(intruder.desk.connection, job.id, JSONSerializer)
            worker.communicate(timeout=60)
        finally:
            worker.kill()
    driver.let_go()
    assert job.get_status() == "stopped"
    assert not intruder.trace.exists()
