"""How programs inside a Ray cluster find the queue: by a note that its scaler leaves at Ray's head.

Whoever can connect to a Ray cluster may run programs there as its user. So this note, with the
password in it, tells them nothing that they could not read anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from leanq.errors import UnavailableError

_NAMESPACE = b"leanq"


def publish(variables: Mapping[str, str]) -> None:
    """Leaves the queue's ``LEANQ_…`` variables at Ray's head; raises UnavailableError."""
    _call("_internal_kv_put", _key(variables), msgspec.json.encode(variables))


def published(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that were left for the prefix in ``environ``; without Ray, none.

    A process counts as part of a Ray cluster once it has imported and initialised Ray. Raises
    UnavailableError if Ray's head does not answer.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    from multiprocessing import parent_process

    # A fork shares its parent's connection to Ray, and a call there would break it for both.
    if parent_process() is not None:
        return {}
    found = _call("_internal_kv_get", _key(environ))
    return msgspec.json.decode(found, type=dict[str, str]) if found else {}


def _key(environ: Mapping[str, str]) -> bytes:
    return environ.get("LEANQ_PREFIX", "leanq").encode()


def _call(function: str, *arguments: bytes) -> bytes | None:
    from ray.exceptions import RayError
    from ray.experimental import internal_kv

    try:
        called = getattr(internal_kv, function)(*arguments, namespace=_NAMESPACE)
    except RayError as error:
        raise UnavailableError(f"Ray's head does not answer: {error}") from None
    return called if isinstance(called, bytes) else None
