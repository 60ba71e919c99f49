"""Rewards over HTTP.

- ``POST /get_reward`` is OpenRLHF's remote reward model: ``query`` (prompt and answer), ``prompts``
  and ``labels`` (the statements), each a list. The reply has ``rewards``, ``scores`` and
  ``extra_logs``.
- ``POST /verify`` and ``POST /seed_session`` are those of NeMo Gym's resources server. The
  statement stands in the row's ``verifier_metadata`` or beside it, the answer in ``response``. A
  candidate without a verdict of Lean's gets ``mask_sample``, and NeMo Gym leaves it out.

Both shapes follow the projects' documentation. If the fleet does not answer, the status is 503 with
the error's name, never a reward.

Any client that reaches the port spends the fleet's time: keep it on the trainer's own network.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from leanq.errors import NoRewardError, QueueError, UsageError
from leanq.trainers.rewards import LeanReward, with_group_means

MAX_BODY_BYTES = 64 << 20
"""The largest request that is read."""

_SHOWN = 500


def make_app(score: LeanReward) -> Starlette:
    """Returns the application, for any ASGI server, with the rewards of ``score``."""

    def route(path: str, answer: Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]) -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                # Escaped, since UTF-8 has no bytes for half of a surrogate pair.
                told = json.dumps(await answer(await _body(request)))
                return Response(told, media_type="application/json")
            except (UsageError, NoRewardError, QueueError) as error:
                status = 422 if isinstance(error, UsageError) else 503
                told = json.dumps({"error": type(error).__name__, "detail": str(error)})
                headers = {"Retry-After": "5"} if status == 503 else None
                return Response(told, status, headers, "application/json")

        return Route(path, endpoint, methods=["POST"])

    async def get_reward(body: Mapping[str, Any]) -> dict[str, Any]:
        queries, prompts, labels = (_texts(body, name) for name in ("query", "prompts", "labels"))
        if not len(queries) == len(prompts) == len(labels):
            raise UsageError("query, prompts and labels must be lists of the same length")
        answers = list(map(_answer, queries, prompts))
        scores = await score.scores(labels, answers)
        rewards = [each.reward for each in scores]
        known = {label for label, each in zip(labels, rewards, strict=True) if each is not None}
        if unknown := set(labels) - known:
            raise NoRewardError(
                "no candidate has a verdict of Lean's (a timeout, a crash, or a broken statement) "
                f"for: {min(unknown):.{_SHOWN}}"
            )
        means = with_group_means(rewards, labels)
        return {
            "rewards": means,
            "scores": means,
            "extra_logs": {
                "accepted": [float(each == 1.0) for each in rewards],
                "no_reward": [float(each is None) for each in rewards],
            },
        }

    async def verify(body: Mapping[str, Any]) -> dict[str, Any]:
        metadata = body.get("verifier_metadata")
        named = {**body, **(metadata if isinstance(metadata, Mapping) else {})}
        statement = named.get("statement")
        if not isinstance(statement, str):
            raise UsageError("expected the text 'statement', in the row or its verifier_metadata")
        (found,) = await score.scores([statement], [_last_text(body.get("response"))])
        told: dict[str, Any] = {**body, "reward": found.reward or 0.0, "mask_sample": False}
        if found.reward is None:
            verdict = found.reply.verdict if found.reply else "no_reply"
            reason = "no verdict of Lean's on the candidate, or a broken statement"
            told |= {"mask_sample": True, "failure_kind": f"leanq:{verdict}"}
            told["failure_reason"] = reason
        return told

    async def seed_session(_: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    return Starlette(
        routes=[
            route("/get_reward", get_reward),
            route("/verify", verify),
            route("/seed_session", seed_session),
        ]
    )


async def _body(request: Request) -> Mapping[str, Any]:
    taken = bytearray()
    async for chunk in request.stream():
        taken += chunk
        if len(taken) > MAX_BODY_BYTES:
            raise UsageError(f"the request has more than {MAX_BODY_BYTES} bytes")
    try:
        body = json.loads(taken)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise UsageError("expected a JSON object")
    return body


def _texts(body: Mapping[str, Any], name: str) -> Sequence[str]:
    value = body.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise UsageError(f"expected {name!r}, a list of texts")
    return value


def _answer(query: str, prompt: str) -> str:
    """Returns the answer: the query behind its prompt. Tokenizers may have put a mark of the
    beginning before it."""
    before, found, answer = query.partition(prompt) if prompt else ("", "", "")
    if not found or len(before) > _SHOWN:
        raise UsageError("a query must hold its prompt, and the answer behind that")
    return answer


def _last_text(response: Any) -> str:
    """Returns the text of the assistant's last message; empty if there is none, which proves
    nothing."""
    output = response.get("output") if isinstance(response, Mapping) else None
    if not isinstance(output, list):
        raise UsageError("expected 'response' with its 'output', a list of items")
    for item in reversed(output):
        if not isinstance(item, Mapping) or item.get("type") != "message":
            continue
        if item.get("role", "assistant") == "assistant":
            content = item.get("content")
            if isinstance(content, str):
                return content
            parts = content if isinstance(content, list) else []
            texts = (part.get("text") for part in parts if isinstance(part, Mapping))
            return "".join(text for text in texts if isinstance(text, str))
    return ""
