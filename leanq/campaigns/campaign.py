"""A campaign: a data set, how it is checked, and where its results go."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from leanq.campaigns.coordinator import Coordinator, End, Observer, Plan
from leanq.campaigns.dataset import Dataset, Fields, open_dataset
from leanq.campaigns.journal import Journal
from leanq.client import AsyncLeanQClient
from leanq.errors import UsageError


@dataclass(frozen=True, slots=True)
class Campaign:
    """A data set, where its results go, and how it is checked.

    Attributes:
        data: path of a JSONL or Parquet file, or of a folder of .lean files.
        out: path of the results.
        fields: the names of the data set's fields.
        plan: how its rows are checked.
    """

    data: str
    out: str
    fields: Fields = field(default_factory=Fields)
    plan: Plan = field(default_factory=Plan)

    @classmethod
    def of(cls, spec: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`spec`."""
        fields, plan = Fields(**spec["fields"]), Plan(**spec["plan"])
        return cls(spec["data"], spec["out"], fields, plan)

    def spec(self) -> dict[str, Any]:
        """The campaign as JSON."""
        return asdict(self)

    async def run(
        self, client: AsyncLeanQClient, observer: Observer, *, retry: bool = False
    ) -> End:
        """Checks what is left to check, and writes the results when all of it is done.

        Args:
            retry: where the results are there already, check those of their records again that
                have no verdict of Lean's.

        Raises:
            BusyError: another coordinator runs the campaign.
            UsageError: the data or the results are not what the campaign can use, or the first
                rows all lack a field.
            UnavailableError, UnknownEnvironmentError: as :meth:`.coordinator.Coordinator.run`.
        """
        dataset = open_dataset(self.data, self.fields)
        dataset.check_fields()
        if os.path.exists(self.out) and os.path.samefile(self.data, self.out):
            raise UsageError(f"{self.out} is the data; name another file for the results")
        journal = Journal(self.out, self.purpose(dataset), retry=retry)
        try:
            end = await Coordinator(client, dataset, journal, self.plan, observer).run()
            if end == "finished":
                journal.finish(self.plan.order)
        finally:
            journal.close()
        return end

    def purpose(self, dataset: Dataset) -> dict[str, Any]:
        """What has to be the same when the campaign is resumed, as JSON."""
        options = {**self.plan.options}
        # When a row is checked does not change its verdict.
        for name in ("tenant", "priority"):
            options.pop(name, None)
        return {
            "data": dataset.fingerprint,
            "fields": asdict(self.fields),
            "options": options,
            "first_success": self.plan.first_success,
        }
