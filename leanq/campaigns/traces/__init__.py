"""Traces: what was checked and what Lean said, as tables to train on (docs/traces.md).

- ``rows`` defines a row, and by what hash equal ones are known;
- ``checked`` joins a campaign's results with its data set;
- ``recorded`` reads the journals of clients, and finds the goals of the states that steps began
  with;
- ``shards`` writes the rows that are new into a folder of tables;
- ``export`` does all of this for any number of sources.
"""

from leanq.campaigns.traces.export import Exported, export_traces

__all__ = ["Exported", "export_traces"]
