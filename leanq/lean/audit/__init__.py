"""Accepted means proved: checks of compiled files that do not rest on Lean's word."""
