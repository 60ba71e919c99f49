"""Runs untrusted programs, one at a time in each sandbox, under limits."""
