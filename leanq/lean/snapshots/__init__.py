"""Snapshots of elaborated prefixes: made, kept, fetched, and weighed against a replay."""
