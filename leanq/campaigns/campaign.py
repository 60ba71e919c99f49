"""What a campaign is to do, and doing it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from leanq.campaigns.coordinator import Command, Coordinator, Plan, Watcher
from leanq.campaigns.dataset import Data, Fields, open_data
from leanq.campaigns.journal import Journal
from leanq.client import AsyncLeanQClient
from leanq.errors import UsageError


@dataclass(frozen=True, slots=True)
class Campaign:
    """A data set, where its results go, and how it is checked.

    Attributes:
        data: path of a JSONL or Parquet file, or of a folder of .lean files.
        out: path of the results.
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
        self, client: AsyncLeanQClient, watcher: Watcher, *, retry: bool = False
    ) -> Command:
        """Checks what is left to check; ``go on`` if that was to the end, and results are whole.

        Args:
            retry: whether results that are there are taken up again, for those of their records
                that have no verdict of Lean's.

        Raises:
            BusyError: another coordinator is at it.
            UsageError: data or results are not what the campaign can use.
            UnavailableError, UnknownEnvironmentError: as :meth:`.coordinator.Coordinator.run`.
        """
        data = open_data(self.data, self.fields)
        if os.path.exists(self.out) and os.path.samefile(self.data, self.out):
            raise UsageError(f"{self.out} is the data; name another file for the results")
        journal = Journal(self.out, self._purpose(data), retry=retry)
        try:
            command = await Coordinator(client, data, journal, self.plan, watcher).run()
            if command == "go on":
                journal.finish(self.plan.order)
        finally:
            journal.close()
        return command

    def _purpose(self, data: Data) -> dict[str, Any]:
        """What must be the same for whoever goes on."""
        options = {**self.plan.options}
        # How soon something is checked does not change what comes of it.
        for name in ("tenant", "priority"):
            options.pop(name, None)
        return {
            "data": data.fingerprint,
            "fields": asdict(self.fields),
            "options": options,
            "first_success": self.plan.first_success,
        }
