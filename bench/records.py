"""Measures what a process pays to write and read the records of the wire; see README.md."""

from __future__ import annotations

import timeit
from collections.abc import Callable

from leanq.queue.requests import Message, Reply, Request
from leanq.queue.wire import pack_reply, pack_request, unpack_reply, unpack_request

_CALLS, _ROUNDS = 2_000, 25
_GOAL = "unsolved goals\ncase inl\np q : Prop\nh : p\n⊢ q ∨ p"
_REQUESTS = {
    "check of 380 characters": Request("check", "theorem t (p : Prop) (h : p) : p := h\n" * 10),
    "echo of 100 bytes": Request("echo", payload=bytes(100)),
}
_ACCEPTED = Reply("accepted", axioms=(), fingerprint="f" * 64, worker="w", attempts=1, wall_s=0.2)
_REPLIES = {
    "reply `accepted`": _ACCEPTED,
    "reply with 20 messages": Reply(
        "rejected", tuple(Message("error", n, 2, _GOAL, n, 9) for n in range(20)), worker="w"
    ),
}


def _least_us(call: Callable[[], object]) -> float:
    """Returns the least time, since other programs can only make a call slower."""
    return min(timeit.repeat(call, number=_CALLS, repeat=_ROUNDS)) / _CALLS * 1e6


def _print(name: str, data: bytes, pack: Callable[[], object], read: Callable[[], object]) -> None:
    print(f"| {name} | {len(data)} B | {_least_us(pack):.1f} µs | {_least_us(read):.1f} µs |")


def main() -> None:
    print("| record | size | written | read |\n| --- | --- | --- | --- |")
    for name, request in _REQUESTS.items():
        body = pack_request(request)
        _print(name, body, lambda r=request: pack_request(r), lambda b=body: unpack_request(b))
    for name, reply in _REPLIES.items():
        data = pack_reply("token", reply)
        _print(
            name,
            data,
            lambda r=reply: pack_reply("token", r),
            lambda d=data: unpack_reply("request", d),
        )


if __name__ == "__main__":
    main()
