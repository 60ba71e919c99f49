"""The fork server: a process that has imported a header once, and is forked for each text."""
