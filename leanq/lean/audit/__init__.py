"""Accepted means proved: what is held against Lean's own word."""
