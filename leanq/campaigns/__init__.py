"""Campaigns: whole data sets, checked by a coordinator that may die at any time.

docs/internals/campaigns.md says which file has what. Only ``rq_queue``, ``rq_job`` and
``rq_worker`` import RQ, since only ``leanq[campaigns]`` installs it.
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
