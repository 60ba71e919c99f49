"""The interface of Kimina Lean Server, for clients that were written for it.

``/api/check`` is that of 2.x, ``/verify`` and ``/one_pass_verify_batch`` that of 1.x. Each text is
a request of its own to the queue, so what becomes of one is nothing to the others: an error stands
in the result of its text, and the HTTP status is 200.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, BaseModel, Field

from leanq.errors import InvalidRequestError, LeanQError
from leanq.gateway.access import Access, Submitter
from leanq.gateway.client import GatewayClient
from leanq.gateway.connections import while_connected
from leanq.gateway.kimina_results import result_of
from leanq.lean.syntax import split_header
from leanq.producer.request_builder import Check
from leanq.queue.requests import MAX_TIMEOUT_S, Reply

router = APIRouter(tags=["Kimina Lean Server"])

Infotree = Literal["full", "tactics", "original", "substantive"]
Timeout = Annotated[int, Field(ge=0, le=int(MAX_TIMEOUT_S))]
_Environment = Annotated[
    str | None, Field(description="leanq's own: the environment's name; the key's first unless set")
]

_NO_INFOTREE = (
    "leanq: infotree is not served by this gateway; leave it out, or set it to null, for a check "
    "without it"
)
# Any budget of leanq's is above 0, and 0 is a legal timeout here.
_LEAST_TIMEOUT_S = 0.01


def _unicode(text: str) -> str:
    # JSON can hold half of a surrogate pair, and an answer cannot.
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"it is not Unicode: {error.reason}") from None
    return text


_Id = Annotated[str, AfterValidator(_unicode)]


class Snippet(BaseModel):
    """One Lean text."""

    id: _Id
    code: str


def _different(snippets: list[Snippet]) -> list[Snippet]:
    if len({snippet.id for snippet in snippets}) < len(snippets):
        raise ValueError("snippets must have unique ids")
    return snippets


class CheckRequest(BaseModel):
    """What clients of 2.x send."""

    snippets: Annotated[list[Snippet], Field(min_length=1), AfterValidator(_different)]
    timeout: Timeout = 30
    debug: bool = False
    reuse: bool = True
    infotree: Infotree | None = None
    environment: _Environment = None

    model_config = {
        "json_schema_extra": {
            "examples": [
                {
                    "snippets": [
                        {"id": "a", "code": "theorem t (p : Prop) (h : p) : p := h"},
                        {"id": "b", "code": "theorem t (p : Prop) : p := sorry"},
                    ],
                    "timeout": 20,
                }
            ]
        }
    }


class Code(BaseModel):
    """One Lean text of 1.x, in ``proof`` or else in ``code``."""

    custom_id: _Id | int
    proof: str | None = None
    code: str | None = None


class VerifyRequest(BaseModel):
    """What clients of 1.x send."""

    codes: list[Code]
    timeout: Timeout = 300
    infotree_type: Infotree | None = None
    disable_cache: bool = False
    environment: _Environment = None

    model_config = {
        "json_schema_extra": {
            "examples": [
                {
                    "codes": [
                        {"custom_id": 1, "proof": "theorem t (p : Prop) (h : p) : p := h"},
                    ],
                    "timeout": 60,
                }
            ]
        }
    }


@router.post("/api/check/", include_in_schema=False)
@router.post("/api/check", summary="Check texts, as clients of 2.x ask for it")
async def check(body: CheckRequest, request: Request, key: Submitter) -> Response:
    """A result for each snippet, in their order, as soon as all have ended."""
    codes = [snippet.code for snippet in body.snippets]
    ends = await _ends(request, key, codes, body.timeout, body.environment, body.infotree)
    results = [
        {"id": snippet.id, **result_of(end, body.timeout, debug=body.debug)}
        for snippet, end in zip(body.snippets, ends, strict=True)
    ]
    return _json({"results": results})


@router.post("/one_pass_verify_batch", include_in_schema=False)
@router.post("/verify", summary="Check texts, as clients of 1.x ask for it")
async def verify(body: VerifyRequest, request: Request, key: Submitter) -> Response:
    """A result for each code, in their order, as soon as all have ended."""
    codes = [code.code if code.proof is None else code.proof for code in body.codes]
    ends = await _ends(request, key, codes, body.timeout, body.environment, body.infotree_type)
    results = []
    for code, end in zip(body.codes, ends, strict=True):
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
    return _json({"results": results})


@router.get("/", include_in_schema=False)
@router.get("/health/", include_in_schema=False)
@router.get("/health", summary="Whether this gateway serves")
async def health() -> dict[str, str]:
    """The same for all callers; it needs no key."""
    return {"status": "ok"}


async def _ends(
    request: Request,
    key: Submitter,
    codes: Sequence[str | None],
    timeout_s: int,
    environment: str | None,
    infotree: Infotree | None,
) -> list[Reply | LeanQError]:
    """How each text has ended; all of them are withdrawn where the client goes away."""
    access: Access = request.app.state.access
    lean: GatewayClient = request.app.state.lean
    env = access.environment(key, environment)
    access.admit(key, len(codes), lean.outstanding(key.tenant))
    if infotree is not None:
        return [InvalidRequestError(_NO_INFOTREE) for _ in codes]

    async def end(code: str | None) -> Reply | LeanQError:
        if code is None:
            return InvalidRequestError("leanq: there is no text: give a proof, or code")
        options = Check(env=env, tenant=key.tenant, timeout_s=_budget_s(code, timeout_s))
        try:
            prepared = lean.builder.check(_not_empty(code), options)
            reply = await lean.patient_reply(key.tenant, prepared)
        except LeanQError as error:
            return error
        return access.sealed(key, reply)

    async def all_ends() -> list[Reply | LeanQError]:
        return await asyncio.gather(*map(end, codes))

    return await while_connected(request, all_ends())


def _budget_s(code: str, timeout_s: int) -> float:
    """CPU seconds for a text. There its header and the rest have the whole timeout each."""
    budget_s = timeout_s * 2 if split_header(code).imports else timeout_s
    return min(max(float(budget_s), _LEAST_TIMEOUT_S), MAX_TIMEOUT_S)


def _not_empty(code: str) -> str:
    """An empty text is legal there; as a comment it is so here."""
    return code if code.strip() else f"{code}--"


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
