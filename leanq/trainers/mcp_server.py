"""A server for the Model Context Protocol: agents check, step, verify and search.

Tools return the JSON of ``leanq submit --json``, ``verify`` and ``step``. Long messages and goals
are cut, since they fill a model's context; a proof is whole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from leanq import __version__
from leanq.errors import LeanQError
from leanq.producer.request_builder import Check
from leanq.queue.requests import CHECKED, STEPPED, VERIFIED, reply_to_json
from leanq.trainers.feedback import shortened
from leanq.trainers.search import Pending, ProofSearch, Prover, SearchResult, reply_of

_T = TypeVar("_T")

INSTRUCTIONS = """\
Checks Lean 4 text. A verdict is never a guess: `accepted` means that Lean's kernel has checked the
proof and that it rests on no sorry. `incomplete`: a sorry is left; each comes with its goal and a
`state`, on which `step` tries a tactic. `rejected`: see the messages, whose lines count from 1 and
columns from 0. `unverified`: the text runs programs of its own; `verify` settles it. `timeout`,
`memory` and `crashed` say nothing about the proof. Use `verify` where the statement is given, so
that a proof of another statement does not count."""

Code = Annotated[str, Field(description="Lean 4 text, with its imports.")]


def make_server(lean: Prover, **options: Any) -> MCPServer[Any]:
    """Returns the server, whose tools ask ``lean``.

    Args:
        options: of every request; see ``leanq.Check``.
    """
    server: MCPServer[Any] = MCPServer("leanq", version=__version__, instructions=INSTRUCTIONS)
    how: Check = options  # type: ignore[assignment]

    @server.tool()
    async def check(code: Code) -> dict[str, Any]:
        """Check a text: its verdict, messages, theorems, axioms, and each sorry's goal and
        state."""
        return await _shown(lambda: lean.check(code, **how), CHECKED)

    @server.tool()
    async def verify(
        target: Annotated[
            str, Field(description="The statement: Lean 4 text whose proofs are sorry.")
        ],
        candidate: Annotated[str, Field(description="Lean 4 text that proves exactly that.")],
    ) -> dict[str, Any]:
        """Verify that a candidate proves a target's theorems, as they are stated there."""
        return await _shown(lambda: lean.verify(target, candidate, **how), VERIFIED)

    @server.tool()
    async def step(
        state: Annotated[str, Field(description="The state of a sorry, or of a step before.")],
        tactic: Annotated[str, Field(description="A tactic, such as `intro h` or `simp`.")],
    ) -> dict[str, Any]:
        """Try a tactic on a state: the next state with its goals, or `accepted` with none left. A
        state stays, so any number of tactics can be tried on it."""
        return await _shown(lambda: lean.step(state, tactic, **how), STEPPED)

    @server.tool()
    async def search(
        statement: Annotated[str, Field(description="Lean 4 text with one sorry.")],
        tactics: Annotated[
            list[str], Field(description="Tactics to try on every goal.", min_length=1)
        ],
        max_steps: Annotated[int, Field(ge=1, le=10_000)] = 500,
        max_s: Annotated[float, Field(gt=0, le=3600)] = 60.0,
    ) -> dict[str, Any]:
        """Search for a proof made of the given tactics, best first, short goals before long ones.
        Without a proof, returns the shortest goals that are left, with their states."""

        async def policy(nodes: Any) -> list[list[str]]:
            return [tactics for _ in nodes]

        async def run() -> tuple[ProofSearch, SearchResult]:
            made = ProofSearch(statement, policy, value=_shortness, **how)
            return made, await made.run(lean, max_steps=max_steps, max_s=max_s)

        made, result = await _said(run)
        left = sorted(made.nodes, key=lambda node: sum(map(len, node.goals)))[:5]
        closest = [{"state": node.state, "goals": list(node.goals)} for node in left]
        found = {
            "ended": result.ended,
            "tactics": list(result.tactics),
            "steps": result.progress.steps,
            "states": result.progress.states,
            "closest": [] if result.ended == "proved" else closest,
        }
        return {**_cut(found), "proof": result.code}

    return server


async def _shortness(nodes: Any) -> list[float]:
    return [-float(sum(map(len, node.goals))) for node in nodes]


async def _said(ask: Callable[[], Awaitable[_T]]) -> _T:
    try:
        return await ask()
    except LeanQError as error:
        # The model reads the text, and can do better.
        raise ToolError(str(error)) from None


async def _shown(ask: Callable[[], Pending], fields: Sequence[str]) -> dict[str, Any]:
    reply = await _said(lambda: reply_of(ask()))
    shown: dict[str, Any] = _cut(reply_to_json(reply, fields))
    return shown


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return shortened(value)
    if isinstance(value, list):
        return [_cut(each) for each in value]
    if isinstance(value, dict):
        return {key: _cut(each) for key, each in value.items()}
    return value
