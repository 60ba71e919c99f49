"""Campaigns: whole data sets, checked by a coordinator that may die at any time.

- ``dataset/`` reads rows, from any row on;
- ``coordinator`` keeps a window of requests in flight, and may be paused or cancelled;
- ``journal`` makes records durable, and holds the cursor from which a campaign is resumed, or
  retried for its rows without a verdict of Lean's;
- ``results`` defines a record, and files of them; ``report/`` evaluates these, and ``traces/``
  makes tables of them and their texts; ``tables`` and ``files`` write for several of these;
- ``rq_queue``, ``rq_job`` and ``rq_worker`` run campaigns as jobs of RQ, to which
  ``rq_connection`` leads. Nothing else imports RQ, which only ``leanq[campaigns]`` installs;
- ``client`` is ``LeanQClient(...).campaigns``, over Redis or through a gateway, and ``submitted``
  what these two have in common.
"""
