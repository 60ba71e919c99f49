"""Dramatiq: 8 threads (its default), `worker_timeout=2` ms in place of 1,000, which bounds how long
its idle worker sleeps between looks at the queue, `dramatiq_queue_prefetch=200`, its usual
middleware and `Results` with the Redis backend, which blocks until a result is there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

os.environ["dramatiq_queue_prefetch"] = "200"  # noqa: SIM112 - its name, read when imported

import dramatiq
import load
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend


def echo(payload: str) -> str:
    return payload


def _actor(url: str) -> dramatiq.Actor[[str], str]:
    broker = RedisBroker(url=url)
    results = RedisBackend(url=url)
    broker.add_middleware(Results(backend=results, store_results=True, result_ttl=60_000))
    return dramatiq.actor(echo, broker=broker)


def worker(url: str) -> None:
    dramatiq.Worker(_actor(url).broker, worker_threads=8, worker_timeout=2).start()
    signal.pause()


class _Sender:
    def __init__(self, actor: dramatiq.Actor[[str], str]) -> None:
        self._actor = actor

    def send(self, payloads: Sequence[bytes]) -> list[dramatiq.Message[str]]:
        return [self._actor.send(payload.decode()) for payload in payloads]

    def take(self, messages: Sequence[dramatiq.Message[str]]) -> list[bytes]:
        # By way of the broker, since a message looks in the broker that was set for the program.
        backend = self._actor.broker.get_results_backend()
        replies = (backend.get_result(message, block=True, timeout=30_000) for message in messages)
        return [reply.encode() for reply in replies]


@contextmanager
def client(url: str) -> Iterator[_Sender]:
    yield _Sender(_actor(url))


if __name__ == "__main__":
    load.main(worker, load.Windowed(client))
