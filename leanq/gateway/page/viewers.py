"""The rights of a caller of the page: what it may see and change."""

from __future__ import annotations

from dataclasses import dataclass

from leanq.gateway.keys import Key
from leanq.gateway.pending import RequestName


@dataclass(frozen=True, slots=True)
class Viewer:
    """A caller of the page. Two with equal fields see the same.

    Without ``sees_fleet`` it sees the names and figures of its own tenant alone. One that
    ``operates`` sees and changes other tenants' work. Empty ``environments`` are all.
    """

    tenant: str
    environments: tuple[str, ...]
    sees_fleet: bool
    submits: bool
    watches: bool
    operates: bool

    @classmethod
    def of(cls, key: Key, *, needs_keys: bool) -> Viewer:
        """Returns the viewer that a key makes.

        Without keys, all callers are users of this machine: they see the fleet, but change only
        their own requests.
        """
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
        return not self.environments or name in self.environments

    def sees_tenant(self, name: str) -> bool:
        return self.sees_fleet or name == self.tenant

    def sees(self, tenant: str, environment: str) -> bool:
        """Returns True if it may know of such a request, though perhaps not its text."""
        return self.sees_environment(environment) and self.sees_tenant(tenant)

    def owns(self, tenant: str, environment: str) -> bool:
        """Returns True if it may see the text of such a request, and end, retry or drop it."""
        return self.sees_environment(environment) and (self.operates or tenant == self.tenant)

    def name_of(self, request_id: str) -> RequestName | None:
        """Returns its name for a request of its own; None for other requests."""
        return RequestName.read(self.tenant, request_id)
