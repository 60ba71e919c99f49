"""A program that uses the real kimina-client, whatever its version, and prints what it got.

Its arguments are ``sync`` or ``async`` and the gateway's URL; on standard input stand a JSON list
of snippets, each an id and a code, and the arguments of ``check``, with ``test`` where the client
shall call its ``test()`` before. It prints the results, each with what ``analyze()`` says of it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info < (3, 12):
    # The client itself stays as it is. Its models need the lines that the page tells users to add.
    page = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    exec(re.findall(r"```python\n(import typing\b.*?)```", page, re.DOTALL)[0])

import kimina_client


def main(kind: str, url: str) -> None:
    snippets, options = json.load(sys.stdin)
    logging.getLogger("kimina-client").setLevel(logging.CRITICAL)
    snips = [kimina_client.Snippet(id=each, code=code) for each, code in snippets]
    options["show_progress"] = False
    if kind == "sync":
        answer = asked(url, snips, options)
    else:
        answer = asyncio.run(waited(url, snips, options))
    results = [
        {**result.model_dump(), "status": result.analyze().status.value}
        for result in answer.results
    ]
    json.dump(results, sys.stdout)


def asked(url: str, snips: list[Any], options: dict[str, Any]) -> Any:
    client = kimina_client.KiminaClient(url)
    assert client.health() == {"status": "ok"}
    if options.pop("test", False):
        client.test()
    return client.check(snips, **options)


async def waited(url: str, snips: list[Any], options: dict[str, Any]) -> Any:
    client = kimina_client.AsyncKiminaClient(url)
    assert await client.health() == {"status": "ok"}
    try:
        if options.pop("test", False):
            await client.test()
        return await client.check(snips, **options)
    finally:
        await client.session.aclose()


if __name__ == "__main__":
    main(*sys.argv[1:])
