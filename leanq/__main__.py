"""``python -m leanq``."""

from leanq.cli import main

main()
