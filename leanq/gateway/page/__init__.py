"""The page: a fleet in a browser, a request with its text, and a box to try Lean in.

The gateway renders everything and escapes all texts from Redis; the browser swaps in the changes.
"""
