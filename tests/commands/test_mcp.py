"""``leanq mcp``, as an agent's program starts it."""

from __future__ import annotations

import sys

import pytest
from mcp import Client, StdioServerParameters
from support.terminals import Terminal

from leanq.queue.settings import Settings

PROOF = "theorem t (p : Prop) (h : p) : p := h"


@pytest.mark.slow
@pytest.mark.parametrize("embedded", [False, True])
async def test_it_serves_a_real_client(terminal: Terminal, fleet: Settings, embedded: bool) -> None:
    """With the queue that is named, and with one of its own; it ends with the client."""
    terminal.use(fleet)
    argv = ["-m", "leanq", "mcp", "--timeout", "30", *(["--embedded"] if embedded else [])]
    command = StdioServerParameters(command=sys.executable, args=argv, env=terminal.environ)
    async with Client(command) as agent:
        result = await agent.call_tool("check", {"code": PROOF})
        assert isinstance(result.structured_content, dict)
        assert result.structured_content["verdict"] == "accepted"
    assert terminal.is_clean()


@pytest.mark.slow
def test_what_cannot_be_served_is_said(terminal: Terminal) -> None:
    done = terminal.run("mcp", "--url", "ftp://a")
    assert (done.code, done.out) == (2, "")
    assert "not a Redis URL" in done.err
