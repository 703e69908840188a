"""The command line: one short function per command; the only place that talks to the terminal."""

from __future__ import annotations

import atexit
import gc
import os
import sys


def main() -> None:
    """Run a command; bad input is one line and exit code 2, never a traceback."""
    from bitplan.cli.terminal import begin_loading

    begin_loading()
    from bitplan.cli.app import app
    from bitplan.cli.terminal import tell_error, tell_traceback
    from bitplan.core.errors import InputError
    from bitplan.core.escaping import log_to_terminal

    atexit.register(gc.freeze)  # or Python looks through all that torch imported once more before it ends
    log_to_terminal()
    sys.excepthook = tell_traceback
    try:
        app()
    except InputError as error:
        tell_error(error)
        sys.exit(2)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
