"""Reports over results: figures (``report``), what changed (``comparison``), a page and a plot."""
