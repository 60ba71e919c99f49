"""Submitted campaigns, as clients know them: their status, the files of their rows,
and their results."""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from leanq.campaigns.campaign import Campaign, State
from leanq.campaigns.coordinator import Plan
from leanq.campaigns.dataset import Fields, open_dataset
from leanq.campaigns.report.figures import summarise
from leanq.campaigns.report.outcomes import outcomes
from leanq.campaigns.results import read_results
from leanq.errors import ConflictError, InvalidRequestError, UsageError

if TYPE_CHECKING:
    from leanq.campaigns.rq_queue import Campaigns, CampaignStatus

Change = Literal["pause", "resume", "cancel", "retry"]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,48}")


@dataclass(frozen=True, slots=True)
class SubmittedCampaign:
    """A campaign that was submitted, and how far it is.

    Attributes:
        id: the campaign's name in all calls.
        state: ``queued`` or ``running``; at the end ``finished`` with results, or ``failed`` or
            ``cancelled``, which a retry resumes. ``waiting`` is for other campaigns, ``scheduled``
            for a time.
        environment: where its rows are checked.
        submitted_at: the time, with its zone.
        rows: rows done, of ``total``; None if their number is unknown.
        counts: records by verdict; ``error`` counts rows that cannot be checked.
        bad_rows: the first rows that cannot be checked, each with its line and what is wrong.
        warnings: the coordinator's warnings.
    """

    id: str
    state: State
    environment: str
    submitted_at: datetime
    rows: int
    total: int | None
    counts: Mapping[str, int]
    bad_rows: Sequence[str]
    warnings: Sequence[str]

    @property
    def ended(self) -> bool:
        """True if nothing more happens to it unless it is retried."""
        return self.state in ("finished", "failed", "cancelled")


def folder_of(folder: Path, tenant: str) -> Path:
    # A tenant's name need not be a valid folder name.
    return folder.resolve() / blake2b(tenant.encode(), digest_size=16).hexdigest()


def write_campaign(folder: Path, rows: bytes, plan: Plan) -> Campaign:
    """Writes rows, JSON lines, into a folder, which is made if it is missing; returns the campaign
    over them. Raises OSError, and UsageError for rows that cannot be used, which are removed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = folder / f"{secrets.token_hex(8)}.jsonl"
    data.write_bytes(rows)
    try:
        fields = _fields(rows)
        open_dataset(str(data), fields).check_fields()
    except BaseException:
        data.unlink()
        raise
    return Campaign(str(data), str(data.with_suffix(".results.jsonl")), fields, plan)


def submit_rows(
    campaigns: Campaigns,
    folder: Path,
    rows: bytes,
    plan: Plan,
    request_id: str | None = None,
) -> CampaignStatus:
    """Writes rows to their tenant's folder, and returns the campaign over them, which it submits.

    Args:
        folder: the folder for all tenants' rows.
        request_id: the caller's name for the campaign. However often and wherever this is called,
            the campaign is submitted once.

    Raises:
        UsageError, OSError: as ``write_campaign``.
        ConflictError: other rows or options came with that request id.
    """
    own = folder_of(folder, plan.options["tenant"])
    if request_id is None:
        return campaigns.show(campaigns.submit(write_campaign(own, rows, plan)))
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequestError(
            f"{request_id!r:.80} is no request id of a campaign; expected 1 to 48 letters, digits "
            "and . _ -"
        )
    # The folder says whose campaign it is.
    id_, digest = campaigns.id_of(str(own), request_id), _digest(rows, plan)
    if found := _submitted_before(campaigns, id_, digest, request_id):
        return found
    campaign = write_campaign(own, rows, plan)
    if campaigns.submit_once(campaign, id_, digest):
        return campaigns.show(id_)
    # Another caller has submitted it in this moment.
    Path(campaign.data).unlink()
    found = _submitted_before(campaigns, id_, digest, request_id)
    return found or campaigns.show(id_)


def _submitted_before(
    campaigns: Campaigns, id_: str, digest: str, request_id: str
) -> CampaignStatus | None:
    try:
        found = campaigns.show(id_)
    except UsageError:
        return None
    if found.digest != digest:
        raise ConflictError(
            f"the request id {request_id!r} belongs to the campaign {id_}, which has other rows or "
            "options; take another name, or send the same again"
        )
    return found


def _digest(rows: bytes, plan: Plan) -> str:
    """Returns a digest of all that a caller can choose."""
    options = plan.options
    chosen = (
        options["env"],
        float(options["timeout_s"]),
        options["priority"],
        plan.first_success,
    )
    return blake2b(rows, digest_size=16, key=blake2b(repr(chosen).encode()).digest()).hexdigest()


def changed(campaigns: Campaigns, id_: str, how: Change) -> CampaignStatus:
    """Changes a campaign, and returns it; cancelling an ended one does nothing.

    Raises UsageError for an unknown campaign, or one whose state does not allow the change.
    """
    if not (how == "cancel" and campaigns.show(id_).ended):
        getattr(campaigns, how)(id_)
    return campaigns.show(id_)


def results_of(status: CampaignStatus) -> Path:
    """Returns the file of a campaign's results; raises UsageError if there is none."""
    if status.state != "finished":
        raise UsageError(f"the campaign is {status.state}; it has results once it has finished")
    path = Path(status.campaign.out)
    if not path.is_file():
        raise UsageError("the campaign's results are no longer there, or are on another machine")
    return path


def report_on(results: Path) -> dict[str, Any]:
    """Returns the figures of a report on results, as JSON; raises UsageError if they cannot be
    read."""
    return asdict(summarise(outcomes(read_results(str(results)), "results")))


def _fields(rows: bytes) -> Fields:
    first = next(filter(None, map(bytes.strip, io.BytesIO(rows))), b"")
    try:
        row = msgspec.json.decode(first)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the first row is not JSON: {error}") from None
    if not isinstance(row, dict) or not {"id", "code"} <= row.keys():
        raise UsageError("a row has to be an object with id and code")
    return Fields(
        problem="problem" if "problem" in row else None,
        target="target" if "target" in row else None,
    )
