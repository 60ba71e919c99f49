"""What the tests of the gateway share: a gateway, and a driver that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx2

from leanq.gateway.access import Access
from leanq.gateway.app import make_app
from leanq.gateway.client import GatewayClient
from leanq.gateway.keys import KeyFile
from leanq.gateway.metrics import GatewayMetrics, Readiness
from leanq.gateway.server import GatewayServer, listen
from leanq.lean.driver import EchoDriver
from leanq.queue.requests import Message, Reason, Reply, Request, Sorry, Verdict
from leanq.queue.settings import Settings

GATEWAY_TIMEOUT_S = 60.0

# A reason that each verdict can have.
REASONS: dict[Verdict, Reason | None] = {
    "accepted": None,
    "unverified": "runs_programs",
    "incomplete": "sorry",
    "rejected": "forbidden_axiom",
    "exhausted": "heartbeats",
    "unjudged": "judge_unavailable",
    "timeout": "cpu_time",
    "memory": "memory",
    "crashed": "process_died",
    "cancelled": "withdrawn",
    "expired": "deadline",
    "poisoned": "too_many_deaths",
}
STATE = "0123456789abcdef" * 4


def reply_with(verdict: Verdict) -> Reply:
    """A reply such as a worker gives with this verdict."""
    messages: tuple[Message, ...] = ()
    sorries: tuple[Sorry, ...] = ()
    if verdict == "incomplete":
        messages = (Message("warning", 1, 8, "declaration uses `sorry`", 1, 9),)
        sorries = (Sorry(1, 36, "⊢ p", STATE, 1, 41),)
    elif verdict == "exhausted":
        text = "(deterministic) timeout at `whnf`, maximum number of heartbeats has been reached"
        messages = (Message("error", 1, 8, text, 1, 9),)
    elif verdict in ("unverified", "unjudged"):
        messages = (Message("warning", 1, 0, f"leanq: it is {verdict}"),)
    elif verdict in ("rejected", "timeout", "memory", "crashed"):
        messages = (Message("error", 1, 0, f"leanq: it is {verdict}\ntimed out, it says"),)
    return Reply(verdict, messages, sorries, reason=REASONS[verdict])


class Scripted(EchoDriver):
    """A driver of an environment whose texts say in their first words what becomes of them.

    ``-- VERDICT …`` has that verdict, ``-- held …`` waits for :attr:`gate`, a text in
    :attr:`replies` has that reply, and anything else is accepted.
    """

    def __init__(self, environment: str = "default") -> None:
        self.environment = environment
        self.gate = asyncio.Event()
        self.running: list[str] = []
        self.stopped: list[str] = []
        self.seen: list[Request] = []
        self.replies: dict[str, Reply] = {}

    async def run(self, request: Request) -> Reply:
        self.seen.append(request)
        word = request.code.removeprefix("-- ").partition(" ")[0]
        if word == "held":
            self.running.append(request.code)
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.stopped.append(request.code)
                raise
            finally:
                self.running.remove(request.code)
        if found := self.replies.get(request.code):
            return found
        return reply_with(word if word in get_args(Verdict) else "accepted")


@dataclass
class Gateway:
    """A gateway that serves.

    Attributes:
        url: where.
        http: a client of it, without a key.
        lean: what the gateway asks the queue by.
        metrics, readiness: what it knows of itself.
    """

    url: str
    http: httpx2.AsyncClient
    lean: GatewayClient
    server: GatewayServer
    metrics: GatewayMetrics
    readiness: Readiness

    async def check(self, *codes: str, **fields: Any) -> list[dict[str, Any]]:
        """The results of a check as a client of 2.x asks for it."""
        snippets = [{"id": str(number), "code": code} for number, code in enumerate(codes)]
        answer = await self.http.post("/api/check", json={"snippets": snippets, **fields})
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        assert [result["id"] for result in results] == [snippet["id"] for snippet in snippets]
        return results


@contextlib.asynccontextmanager
async def new_gateway(
    settings: Settings,
    *,
    keys: KeyFile | None = None,
    environment: str = "default",
    hostnames: tuple[str, ...] = (),
    grace_s: float = 5.0,
    port: int = 0,
) -> AsyncIterator[Gateway]:
    """A gateway in this event loop, in front of the queue of ``settings``."""
    async with GatewayClient(settings, no_worker="wait", when_full="raise") as lean:
        with listen("127.0.0.1", port) as listener:
            app = make_app(lean, Access(keys, environment), hostnames)
            server = GatewayServer(app, listener, grace_s=grace_s)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            serving = asyncio.create_task(server.run())
            try:
                async with httpx2.AsyncClient(base_url=url, timeout=GATEWAY_TIMEOUT_S) as http:
                    state = app.state
                    yield Gateway(url, http, lean, server, state.metrics, state.readiness)
            finally:
                server.stop()
                async with asyncio.timeout(GATEWAY_TIMEOUT_S):
                    await serving


def key_file(folder: Path, *keys: dict[str, Any]) -> Path:
    """A file of keys, each given by its ``secret`` and further fields."""
    path = folder / "keys.toml"
    path.write_text(f'secret = "{"5" * 32}"\n\n' + "".join(map(_entry, keys)))
    return path


def _entry(key: dict[str, Any]) -> str:
    fields = {"name": key["secret"], "tenant": key["secret"], **key}
    fields["sha256"] = hashlib.sha256(fields.pop("secret").encode()).hexdigest()
    # TOML writes texts and lists of them as JSON does, and so does Python here.
    lines = (f"{name} = {value!r}\n" for name, value in fields.items())
    return f"[[key]]\n{''.join(lines)}\n"
