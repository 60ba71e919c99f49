"""Chunks of snapshots in an object store, S3 or GCS.

Credentials, region and endpoint are what the environment says, as for the provider's own tools
(``AWS_…``, ``GOOGLE_…``, a workload identity). Objects are never removed from here: a rule of the
bucket's does that by their age.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from datetime import timedelta

from leanq.errors import UsageError
from leanq.queue.settings import Settings
from leanq.states import CHUNK_BYTES, Blobs

log = logging.getLogger("leanq.blobs")

# A request may wait for a snapshot, and can do without.
_TIMEOUT, _CONNECT_TIMEOUT, _RETRIES = "20s", "3s", 1
_PAUSE_S = 30.0


def open_blobs(settings: Settings) -> Blobs | None:
    """The store that ``LEANQ_BLOBS`` names; None where it names none.

    Raises:
        UsageError: obstore is not installed, or cannot make anything of the URL or the environment.
    """
    if not settings.blobs:
        return None
    if importlib.util.find_spec("obstore") is None:
        raise UsageError("LEANQ_BLOBS needs obstore; pip install 'leanq[blobs]'")
    return ObjectStore(settings.blobs)


class ObjectStore:
    """One bucket, below a prefix; see :class:`leanq.states.Blobs`.

    After a failure it is left alone for half a minute, so that no request waits for it again and
    again.

    Args:
        url: ``s3://BUCKET/PREFIX`` or ``gs://BUCKET/PREFIX``.
    """

    def __init__(self, url: str) -> None:
        import obstore.store
        from obstore.exceptions import BaseError

        try:
            self._store = obstore.store.from_url(
                url,
                # An endpoint with http:// is the operator's choice; bytes are compared with hashes.
                client_options={
                    "timeout": _TIMEOUT,
                    "connect_timeout": _CONNECT_TIMEOUT,
                    "allow_http": True,
                },
                retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=10)},
            )
        except (BaseError, ValueError) as error:
            raise UsageError(f"LEANQ_BLOBS={url}: {_first_line(error)}") from None
        self._url = url
        self._paused_until_s = 0.0

    async def put(self, digest: str, chunk: bytes) -> None:
        from obstore.exceptions import BaseError

        self._check()
        try:
            await self._store.put_async(_name(digest), chunk)
        except (BaseError, OSError) as error:
            raise self._failed(error) from None

    async def get(self, digest: str) -> bytes | None:
        from obstore.exceptions import BaseError, NotFoundError

        self._check()
        try:
            found = await self._store.get_async(_name(digest))
            # What is larger was not written by a worker, and may fill the memory.
            if found.meta["size"] > CHUNK_BYTES:
                return b""
            return bytes(await found.bytes_async())
        except (NotFoundError, FileNotFoundError):
            return None
        except (BaseError, OSError) as error:
            raise self._failed(error) from None

    def _check(self) -> None:
        if time.monotonic() < self._paused_until_s:
            raise ConnectionError(f"{self._url} failed a moment ago")

    def _failed(self, error: Exception) -> ConnectionError:
        self._paused_until_s = time.monotonic() + _PAUSE_S
        text = f"{self._url} does not answer: {_first_line(error)}"
        log.warning("%s; its snapshots are replayed for %.0f s", text, _PAUSE_S)
        return ConnectionError(text)


def _name(digest: str) -> str:
    return f"chunk/{digest}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
