"""Traces: checks and Lean's answers, as tables to train on (docs/traces.md).

- ``rows`` defines a row, and the hash that tells equal ones;
- ``checked`` joins a campaign's results with its data set;
- ``recorded`` reads the journals of clients, and finds the goals that steps began with;
- ``shards`` writes new rows into a folder of tables;
- ``export`` does all of this for any number of sources.
"""

from leanq.campaigns.traces.export import Exported, export_traces

__all__ = ["Exported", "export_traces"]
