"""Accounts: what runs cost, as workers tell it and as Redis keeps it by the day."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Any process may have written more than these.
_MOST_DIGITS = 18


class Use(NamedTuple):
    """What runs cost: a number of ``what``, as the accounts of a day keep it.

    Attributes:
        tenant, campaign: ``""`` for none, and for those beyond the names that a day has room for.
        what: ``attempts``, ``cpu_ms``, or a verdict or another word for the end of a result.
    """

    environment: str
    tenant: str
    campaign: str
    what: str


def read_account(account: Iterable[tuple[bytes, bytes]]) -> tuple[int, dict[Use, int]]:
    """Returns the account of a day: since when it was kept (ms), and what runs cost.

    Entries that cannot be read are left out.
    """
    since_ms, uses = 0, dict[Use, int]()
    for raw, text in account:
        name = raw.decode(errors="replace").split(":")
        if not text.isdigit() or len(text) > _MOST_DIGITS:
            continue
        if name == ["since"]:
            since_ms = int(text)
        elif len(name) == len(Use._fields) and name[0] and name[-1]:
            uses[Use(*name)] = int(text)
    return since_ms, uses
