"""A campaign: a data set, how it is checked, and where its results go."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

from leanq.campaigns.coordinator import Coordinator, End, Observer, Plan
from leanq.campaigns.dataset import Dataset, Fields, Row, open_dataset
from leanq.campaigns.files import replacing
from leanq.campaigns.journal import Journal
from leanq.client import AsyncLeanQClient
from leanq.errors import LeanQError, UsageError
from leanq.producer.request_builder import Check
from leanq.queue.requests import Reply
from leanq.trainers.replay_writer import ReplayWriter, earned_by, writer_for

SPEC_SUFFIX = ".campaign"
"""The suffix of the file beside a campaign's results that says what the campaign was."""

State = Literal[
    "waiting",
    "scheduled",
    "queued",
    "running",
    "pausing",
    "paused",
    "cancelling",
    "finished",
    "failed",
    "cancelled",
]
"""How far a submitted campaign is."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """A data set, where its results go, and how it is checked.

    Attributes:
        data: path of a JSONL or Parquet file, or of a folder of .lean files.
        out: path of the results.
        replay: a replay memory that also gets the replies.
    """

    data: str
    out: str
    fields: Fields = field(default_factory=Fields)
    plan: Plan = field(default_factory=Plan)
    replay: str | None = None

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Self:
        """Returns the campaign that ``spec`` describes; the inverse of ``spec``."""
        fields, plan = Fields(**spec["fields"]), Plan(**spec["plan"])
        return cls(spec["data"], spec["out"], fields, plan, spec.get("replay"))

    @classmethod
    def of_results(cls, results: str) -> Self:
        """Returns the campaign that wrote ``results``, by its file; raises UsageError."""
        path = results + SPEC_SUFFIX
        try:
            with open(path, "rb") as stream:
                return cls.of(json.load(stream))
        except FileNotFoundError:
            raise UsageError(
                f"{path} is missing: a campaign writes it beside its results, to say what they are"
            ) from None
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, LeanQError):
            raise UsageError(f"{path} does not describe the campaign of {results}") from None

    def spec(self) -> dict[str, Any]:
        return asdict(self)

    async def run(
        self,
        client: AsyncLeanQClient,
        observer: Observer,
        *,
        retry: bool = False,
        dataset: Dataset | None = None,
        name: str = "",
    ) -> End:
        """Checks the rows that are left, and writes the results once all are done.

        Args:
            retry: if results exist, check those of their records again that have no verdict of
                Lean's.
            dataset: the data, if it is no file, such as a ``RowsDataset``. It has fields of
                its own, and ``data`` only names it.
            name: the name under which its cost is counted, instead of that of its results.

        Raises:
            BusyError: another coordinator runs the campaign.
            UsageError: the campaign cannot use the data or the results, or all first rows lack a
                field.
            UnavailableError, UnknownEnvironmentError, ToolchainError: as
                ``coordinator.Coordinator.run``.
        """
        if dataset is None:
            dataset = open_dataset(self.data, self.fields)
        dataset.check_fields()
        if (
            os.path.exists(self.data)
            and os.path.exists(self.out)
            and os.path.samefile(self.data, self.out)
        ):
            raise UsageError(f"{self.out} is the data; name another file for the results")
        memory = writer_for(self.replay, client) if self.replay else None
        settled = partial(self._remember, memory) if memory else None
        journal = Journal(self.out, self.purpose(dataset), retry=retry)
        try:
            options: Check = {**self.plan.options, "campaign": name or _name_of(self.out)}
            plan = replace(self.plan, options=options)
            end = await Coordinator(client, dataset, journal, plan, observer, settled).run()
            if end == "finished":
                # First, so that results never lack the file that leads to their texts.
                self.write_spec()
                journal.finish()
        finally:
            journal.close()
            if memory:
                await asyncio.to_thread(memory.close)
        if memory and memory.dropped:
            observer.warn(f"the replay memory {self.replay} lacks {memory.dropped:,} entries")
        return end

    def _remember(
        self, memory: ReplayWriter, row: Row, sample: int, text: str, reply: Reply
    ) -> None:
        tags = {
            "campaign": os.path.basename(self.out),
            "tenant": self.plan.options.get("tenant", "default"),
            "id": str(row.id),
            "sample": str(sample),
        }
        if row.problem is not None:
            tags["problem"] = str(row.problem)
        if row.tags:
            tags["tags"] = ",".join(row.tags)
        # A check has no target, and a hole can be filled with the question itself.
        is_compared = row.target is not None and not row.holes
        earned = earned_by(reply) if is_compared else None
        memory.add(reply, text, earned=earned, tags=tags)

    def write_spec(self) -> None:
        """Writes the file that ``of_results`` reads; raises UsageError."""
        found = replace(self, data=os.path.abspath(self.data), out=os.path.abspath(self.out))
        with replacing(self.out + SPEC_SUFFIX) as stream:
            # Allowed axioms may be any iterable.
            stream.write(json.dumps(found.spec(), default=list).encode() + b"\n")

    def purpose(self, dataset: Dataset) -> dict[str, Any]:
        """Returns the part of the campaign that has to be the same when it is resumed, as JSON."""
        options = {**self.plan.options}
        # They change when a row is checked, and not its verdict.
        for name in ("tenant", "priority"):
            options.pop(name, None)
        return {
            "data": dataset.fingerprint,
            "fields": asdict(self.fields),
            "options": options,
            "first_success": self.plan.first_success,
        }


def _name_of(out: str) -> str:
    """Returns the name of results as a campaign's name, in characters that names may have."""
    name = re.sub(r"[^A-Za-z0-9._@+-]", "_", os.path.basename(out))
    return name.lstrip("._@+-")[:64] or "results"
