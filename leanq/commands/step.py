"""``leanq step``: a tactic on a state."""

from __future__ import annotations

import json
from typing import Any

import click

from leanq.commands import options
from leanq.commands.common import exit_code
from leanq.commands.replies import coloured, hanging, shown_lines
from leanq.commands.state import ask
from leanq.commands.submit import read_source
from leanq.producer.request_builder import Check
from leanq.queue.requests import STEPPED, Reply, reply_to_json


@click.command()
@click.argument("state")
@click.argument("tactic")
@options.client
@options.env_of_state
@options.lean
def step(
    state: str, tactic: str, url: str | None, as_json: bool, env: str | None, **how: Any
) -> int:
    """Try a tactic on a state, and print the goals that are left.

    STATE is an id that a check or a step has printed. A TACTIC of - is standard input.

    Exit code: as of submit; 1 also if goals are left.
    """
    text = read_source("-") if tactic == "-" else tactic
    asked: Check = options.in_environment(env, how)
    reply = ask(url, lambda client: client.step(state, text, **asked))
    if as_json:
        click.echo(json.dumps(reply_to_json(reply, STEPPED)))
    else:
        click.echo("\n".join(lines_of_step(reply)))
    return exit_code(reply.verdict)


def lines_of_step(reply: Reply) -> list[str]:
    """Returns the lines of a reply to a step."""
    reason = f"{reply.reason}; " if reply.reason else ""
    lines = [f"{coloured(reply.verdict)} ({reason}{reply.wall_s:.2f} s)"]
    if reply.state:
        lines.append(f"state {reply.state}")
    lines += ("\n" + "\n".join(shown_lines(goal)) for goal in reply.goals)
    for message in reply.messages:
        lines += hanging(f"{message.line}:{message.column}: {message.severity}: ", message.text)
    return lines
