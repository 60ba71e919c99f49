"""The bodies of leanq's own interface as requests to the queue."""

from __future__ import annotations

from typing import Any, cast

from leanq.gateway import v1_models as models
from leanq.gateway.access import Access
from leanq.gateway.keys import Key
from leanq.producer.request_builder import (
    Check,
    InEnvironment,
    PreparedRequest,
    RequestBuilder,
)

_SAME = (
    *("timeout_s", "memory_mb", "scratch_mb", "allow_axioms", "audit", "trust_programs"),
    *("priority", "deadline_s"),
)


def prepared_of(
    body: models.Body, key: Key, access: Access, builder: RequestBuilder
) -> PreparedRequest[Any]:
    """The request that a body asks for, on behalf of the key's tenant.

    Raises:
        UsageError: a malformed field, or a state that the tenant was not given.
        HTTPException: an environment that the key may not use.
    """
    options = cast("Check", {name: getattr(body, name) for name in _SAME})
    if body.traceparent is not None:
        options["traceparent"] = body.traceparent
    if isinstance(body, models.Step):
        how: Check = {**options, **options_in(key, access, body.environment)}
        return builder.step(access.state(key, body.state), body.tactic, how)
    env = access.environment(key, body.environment)
    how = {**options, "tenant": key.tenant, "env": env}
    if isinstance(body, models.Verify):
        return builder.verify(body.target, body.code, body.theorems, body.holes, how)
    return builder.check(body.code, how)


def options_in(key: Key, access: Access, environment: str | None) -> InEnvironment:
    """Options of what is about a state, whose environment is looked up where none is named and the
    key allows all.

    Raises:
        HTTPException: an environment that the key may not use.
    """
    options = InEnvironment(tenant=key.tenant)
    if environment is not None or key.environments:
        options["env"] = access.environment(key, environment)
    return options
