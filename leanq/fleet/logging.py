"""What a process logs: lines for people, or JSON that names the request which it is about."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar

import msgspec
from msgspec import Struct


class About(Struct, frozen=True, omit_defaults=True):
    """The attempt at a request that lines are about; ``traceparent``: "" where the client gave
    none."""

    request_id: str
    attempt: int
    worker: str
    environment: str
    traceparent: str = ""


ABOUT: ContextVar[About | None] = ContextVar("leanq_about", default=None)
"""What all that a task logs is about."""

requests = logging.getLogger("leanq.request")
"""A line for each request that a worker has run, echoes left out."""


def log_to_stderr(as_json: bool) -> None:
    """What this process has to say goes to standard error, as JSON lines or for people.

    People are not told of each request.
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
    """One object a line: ``time`` (seconds since 1970), ``level``, ``message``, what the task is
    about, and what the call says beside its text (``extra={"fields": …}``)."""

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
