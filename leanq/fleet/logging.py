"""Logs lines for people, or JSON that names the request of each line."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar

import msgspec
from msgspec import Struct


class About(Struct, frozen=True, omit_defaults=True):
    """The attempt at a request that log lines are about; ``traceparent`` is "" if the client gave
    none."""

    request_id: str
    attempt: int
    worker: str
    environment: str
    traceparent: str = ""


ABOUT: ContextVar[About | None] = ContextVar("leanq_about", default=None)
"""The attempt that a task's log lines are about."""

requests = logging.getLogger("leanq.request")
"""Logs a line for each request that a worker has run, except echoes."""


def log_to_stderr(as_json: bool) -> None:
    """Logs to standard error, as JSON lines or for people.

    People do not get a line for each request.
    """
    handler = logging.StreamHandler()
    if as_json:
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        requests.setLevel(logging.WARNING)
    logger = logging.getLogger("leanq")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


class JsonLines(logging.Formatter):
    """Formats one object a line: ``time`` (seconds since 1970), ``level``, ``message``, the task's
    attempt, and the call's own fields (``extra={"fields": …}``)."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.time(),
            "level": record.levelname,
            "message": record.getMessage(),
            **msgspec.to_builtins(ABOUT.get() or {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
