"""How Kimina's client reads a result: its rules, by which it says what became of a text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from support.paths import ROOT


def reading(result: Mapping[str, Any]) -> str:
    """What ``analyze()`` of kimina-client says of a result, in its own words."""
    error, response = result.get("error"), result.get("response")
    assert bool(error) != (response is not None), result
    if error:
        return "timeout_error" if "timed out" in error else "server_error"
    assert isinstance(response, dict)
    if any(message["severity"] == "error" for message in response.get("messages", ())):
        return "lean_error"
    for sorry in response.get("sorries", ()):
        assert {"pos", "endPos", "goal"} <= sorry.keys()
    return "sorry" if response.get("sorries") else "valid"


def documented() -> dict[str, str]:
    """The table of docs/http.md: what a client says of each verdict."""
    page = (ROOT / "docs" / "http.md").read_text()
    table = page.split("<!-- verdicts -->\n")[1].split("<!-- /verdicts -->")[0]
    rows = (row.strip("|").split("|") for row in table.splitlines()[2:])
    return {
        verdict: re.findall(r"`(\w+)`", cells[2])[0]
        for cells in rows
        for verdict in re.findall(r"`(\w+)`", cells[0])
    }
