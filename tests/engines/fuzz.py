"""``make fuzz-gateway``: hostile requests over the OpenAPI of a gateway, made by Schemathesis.

    python -m engines.fuzz --schemathesis PROGRAM [--requests 10000] [--seconds 900] [--seed 1]

The gateway, its queue and a worker without Lean run in this process. It ends with code 1 where the
gateway has answered any request with 500 or above, or where there were fewer requests than were
asked for. Each failure is shown with the command that repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import time
from collections import Counter

from support.fleets import working
from support.gateway.gateways import Gateway, Scripted, new_gateway
from support.paths import TESTS
from support.servers import own_server

_DESCRIPTIONS = ("/v1/openapi.json", "/api/openapi.json")
# A round begins with what takes a while and is the same in each.
_ROUND_S = 120
_SERVER_ERROR = 500
_HOOKS = "fuzz_serializers"


def main() -> int:
    """Runs the course."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--schemathesis", required=True, help="the program, of its own environment")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=900.0, help="at most")
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    options = parser.parse_args()
    return asyncio.run(_course(options))


async def _course(options: argparse.Namespace) -> int:
    with own_server() as server:
        settings = server.settings
        async with (
            working(settings, Scripted(), slots=64),
            new_gateway(settings) as gateway,
        ):
            await _fuzz(options, gateway)
            return _told(gateway, options.requests)


async def _fuzz(options: argparse.Namespace, gateway: Gateway) -> None:
    end_s = time.monotonic() + options.seconds
    # At once, since the process that makes the requests is what takes the time, on one core.
    async with asyncio.TaskGroup() as group:
        for description in _DESCRIPTIONS:
            group.create_task(_fuzz_described(options, gateway, description, end_s))


async def _fuzz_described(
    options: argparse.Namespace, gateway: Gateway, description: str, end_s: float
) -> None:
    for seed in itertools.count(options.seed):
        left_s = int(end_s - time.monotonic())
        if left_s < 1 or _answers(gateway).total() >= options.requests:
            return
        process = await asyncio.create_subprocess_exec(
            *(options.schemathesis, "run", gateway.url + description),
            *("--url", gateway.url + ("/v1" if description.startswith("/v1/") else "")),
            *("--checks", "not_a_server_error", "--suppress-health-check", "all"),
            *("--phases", "coverage,fuzzing", "--mode", "all", "--workers", "8"),
            *("--max-time", str(min(_ROUND_S, left_s)), "--seed", str(seed)),
            # Those that wait for an end which does not come, such as a check in an environment
            # without a worker, are no failure, and would hold up all others.
            *("--request-timeout", "2", "--warnings", "off", "--continue-on-failure"),
            env={
                **os.environ,
                "PYTHONPATH": str(TESTS / "engines"),
                "SCHEMATHESIS_HOOKS": _HOOKS,
            },
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        before = _errors(gateway)
        said, _ = await process.communicate()
        print(f"seed {seed}, {description}: {_answers(gateway).total():,} by now", flush=True)
        # It fails for its own reasons as well, such as a text that its parser cannot take.
        if _errors(gateway) > before:
            print(said.decode(errors="replace")[-20_000:], flush=True)


def _answers(gateway: Gateway) -> Counter[str]:
    """How many requests had each status."""
    answers: Counter[str] = Counter()
    for name, labels, value in gateway.metrics.samples():
        if name == "leanq_http_requests_total":
            assert isinstance(value, int)
            answers[labels[1]] += value
    return answers


def _errors(gateway: Gateway) -> int:
    answers = _answers(gateway).items()
    return sum(count for status, count in answers if int(status) >= _SERVER_ERROR)


def _told(gateway: Gateway, wanted: int) -> int:
    answers = _answers(gateway)
    errors = _errors(gateway)
    statuses = ", ".join(f"{count} of {status}" for status, count in sorted(answers.items()))
    print(
        f"{answers.total():,} requests, {errors} answered by {_SERVER_ERROR} or above: {statuses}"
    )
    return 1 if errors or answers.total() < wanted else 0


if __name__ == "__main__":
    sys.exit(main())
