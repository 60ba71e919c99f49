"""What a caller of the page may see, and change."""

from __future__ import annotations

from dataclasses import dataclass

from leanq.gateway.keys import Key
from leanq.gateway.pending import RequestName


@dataclass(frozen=True, slots=True)
class Viewer:
    """A caller. Two with equal fields see the same.

    Attributes:
        tenant: whose requests they are that it submits.
        environments: those that it may see; empty for all.
        sees_fleet: whether it sees all tenants' names and figures, or its own alone.
        submits: whether it may submit, withdraw, retry and drop its own requests.
        watches: whether it may see the fleet's status.
        operates: whether it may see and change what is of other tenants.
    """

    tenant: str
    environments: tuple[str, ...]
    sees_fleet: bool
    submits: bool
    watches: bool
    operates: bool

    @classmethod
    def of(cls, key: Key, *, needs_keys: bool) -> Viewer:
        """The viewer that a key makes. Without keys, all callers are of this machine and see the
        fleet, but nothing can be changed except one's own requests."""
        operates = needs_keys and "operate" in key.rights
        return cls(
            key.tenant,
            key.environments,
            sees_fleet=operates or not needs_keys,
            submits="submit" in key.rights,
            watches=operates or "status" in key.rights,
            operates=operates,
        )

    def sees_environment(self, name: str) -> bool:
        """Whether it may know of an environment."""
        return not self.environments or name in self.environments

    def sees_tenant(self, name: str) -> bool:
        """Whether it may know of a tenant."""
        return self.sees_fleet or name == self.tenant

    def owns(self, tenant: str, environment: str) -> bool:
        """Whether it may see the text of such a request, and end it, retry it or drop it."""
        return self.sees_environment(environment) and (self.operates or tenant == self.tenant)

    def name_of(self, request_id: str) -> RequestName | None:
        """By which name it knows a request of its own; None for one that is not."""
        return RequestName.read(self.tenant, request_id)
