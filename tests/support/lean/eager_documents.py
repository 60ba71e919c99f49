"""Lean's language server from the first text of a header on: the tests' option ``--documents``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leanq.lean.run.documents import DocumentRules, Documents
from leanq.lean.run.fork_server import ForkRules, ForkServer


class NoForkServer(ForkServer):
    """A fork server that is given up, as on a machine whose Lean it does not know, unless a test
    asks for forks of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.rules == ForkRules():
            self.unavailable = "the tests ask for Lean's language server"


class EagerDocuments(Documents):
    """One that serves a header's first text, too, unless a test asks for none."""

    def __post_init__(self) -> None:
        if self.rules.served_from == DocumentRules.served_from:
            self.rules = replace(self.rules, served_from=1)
