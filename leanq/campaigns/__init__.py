"""Campaigns: whole data sets, checked by a coordinator that may die at any time.

- ``dataset/`` reads rows, from any row on;
- ``coordinator`` keeps a window of requests in flight, and may be paused or cancelled;
- ``journal`` makes records durable. Its cursor says where a campaign resumes. A retry checks the
  rows again that have no verdict of Lean's;
- ``results`` defines a record, and reads and writes files of them. ``report/`` evaluates them,
  ``traces/`` joins them with their texts, and both use ``tables`` and ``files``;
- ``rq_queue``, ``rq_job`` and ``rq_worker`` run campaigns as jobs of RQ, and ``rq_connection``
  finds RQ's Redis. Nothing else imports RQ, since only ``leanq[campaigns]`` installs it;
- ``client`` is ``LeanQClient(...).campaigns``, over Redis or through a gateway; ``submitted`` has
  the code that both ways share.
"""

from typing import TYPE_CHECKING

from leanq import names_of

if TYPE_CHECKING:
    from leanq.campaigns.client import AsyncCampaignsClient as AsyncCampaignsClient
    from leanq.campaigns.client import CampaignsClient as CampaignsClient
    from leanq.campaigns.submitted import SubmittedCampaign as SubmittedCampaign

# The public names, and the module of each.
_HOMES = {
    "AsyncCampaignsClient": "leanq.campaigns.client",
    "CampaignsClient": "leanq.campaigns.client",
    "SubmittedCampaign": "leanq.campaigns.submitted",
}
__all__ = list(_HOMES)
if not TYPE_CHECKING:
    __getattr__ = names_of(_HOMES, __name__)
