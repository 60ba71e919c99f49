"""Celery: `--pool solo` (no slower than prefork or threads on requests that do nothing), prefetch
without limit, no gossip, mingle, heartbeat or events, JSON; results by the Redis backend, which
tells the client by publish and subscribe. Early acknowledgement, as is its default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import load
from celery import Celery
from celery.result import AsyncResult


def echo(payload: str) -> str:
    return payload


def _app(url: str) -> Celery:
    app = Celery("bench", broker=url, backend=url)
    app.conf.update(
        worker_prefetch_multiplier=0,
        result_expires=60,
        worker_send_task_events=False,
        broker_connection_retry_on_startup=True,
    )
    app.task(echo, name="echo")
    return app


def worker(url: str) -> None:
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "ERROR"]
    _app(url).worker_main(["worker", "--pool", "solo", *quiet])


class _Sender:
    def __init__(self, app: Celery) -> None:
        self._task = app.tasks["echo"]

    def send(self, payloads: Sequence[bytes]) -> list[AsyncResult]:
        return [self._task.apply_async((payload.decode(),)) for payload in payloads]

    def take(self, results: Sequence[AsyncResult]) -> list[bytes]:
        return [result.get(timeout=30).encode() for result in results]


@contextmanager
def client(url: str) -> Iterator[_Sender]:
    yield _Sender(_app(url))


if __name__ == "__main__":
    load.main(worker, load.Windowed(client))
