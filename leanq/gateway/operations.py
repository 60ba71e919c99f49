"""The bodies of leanq's own interface as requests to the queue."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, cast

from fastapi import HTTPException

from leanq.gateway import v1_models as models
from leanq.gateway.access import Access
from leanq.gateway.client import GatewayClient
from leanq.gateway.keys import Key
from leanq.producer.request_builder import (
    Check,
    InEnvironment,
    PreparedRequest,
)

_SAME = (
    *("timeout_s", "memory_mb", "scratch_mb", "allow_axioms", "audit", "trust_programs"),
    *("priority", "deadline_s"),
)
_chosen = attrgetter(*(name for name in _SAME if name != "allow_axioms"), "traceparent")


async def prepared_of(
    body: models.Body, key: Key, access: Access, lean: GatewayClient
) -> PreparedRequest[Any]:
    """The request that a body asks for, on behalf of the key's tenant.

    Raises:
        UsageError: a malformed field, or a state that the tenant was not given.
        UnavailableError: as of :func:`options_of_state`.
        HTTPException: an environment that the key may not use.
    """
    if not isinstance(body, models.Step):
        return prepared_text(body, key, access, lean)
    state = access.state(key, body.state)
    where = await options_of_state(state, key, access, lean, body.environment)
    return lean.builder.step(state, body.tactic, {**_options_of(body), **where})


def _options_of(body: models.Options) -> Check:
    options = cast("Check", {name: getattr(body, name) for name in _SAME})
    if body.traceparent is not None:
        options["traceparent"] = body.traceparent
    return options


def prepared_text(
    body: models.Check | models.Verify, key: Key, access: Access, lean: GatewayClient
) -> PreparedRequest[Any]:
    """The same for what needs no look at the queue before it; raises as :func:`prepared_of`."""
    env = access.environment(key, body.environment)
    where: Check = {"tenant": key.tenant, "env": env}
    if isinstance(body, models.Verify):
        how: Check = {**_options_of(body), **where}
        return lean.builder.verify(body.target, body.code, body.theorems, body.holes, how)
    # Of each text of a batch, and cheaper than its options.
    chosen = (key.tenant, env, body.infotree, *_chosen(body), *body.allow_axioms)
    checks = lean.checks(chosen, lambda: {**_options_of(body), **where, "infotree": body.infotree})
    return checks(body.code)


def options_in(key: Key, access: Access, environment: str | None) -> InEnvironment:
    """Options of what goes to one environment.

    Raises:
        HTTPException: an environment that the key may not use.
    """
    return InEnvironment(tenant=key.tenant, env=access.environment(key, environment))


async def options_of_state(
    state: str, key: Key, access: Access, lean: GatewayClient, environment: str | None
) -> InEnvironment:
    """Options of what is about a state, which goes to the state's environment unless one is named.

    Where the key does not allow all environments, the state has to be of one that it allows:
    another key of the tenant may have made it, and a worker exports any state it is asked for.

    Raises:
        HTTPException: an environment that the key may not use, named or the state's.
        UnknownStateError: the queue does not know the state; asked where the key is limited.
        UnavailableError: the queue cannot be asked for it.
    """
    options = InEnvironment(tenant=key.tenant)
    if environment is not None:
        options["env"] = access.environment(key, environment)
    if key.environments:
        of_state = await lean.environments_of(state)
        if environment not in of_state:
            allowed = [each for each in key.environments if each in of_state]
            if environment is not None or not allowed:
                raise HTTPException(403, "the state is of an environment that the key may not use")
            options["env"] = allowed[0]
    return options
