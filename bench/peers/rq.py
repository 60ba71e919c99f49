"""RQ: `SimpleWorker`, which does not fork per request as its default does; `enqueue_many` by 20;
pickle, its default; results by `Job.latest_result`, which blocks until one is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import load
from redis import Redis
from rq import Queue, SimpleWorker
from rq.job import Job


def echo(payload: bytes) -> bytes:
    return payload


def worker(url: str) -> None:
    connection = Redis.from_url(url, socket_timeout=None)
    SimpleWorker([Queue(connection=connection)], connection=connection).work(logging_level="ERROR")


class _Sender:
    def __init__(self, connection: Redis) -> None:
        self._queue = Queue(connection=connection)

    def send(self, payloads: Sequence[bytes]) -> list[Job]:
        return self._queue.enqueue_many(
            Queue.prepare_data("peers.rq.echo", (payload,), result_ttl=60) for payload in payloads
        )

    def take(self, jobs: Sequence[Job]) -> list[bytes]:
        results = (job.latest_result(timeout=30) for job in jobs)
        return [bytes(result.return_value) for result in results if result]


@contextmanager
def client(url: str) -> Iterator[_Sender]:
    with Redis.from_url(url, socket_timeout=None) as connection:
        yield _Sender(connection)


if __name__ == "__main__":
    load.main(worker, load.Windowed(client, chunk=20))
