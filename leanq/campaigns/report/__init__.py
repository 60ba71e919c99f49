"""Reports on results: figures, and a comparison with older results, as text and as a page."""
