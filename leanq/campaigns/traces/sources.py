"""The sources of traces: results of campaigns, and the journals that clients recorded."""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from leanq.campaigns import dataset
from leanq.campaigns.campaign import Campaign
from leanq.campaigns.coordinator import problem
from leanq.campaigns.results import ANSWER, code_hash, read_results
from leanq.campaigns.traces import rows
from leanq.errors import UsageError
from leanq.producer.recording import SUFFIX, Recorded, read_journal
from leanq.producer.request_builder import DEFAULT_ENVIRONMENT, RequestBuilder
from leanq.queue.requests import Tactic, reply_to_json
from leanq.queue.settings import Settings


def of_campaign(
    results: str, data: str | dataset.Dataset | None, skipped: Counter[str]
) -> Iterator[rows.Row]:
    """Yields the traces of the campaign that wrote ``results``, in the order of its data.

    Raises UsageError: results or data cannot be read, no campaign is known for the results, or
    the data is not what was checked. ``skipped`` counts records without a verdict.
    """
    campaign = Campaign.of_results(results)
    if data is None or isinstance(data, str):
        data = dataset.open_dataset(data or campaign.data, campaign.fields)
    # Any queue's builder makes the same requests.
    builder = RequestBuilder(Settings("unix:///-"), "default")
    options = campaign.plan.options
    environment = options.get("env", DEFAULT_ENVIRONMENT)
    found = data.rows()
    row: dataset.Row | dataset.BadRow | None = None
    for record in read_results(results):
        if record["verdict"] is None:
            skipped["without a verdict"] += 1
            continue
        line, sample = record["line"], record.get("sample", 0)
        if row is None or row.line < line:
            row = next((each for each in found if each.line >= line), None)
        code: str | None = None
        if isinstance(row, dataset.Row) and row.line == line and sample < len(row.codes):
            wanted = record.get("code_hash")
            code = next(
                (text for text in row.codes[sample] if code_hash(row, text) == wanted), None
            )
        if not isinstance(row, dataset.Row) or code is None:
            raise UsageError(
                f"{data.path}:{line}: the data does not match the record of that line in "
                f"{results}; if it was moved or changed, name the data that was checked with --data"
            )
        origin = {
            "environment": environment,
            "problem": str(problem(row)),
            "id": str(row.id),
            "sample": sample if row.listed else None,
            "tags": row.tags,
        }
        if row.target is None:
            made = builder.check(code, options)
        else:
            made = builder.verify(row.target, code, (), row.holes, options)
        traced = rows.trace(origin, made.request, record)
        yield traced
        tactics = (Tactic(**each) for each in record.get("tactics", ()))
        yield from rows.of_tactics(traced, [*tactics])


def is_recorded(source: str) -> bool:
    """Returns whether a source is a journal or a folder of journals, by its name and kind."""
    return source.endswith(SUFFIX) or os.path.isdir(source)


def of_journals(source: str, skipped: Counter[str]) -> Iterator[rows.Row]:
    """Yields the traces of a journal, or of all journals in a folder; raises UsageError.

    ``skipped`` counts lines that cannot be read.
    """
    paths = [Path(source)]
    if os.path.isdir(source):
        paths = sorted(Path(source).glob(f"*{SUFFIX}"))
        if not paths:
            raise UsageError(f"{source} has no journal (*{SUFFIX}), as clients with record= write")
    for path in paths:
        for record in read_journal(path, skipped):
            row = _trace(record)
            yield row
            yield from rows.of_tactics(row, record.reply.tactics)


def _trace(record: Recorded) -> rows.Row:
    reply = record.reply
    labels: dict[str, Any] = json.loads(record.labels)
    named = labels.get("problem")
    origin = {
        "environment": record.environment or None,
        "problem": None if named is None else str(named),
        "labels": record.labels if labels else None,
        "ended": datetime.fromtimestamp(record.ended_ms / 1000, UTC),
    }
    answer = reply_to_json(reply, ANSWER)
    if record.request.op == "step":
        answer |= {"state": reply.state, "goals_after": list(reply.goals)}
    return rows.trace(origin, record.request, answer)


class Goals:
    """The goals of states, by the rows that first had them; on disk, and gone with this object.

    A context manager.
    """

    def __enter__(self) -> Self:
        # A database without a name is a file that SQLite removes.
        self._database = sqlite3.connect("")
        self._database.execute(
            "CREATE TABLE goals (state TEXT PRIMARY KEY, goals TEXT NOT NULL) WITHOUT ROWID"
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def learn(self, found: Iterable[rows.Row]) -> None:
        """Notes the states that rows lead to."""
        for row in found:
            states = [
                (sorry["state"], [sorry["goal"]])
                for sorry in row.get("sorries") or ()
                if sorry["state"] is not None and sorry["goal"] is not None
            ]
            if row.get("state") is not None:
                states.append((row["state"], row["goals_after"]))
            self._database.executemany(
                "INSERT OR IGNORE INTO goals VALUES (?, ?)",
                ((state, json.dumps(goals)) for state, goals in states),
            )

    def fill_in(self, found: Iterable[rows.Row]) -> Iterator[rows.Row]:
        """Yields the rows, with the goals that steps began with where they are known."""
        query = "SELECT goals FROM goals WHERE state = ?"
        for row in found:
            if row["op"] == "step":
                known = self._database.execute(query, (row["parent"],)).fetchone()
                row["goals_before"] = None if known is None else json.loads(known[0])
            yield row
