"""Turns the bodies of leanq's own interface into requests to the queue."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, cast

from fastapi import HTTPException

from leanq.gateway.access import Access
from leanq.gateway.client import GatewayClient
from leanq.gateway.keys import Key
from leanq.gateway.v1_bodies import OF_CHECKS, OPTIONS, Step, Verify
from leanq.producer.request_builder import (
    Check,
    InEnvironment,
    PreparedRequest,
)

_chosen = attrgetter(*(name for name in (*OPTIONS, *OF_CHECKS) if name != "allow_axioms"))


async def prepared_of(
    body: Any, key: Key, access: Access, lean: GatewayClient
) -> PreparedRequest[Any]:
    """Returns the request that a body asks for, on behalf of the key's tenant.

    Raises UsageError for a malformed field; else as ``options_of_state``.
    """
    if not isinstance(body, Step):
        return prepared_text(body, key, access, lean)
    state = access.state(key, body.state)
    where = await options_of_state(state, key, access, lean, body.environment)
    return lean.builder.step(state, body.tactic, {**_options_of(body), **where})


def _options_of(body: Any, *more: str) -> Check:
    return cast("Check", {name: getattr(body, name) for name in (*OPTIONS, *more)})


def prepared_text(body: Any, key: Key, access: Access, lean: GatewayClient) -> PreparedRequest[Any]:
    """Does the same for bodies that need no look at the queue; raises as ``prepared_of``."""
    env = access.environment(key, body.environment)
    where: Check = {"tenant": key.tenant, "env": env}
    if isinstance(body, Verify):
        how: Check = {**_options_of(body, "goals"), **where}
        return lean.builder.verify(body.target, body.code, body.theorems, body.holes, how)
    # This key is made for each text of a batch, and is cheaper than its options.
    chosen = (key.tenant, env, *_chosen(body), *body.allow_axioms)
    checks = lean.checks(chosen, lambda: {**_options_of(body, *OF_CHECKS), **where})
    return checks(body.code)


def options_in(key: Key, access: Access, environment: str | None) -> InEnvironment:
    """Returns the options in an environment; raises HTTPException (403) if it is forbidden."""
    return InEnvironment(tenant=key.tenant, env=access.environment(key, environment))


async def options_of_state(
    state: str, key: Key, access: Access, lean: GatewayClient, environment: str | None
) -> InEnvironment:
    """Returns the options of a request about a state, which runs in its environment by default.

    If the key allows some environments only, the state must be of one of them: another key of the
    tenant may have made it, and a worker exports any state on request. Raises HTTPException (403)
    for others, UnknownStateError for unknown states of such keys, and UnavailableError.
    """
    options = InEnvironment(tenant=key.tenant)
    if environment is not None:
        options["env"] = access.environment(key, environment)
    if key.environments:
        of_state = await lean.environments_of(state)
        named = [options["env"]] if "env" in options else key.environments
        allowed = [each for each in named if each in of_state]
        if not allowed:
            raise HTTPException(403, "the state is of an environment that the key may not use")
        options["env"] = allowed[0]
    return options
