"""``python -m leanq``."""

from .cli import main

main()
