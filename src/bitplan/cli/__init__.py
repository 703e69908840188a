"""The command line: one short function per verb; the only place that talks to the terminal."""

from __future__ import annotations

import logging
import os
import sys


def main() -> None:
    """Run a verb; bad input is one line and exit code 2, never a traceback."""
    from bitplan.cli.app import app
    from bitplan.core.errors import InputError

    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        app()
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
