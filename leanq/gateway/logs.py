"""Logs what callers do: each change that they make, and each request with a key.

A line has the key's name and the peer's address, and never a secret. Anybody can make a gateway
refuse requests, so it logs a few refusals a minute, and how many it left out.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from starlette.types import Scope

from leanq.gateway.connections import CLIENT_GONE

access = logging.getLogger("leanq.gateway.access")
audit = logging.getLogger("leanq.gateway.audit")

OBJECT = "leanq.object"
"""The name of a request's changes in its state."""

_MINUTE_S = 60.0
_REFUSED = frozenset({401, 403, 429})
_FIRST_ERROR = 400
_UNAUTHORIZED = 401


class Sparing:
    """Lets a few lines of each kind through in a minute, and counts the others."""

    def __init__(
        self, of_kind: int = 10, in_all: int = 300, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._of_kind = of_kind
        self._in_all = in_all
        self._clock = clock
        self._began_s = clock()
        self._passed: Counter[Hashable] = Counter()
        self._left_out = 0

    def admits(self, kind: Hashable) -> bool:
        """Returns True if one more line of this kind may pass."""
        if self._passed.total() < self._in_all and self._passed[kind] < self._of_kind:
            self._passed[kind] += 1
            return True
        self._left_out += 1
        return False

    def left_out(self) -> int:
        """Starts anew once a minute is over; returns how many lines were left out in it."""
        if self._clock() - self._began_s < _MINUTE_S:
            return 0
        self._began_s = self._clock()
        self._passed.clear()
        left_out, self._left_out = self._left_out, 0
        return left_out


class SparingFilter(logging.Filter):
    """Lets a few warnings and errors a minute through from each place in the code."""

    def __init__(self) -> None:
        super().__init__()
        self._sparing = Sparing()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.name == audit.name:
            return True
        if left_out := self._sparing.left_out():
            record.msg = f"{record.getMessage()} (and {left_out} warnings that are not shown)"
            record.args = None
        return self._sparing.admits((record.name, record.lineno))


class CallerLog:
    def __init__(self) -> None:
        self._sparing = Sparing()

    def answered(self, scope: Scope, route: str, status: int, took_s: float) -> None:
        state: Mapping[str, Any] = scope.get("state", {})
        key, peer = state.get("key"), (scope.get("client") or ("",))[0]
        fields: dict[str, Any] = {"key": key.name if key else None, "peer": peer}
        action = _action_of(scope, route, status)
        if status == CLIENT_GONE or not (action or key) or not self._admits(fields, action, status):
            return
        if action:
            result = "ok" if status < _FIRST_ERROR else "failed"
            fields |= {
                "action": action,
                "object": state.get(OBJECT) or dict(scope.get("path_params") or {}),
                "result": "refused" if status in _REFUSED else result,
                "status": status,
            }
            said = f"key {fields['key']!r} from {peer}: {action} {fields['object']}"
            audit.info("%s: %s", said, fields["result"], extra={"fields": fields})
        if access.isEnabledFor(logging.INFO):
            method = scope["method"]
            fields |= {"method": method, "route": route, "status": status}
            fields["took_s"] = round(took_s, 4)
            access.info("%s %s %d", method, route, status, extra={"fields": fields})

    def _admits(self, fields: Mapping[str, Any], action: str | None, status: int) -> bool:
        if left_out := self._sparing.left_out():
            audit.info("%d refusals were not logged", left_out, extra={"fields": {"n": left_out}})
        if status < _FIRST_ERROR:
            return True
        return self._sparing.admits((fields["key"], fields["peer"], action, status))


def _action_of(scope: Scope, route: str, status: int) -> str | None:
    """Returns a word for what a request changes; None if that concerns nobody else."""
    method = scope["method"]
    if status == _UNAUTHORIZED:
        named = any(name == b"authorization" for name, _ in scope["headers"])
        return "wrong key" if named else None
    if method == "POST" and route.startswith("/page/") and route != "/page/check":
        return route.removeprefix("/page/").replace("/", " ")
    if method == "DELETE" and route.startswith("/v1/requests/"):
        return "withdraw"
    return None
