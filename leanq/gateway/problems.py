"""Errors of leanq's own interface, as problem details (RFC 9457)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from leanq.errors import (
    ClosedError,
    ConflictError,
    LeanQError,
    LostError,
    NotPermittedError,
    QueueError,
    QueueFullError,
    RequestError,
    TooLargeError,
    UnavailableError,
    UnknownEnvironmentError,
    UnknownStateError,
    UsageError,
)

log = logging.getLogger("leanq.gateway")

# The first type that fits counts.
_STATUS: tuple[tuple[type[LeanQError], int], ...] = (
    (QueueFullError, 429),
    (LostError, 404),
    (QueueError, 503),
    (ClosedError, 503),
    (UnknownStateError, 404),
    (UnknownEnvironmentError, 404),
    (TooLargeError, 413),
    (ConflictError, 409),
    (UsageError, 422),
    (RequestError, 422),
)
_RETRY_AFTER_S = 5.0
# The detail may repeat the caller's input, which may be anything.
_LONGEST_WORDS = 1000


def problem_of(error: Exception) -> dict[str, Any]:
    """Returns the problem of an error, in values that JSON has.

    ``type`` is ``urn:leanq:`` and the error's name for leanq's own errors. Malformed input has a
    list ``errors``, each with its place ``loc`` and ``msg``.
    """
    if isinstance(error, LeanQError):
        name = type(error).__name__.removesuffix("Error")
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        detail = str(error)
        if isinstance(error, NotPermittedError):
            # The operator has to fix this; it does not pass by itself.
            log.error("%s", error)
            status, detail = 500, f"the gateway may not do that at its queue: {error.right}"
        elif isinstance(error, UnavailableError):
            # Callers need not know the server's address or the gateway's user.
            log.warning("%s", error)
            detail = "the gateway cannot reach its queue; its log says why"
        return _problem(status, detail, type=f"urn:leanq:{words.replace(' ', '-')}", title=words)
    if isinstance(error, RequestValidationError):
        # Leave out the input, which may be anything.
        errors = [
            {"loc": each["loc"], "msg": each["msg"][:_LONGEST_WORDS]} for each in error.errors()
        ]
        where = "/".join(map(str, errors[0]["loc"]))
        detail = f"{where}: {errors[0]['msg']}"
        return _problem(422, detail, errors=errors, type="urn:leanq:malformed", title="malformed")
    assert isinstance(error, HTTPException)
    return _problem(error.status_code, str(error.detail))


def response_of(error: Exception) -> Response:
    """Returns the answer to a request that ended with an error."""
    problem = problem_of(error)
    headers = dict(getattr(error, "headers", None) or {})
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    elif problem["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.setdefault("Retry-After", f"{_RETRY_AFTER_S:g}")
    return Response(
        json.dumps(problem), problem["status"], headers, media_type="application/problem+json"
    )


def _problem(status: int, detail: str, **fields: Any) -> dict[str, Any]:
    plain: Mapping[str, Any] = {"type": "about:blank", "title": HTTPStatus(status).phrase}
    return {**plain, **fields, "status": status, "detail": detail[:_LONGEST_WORDS]}
