"""Traces of a campaign: its results, joined with the texts of its data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from leanq.campaigns import dataset
from leanq.campaigns.campaign import Campaign
from leanq.campaigns.coordinator import problem
from leanq.campaigns.results import code_hash, read_results
from leanq.campaigns.traces import rows
from leanq.errors import UsageError
from leanq.producer.request_builder import DEFAULT_ENVIRONMENT, RequestBuilder
from leanq.queue.requests import Request
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
    environment = campaign.plan.options.get("env", DEFAULT_ENVIRONMENT)
    found = data.rows()
    row: dataset.Row | dataset.BadRow | None = None
    for record in read_results(results):
        if record["verdict"] is None:
            skipped["without a verdict"] += 1
            continue
        line, sample = record["line"], record.get("sample", 0)
        if row is None or row.line < line:
            row = next((each for each in found if each.line >= line), None)
        if (
            not isinstance(row, dataset.Row)
            or row.line != line
            or sample >= len(row.codes)
            or code_hash(row, sample) != record.get("code_hash")
        ):
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
        yield rows.trace(origin, _request(builder, campaign, row, sample), record)


def _request(builder: RequestBuilder, campaign: Campaign, row: dataset.Row, sample: int) -> Request:
    """Returns the request that the coordinator made of this text."""
    code, options = row.codes[sample], campaign.plan.options
    if row.target is None:
        return builder.check(code, options).request
    return builder.verify(row.target, code, (), row.holes, options).request
