"""Lean's own language server: one process for a header, which reads one text after another.

``protocol``: messages over pipes; ``document``: one process; ``documents``: which process reads
which text.
"""
