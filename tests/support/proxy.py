"""A proxy before a server, which cuts or stalls a connection at a chosen call, or silences all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from leanq.queue.scripts import script_text
from leanq.queue.settings import Settings

How = Literal["before", "after", "stall"]
"""Cut before the server sees the call; after it did, before its answer; or let no answer through
on a connection that stays open."""


@dataclass
class Cut:
    """The next call that contains ``marker`` is cut."""

    marker: bytes
    how: How
    happened: bool = False


def marker_of(call: str) -> bytes:
    """What a call of this script, or of this command, has in its bytes."""
    if call.isupper():
        return call.encode()
    return hashlib.sha1(script_text(call).encode()).hexdigest().encode()


class Proxy:
    """Listens on a Unix socket; every connection leads to the server's."""

    def __init__(self, upstream: Path, place: Path) -> None:
        self.place = place
        self.cuts: list[Cut] = []
        self._upstream = upstream
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self.silent = False
        # Who connects while this is not set gets no answer until it is.
        self.lets_in = asyncio.Event()
        self.lets_in.set()

    @property
    def connections(self) -> int:
        return len(self._open)

    def cut(self, call: str, how: How) -> Cut:
        made = Cut(marker_of(call), how)
        self.cuts.append(made)
        return made

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._open[task] = writer
        try:
            await self.lets_in.wait()
            up_reader, up_writer = await asyncio.open_unix_connection(str(self._upstream))
            await self._connect(reader, writer, up_reader, up_writer)
        finally:
            del self._open[task]

    async def _connect(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        up_reader: asyncio.StreamReader,
        up_writer: asyncio.StreamWriter,
    ) -> None:
        cut: Cut | None = None
        # What was held back once would be missing from an answer later.
        silenced = False

        async def requests() -> None:
            nonlocal cut
            while data := await reader.read(1 << 20):
                # A call of these tests fits into what is read at once.
                cut = next((c for c in self.cuts if c.marker in data and not c.happened), cut)
                if cut and not cut.happened:
                    cut.happened = True
                    if cut.how == "before":
                        return
                up_writer.write(data)

        async def answers() -> None:
            nonlocal silenced
            while data := await up_reader.read(1 << 20):
                if cut and cut.how == "after":
                    return
                silenced = silenced or self.silent
                if not cut and not silenced:
                    writer.write(data)

        consumers = [asyncio.create_task(requests()), asyncio.create_task(answers())]
        try:
            await asyncio.wait(consumers, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for consumer in consumers:
                consumer.cancel()
            await asyncio.gather(*consumers, return_exceptions=True)
            for end in (writer, up_writer):
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def close(self) -> None:
        for writer in self._open.values():
            writer.close()
        await asyncio.gather(*self._open)


@contextlib.contextmanager
def proxy_in_thread(upstream: Path, place: Path) -> Iterator[Proxy]:
    """A proxy for other processes; connections end with the block."""
    made, listens, over = Proxy(upstream, place), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = await asyncio.start_unix_server(made.serve, place)
        listens.set()
        await over.wait()
        server.close()
        await made.close()

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert listens.wait(60.0), f"no proxy at {place}"
        yield made
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(60.0)


@contextlib.asynccontextmanager
async def proxy(settings: Settings, folder: Path) -> AsyncIterator[tuple[Settings, Proxy]]:
    """The same queue, reached through a proxy."""
    made = Proxy(Path(urlsplit(settings.url).path), folder / "proxy.sock")
    server = await asyncio.start_unix_server(made.serve, made.place)
    try:
        url = settings.url.replace(urlsplit(settings.url).path, str(made.place))
        yield replace(settings, url=url), made
    finally:
        server.close()
        await made.close()
