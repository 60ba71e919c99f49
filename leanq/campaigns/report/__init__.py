"""Reports on results: figures as text and as a page."""
