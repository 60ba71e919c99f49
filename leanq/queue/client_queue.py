"""Calls of a client to one shard: it submits, cancels, asks for requests, and reads its inbox."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from leanq.errors import QueueFullError, UnavailableError
from leanq.queue.connection import RETRY_AFTER_S
from leanq.queue.results import (
    VERSION,
    Became,
    Submission,
    Submitted,
    Unreadable,
    is_record,
    unreadable_of,
)
from leanq.queue.scripts import LARGE_BYTES
from leanq.queue.shard import Shard, new_token, text_of
from leanq.queue.wire import environments_in, info_of

# The fields that requests of one batch share, as the script takes them. The bodies of detached
# requests are too large for a script.
_KIND = ("environment", "priority", "deadline_ms", "run_ms", "affinity", "detached")
_shared = attrgetter("environment", "priority", "deadline_ms", "longest_run_ms", "affinity")
# Each entry holds all replies that one call settled for the client.
_INBOX_ENTRIES = 250
# The most uploads that a client remembers in order to remove them later.
_LEFT_UPLOADS = 4096


class ClientQueue:
    """One shard as a client calls it; ``submit``, ``lookup`` and ``cancel`` may be repeated."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        # Uploads of submits that had no answer, which the server may still hold.
        self._left_uploads = deque[str](maxlen=_LEFT_UPLOADS)

    async def submit(self, client: str, batch: Sequence[Submission]) -> list[Submitted]:
        """Takes requests in and returns the outcome of each. Idempotent by request id.

        Raises:
            QueueFullError: the server is out of memory; nothing of the batch was taken.
        """
        remember = self.shard.reply_ttl_ms if self.shard.settings.remember_s > 0 else 0
        kinds: dict[tuple[object, ...], int] = {}
        requests: list[tuple[str, int, str, str, bytes | int]] = []
        uploads: dict[str, bytes] = {}
        # Each call has a new token, so that no older call can take its uploads.
        call = new_token()
        # A client that goes on trying would otherwise leave megabytes for an hour with each
        # attempt. If the older call is still on its way, it finds its uploads missing and changes
        # nothing.
        await self._remove_left_uploads()
        for item in batch:
            kind, body = (*_shared(item), len(item.body) > LARGE_BYTES), item.body
            if len(body) > LARGE_BYTES:
                uploads[self.shard.keys.upload(call, item.request_id)] = body
                body = b"%d" % len(body)
            number = kinds.setdefault(kind, len(kinds) + 1)
            requests.append((item.request_id, number, item.tenant, item.digest, body))
        try:
            answers = await self.shard.run(
                "submit",
                uploads,
                client=client,
                remember_ms=remember,
                upload=call if uploads else "",
                kinds=[dict(zip(_KIND, kind, strict=True)) for kind in kinds],
                requests=requests,
            )
        except QueueFullError:
            self._left_uploads += uploads
            with contextlib.suppress(UnavailableError):
                await self._remove_left_uploads()
            raise
        except BaseException:
            self._left_uploads += uploads
            raise
        if answers == 0:
            raise QueueFullError(
                "the server has no memory for large requests; try again later", RETRY_AFTER_S
            )
        became: list[Submitted] = [Became.QUEUED] * len(batch)
        for number, answer in zip(answers[::2], answers[1::2], strict=True):
            became[number - 1] = _became(answer) if isinstance(answer, int) else answer
        return became

    async def _remove_left_uploads(self) -> None:
        if left := tuple(self._left_uploads):
            self._left_uploads.clear()
            try:
                await self.shard.ask(("UNLINK", *left))
            except BaseException:
                self._left_uploads += left
                raise

    async def cancel(self, request_ids: Sequence[str]) -> list[bool]:
        """Withdraws requests; returns for each whether that was in time."""
        answers = await self.shard.run("cancel", request_ids=request_ids)
        return [a == 1 for a in answers]

    async def lookup(
        self, client: str, request_ids: Sequence[str]
    ) -> list[bytes | bool | Unreadable]:
        """Returns each request's reply, True while it is in flight, or False if it is unknown.

        A request in flight may also be unreadable to this release. The call attaches ``client`` to
        requests in flight, and expires those that missed their deadline.
        """
        answers = await self.shard.run("lookup", client=client, request_ids=request_ids)
        return [
            a if not isinstance(a, int) else unreadable_of(a) if a < 0 else a > 0 for a in answers
        ]

    async def read_inbox(
        self, client: str, after: str, block_ms: int, *, extend: bool = True
    ) -> tuple[str, list[tuple[str, bytes]]]:
        """Waits for the client's inbox; returns the new position and (request id, reply) pairs.

        If a reply is too large for the inbox, the pair has its size in digits, and the reply waits
        in its request's place. The call drops the entries up to ``after``. Reading again from the
        same position gives the same entries, so an answer lost on the wire loses nothing.

        ``extend``: also extend the inbox's time-to-live. Those who write to the inbox do not.
        """
        inbox = self.shard.keys.of("inbox", client)
        first = [("PEXPIRE", inbox, self.shard.reply_ttl_ms)] if extend else []
        trim = ("XTRIM", inbox, "MINID", _next_id(after))
        read = ("XREAD", "COUNT", _INBOX_ENTRIES, "BLOCK", block_ms, "STREAMS", inbox, after)
        *_, found = await self.shard.block(*first, trim, read, block_s=block_ms / 1000)
        if not found:
            return after, []
        # The answer is a map with one stream, or a list with one pair, by the protocol's version.
        (entries,) = found.values() if isinstance(found, dict) else [found[0][1]]
        pairs: list[tuple[str, bytes]] = []
        for _, fields in entries:
            pairs += zip(map(text_of, fields[::2]), fields[1::2], strict=True)
        return text_of(entries[-1][0]), pairs

    async def drop_inbox(self, client: str) -> None:
        """Removes the inbox of a client that ends."""
        await self.shard.call(lambda c: c.unlink(self.shard.keys.of("inbox", client)))

    async def replies(self, request_ids: Sequence[str]) -> list[bytes | None]:
        """Returns the replies in order, with None for each that does not exist."""
        names = [self.shard.keys.request(request_id) for request_id in request_ids]
        (found,) = await self.shard.ask(("MGET", *names))
        return [None if data is None or is_record(data) else data for data in found]

    async def served(self, *, early: bool = False) -> set[str]:
        """Returns the environments of living workers; clients' users may ask this.

        ``early``: of workers of releases whose records have version 1 or 2.
        """
        tag = self.shard.keys.lasting if early else self.shard.keys.tag
        ((seconds, _),) = await self.shard.ask(("TIME",))
        living, names = await self.shard.ask(
            ("ZCOUNT", f"{tag}:workers", int(seconds) * 1000, "+inf"),
            # The longest leases come first, so the first so many names are the living workers.
            ("ZREVRANGE", f"{tag}:workers", 0, -1),
        )
        # Add one name that no worker has: HMGET without any name is an error.
        (found,) = await self.shard.ask(("HMGET", f"{tag}:info", "", *names[:living]))
        return {name for info in found if info for name in environments_in(info_of(info))}

    async def unread(self, environment: str) -> str:
        """Returns why workers of another release do not take this client's requests; else ""."""
        key = self.shard.keys.of("wait", environment, "left", VERSION)
        (left,) = await self.shard.ask(("LLEN", key))
        own = f"records of version {VERSION}, as this release of leanq writes them"
        if left:
            return f"workers of another release left {left:,} requests with {own}"
        if environment in await self.served(early=True):
            return f"the workers that are alive are of an earlier release, which cannot read {own}"
        return ""


def _became(answer: int) -> Submitted:
    return unreadable_of(answer) if answer < 0 else Became(answer)


def _next_id(position: str) -> str:
    ms, _, number = position.partition("-")
    return f"{ms}-{int(number) + 1}"
