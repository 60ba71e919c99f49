"""The interface of Kimina Lean Server, for clients that were written for it.

``/api/check`` is that of 2.x, ``/verify`` and ``/one_pass_verify_batch`` that of 1.x. Each text is
a request of its own to the queue, so texts do not affect each other. An error stands in the result
of its text, and the HTTP status is 200.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Request, Response
from msgspec import Meta, Struct

from leanq.errors import InvalidRequestError, LeanQError, RequestError
from leanq.gateway.client import GatewayClient
from leanq.gateway.connections import while_connected
from leanq.gateway.groups import Group, in_turns
from leanq.gateway.interface import access_of, json_response, lean_of
from leanq.gateway.keys import Key
from leanq.gateway.kimina_results import result_of
from leanq.gateway.operation_routes import Operations
from leanq.gateway.v1_bodies import THEOREM
from leanq.lean.text import split_header
from leanq.producer.request_builder import Check, PreparedRequest
from leanq.queue.requests import MAX_TIMEOUT_S, Reply

router = APIRouter(tags=["Kimina Lean Server"])

Timeout = Annotated[int, Meta(ge=0, le=int(MAX_TIMEOUT_S))]
_Environment = Annotated[
    str | None, Meta(description="leanq's own: the environment's name; the key's first unless set")
]

Infotree = Literal["full", "tactics", "original", "substantive"]
_NO_INFOTREE = (
    "leanq: infotree: this server gives no infotrees; ask POST /v1/check for the goals before each "
    "tactic (goals), and leave infotree out here"
)
# The most texts of one request: a body has room for millions of empty ones, each an object here.
_MOST_TEXTS = 100_000
_UNENDED = RequestError("leanq: the request has not ended")
# leanq's budgets are above 0, but 0 is a legal timeout here.
_LEAST_TIMEOUT_S = 0.01


class Snippet(Struct, gc=False):
    """One Lean text."""

    id: str
    code: str


class CheckRequest(Struct):
    """The request of clients of 2.x."""

    snippets: Annotated[list[Snippet], Meta(min_length=1, max_length=_MOST_TEXTS)]
    timeout: Timeout = 30
    debug: bool = False
    reuse: bool = True
    infotree: Infotree | None = None
    environment: _Environment = None

    def __post_init__(self) -> None:
        if len({snippet.id for snippet in self.snippets}) < len(self.snippets):
            raise ValueError("snippets must have unique ids - at `$.snippets`")


class Code(Struct, gc=False):
    """One Lean text of 1.x, in ``proof`` or, without it, in ``code``."""

    custom_id: str | int
    proof: str | None = None
    code: str | None = None


class VerifyRequest(Struct):
    """The request of clients of 1.x."""

    codes: Annotated[list[Code], Meta(max_length=_MOST_TEXTS)]
    timeout: Timeout = 300
    infotree_type: Infotree | None = None
    disable_cache: bool = False
    environment: _Environment = None


DESCRIBED = (CheckRequest, VerifyRequest)
EXAMPLES = {
    "CheckRequest": {
        "snippets": [{"id": "a", "code": f"{THEOREM}h"}, {"id": "b", "code": f"{THEOREM}sorry"}],
        "timeout": 20,
    },
    "VerifyRequest": {"codes": [{"custom_id": 1, "proof": f"{THEOREM}h"}], "timeout": 60},
}

operations = Operations(tags=["Kimina Lean Server"])


@operations.operation("/api/check/", CheckRequest, include_in_schema=False)
@operations.operation(
    "/api/check", CheckRequest, summary="Check texts, as clients of 2.x ask for it"
)
async def check(body: CheckRequest, request: Request, key: Key) -> Response:
    """Returns a result for each snippet, in order, once all have ended."""
    codes = [snippet.code for snippet in body.snippets]
    ends = await _ends(request, key, codes, body.timeout, body.environment, body.infotree)
    results = [
        {"id": snippet.id, **result_of(end, body.timeout, debug=body.debug)}
        async for snippet, end in in_turns(zip(body.snippets, ends, strict=True))
    ]
    return json_response({"results": results})


@operations.operation("/one_pass_verify_batch", VerifyRequest, include_in_schema=False)
@operations.operation("/verify", VerifyRequest, summary="Check texts, as clients of 1.x ask for it")
async def verify(body: VerifyRequest, request: Request, key: Key) -> Response:
    """Returns a result for each code, in order, once all have ended."""
    codes = [code.code if code.proof is None else code.proof for code in body.codes]
    ends = await _ends(request, key, codes, body.timeout, body.environment, body.infotree_type)
    results = []
    async for code, end in in_turns(zip(body.codes, ends, strict=True)):
        result = result_of(end, body.timeout)
        response = result.get("response")
        results.append(
            {
                "custom_id": code.custom_id,
                "error": result.get("error"),
                "response": response and {**response, "time": result["time"]},
                **({"leanq": result["leanq"]} if "leanq" in result else {}),
            }
        )
    return json_response({"results": results})


@router.get("/health/", include_in_schema=False)
@router.get("/health", summary="Whether this gateway serves")
async def health() -> dict[str, str]:
    """The same for all callers; it needs no key."""
    return {"status": "ok"}


async def _ends(
    request: Request,
    key: Key,
    codes: Sequence[str | None],
    timeout_s: int,
    environment: str | None,
    infotree: Infotree | None,
) -> list[Reply | LeanQError]:
    """Returns the end of each text; withdraws all of them if the client goes away."""
    access, lean = access_of(request), lean_of(request)
    env = access.environment(key, environment)
    if infotree is not None:
        return [InvalidRequestError(_NO_INFOTREE)] * len(codes)
    options = Check(env=env, tenant=key.tenant)
    ends: list[Reply | LeanQError] = [_UNENDED] * len(codes)
    all_ended = asyncio.get_running_loop().create_future()

    def told(number: int, _: str, end: Reply | LeanQError) -> None:
        ends[number] = end
        if not group and not all_ended.done():
            all_ended.set_result(None)

    group = Group(lean, key.tenant, told)
    try:
        access.admit(key, len(codes), lean)
        with access.holding(key) as hold:
            # Those that are not sent yet count as well.
            hold(len(codes), 0)
            async for number, code in in_turns(enumerate(codes)):
                try:
                    group.begin(number, _prepared(lean, code, options, timeout_s))
                except LeanQError as error:
                    ends[number] = error
                hold(-1, 0)
        if group:
            await while_connected(request, all_ended)
    finally:
        group.leave()
    return [
        end if isinstance(end, LeanQError) else access.sealed(key, end)
        async for end in in_turns(ends)
    ]


def _prepared(
    lean: GatewayClient, code: str | None, options: Check, timeout_s: int
) -> PreparedRequest[Reply]:
    """Returns the request for a text; raises LeanQError for a missing one."""
    if code is None:
        raise InvalidRequestError("leanq: there is no text: give a proof, or code")
    budget_s = _budget_s(code, timeout_s)
    key = ("Kimina", budget_s, *options.values())
    checks = lean.checks(key, lambda: {**options, "timeout_s": budget_s})
    # Kimina accepts an empty text; leanq accepts it as a comment.
    return checks(code if code.strip() else f"{code}--")


def _budget_s(code: str, timeout_s: int) -> float:
    """Returns the CPU seconds for a text. Kimina grants its header and the rest a timeout each."""
    # Most texts contain no "import", so their header is not read.
    twice = "import" in code and split_header(code).imports
    budget_s = timeout_s * 2 if twice else timeout_s
    return min(max(float(budget_s), _LEAST_TIMEOUT_S), MAX_TIMEOUT_S)
