"""The program ``leanq``, also as ``python -m leanq``."""

from __future__ import annotations

import sys

_INTERRUPTED = 130


def main() -> None:
    """Runs the command line; Ctrl-C ends it without a traceback, also while it is imported."""
    try:
        from leanq.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except RuntimeError as error:
        # Python 3.11 makes this of what is raised while a class takes its attributes' names.
        if isinstance(error.__cause__, KeyboardInterrupt):
            sys.exit(_INTERRUPTED)
        raise


if __name__ == "__main__":
    main()
