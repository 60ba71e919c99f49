"""Reports over a campaign's results: figures (``report``), what changed (``comparison``), a page and
a plot."""
