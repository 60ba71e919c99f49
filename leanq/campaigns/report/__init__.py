"""Reports on results: figures, a comparison with older results, and both as text and plot."""
