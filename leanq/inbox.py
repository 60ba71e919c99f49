"""A client's inbox: where its replies arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

from .queue import Queue

_BLOCK_MS = 5000
# Large replies are fetched so many bytes at a time, since a call that moves megabytes holds
# everybody up.
_FETCH_BYTES = 512 << 10

Replies = list[tuple[str, bytes]]


class Inbox:
    """The inbox of ``client`` in one shard; reads on from where it was."""

    def __init__(self, queue: Queue, client: str) -> None:
        self._queue = queue
        self._client = client
        self._position = "0-0"

    async def read(self, awaited: Callable[[str], bool]) -> AsyncIterator[Replies]:
        """Waits some seconds for replies, as (rid, bytes); large ones only where ``awaited``.

        Raises UnavailableError; the next read then begins with the same replies.
        """
        reached, pairs = await self._queue.read_inbox(self._client, self._position, _BLOCK_MS)
        yield [pair for pair in pairs if not pair[1].isdigit()]
        large = ((rid, int(size)) for rid, size in pairs if size.isdigit() and awaited(rid))
        for rids in _batches(large):
            replies = await self._queue.replies(rids)
            yield [(rid, data) for rid, data in zip(rids, replies, strict=True) if data]
        # Not before all of it is taken: what is read from here on is dropped up to here.
        self._position = reached


def _batches(large: Iterator[tuple[str, int]]) -> Iterator[list[str]]:
    batch: list[str] = []
    size_bytes = 0
    for rid, more_bytes in large:
        batch.append(rid)
        size_bytes += more_bytes
        if size_bytes >= _FETCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
