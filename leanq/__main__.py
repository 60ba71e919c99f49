"""The program ``leanq``, also as ``python -m leanq``."""

from __future__ import annotations

import sys

_INTERRUPTED = 130


def main() -> None:
    """Runs the command line; Ctrl-C ends it without a traceback, even during imports."""
    try:
        from leanq.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except RuntimeError as error:
        # Python 3.11 wraps exceptions in this while a class names its attributes.
        if isinstance(error.__cause__, KeyboardInterrupt):
            sys.exit(_INTERRUPTED)
        raise


if __name__ == "__main__":
    main()
