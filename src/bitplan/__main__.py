"""`python -m bitplan` is the command line."""

import sys

if not sys.flags.safe_path:  # the current folder, which may be anybody's: no library is to be found there
    del sys.path[0]

from bitplan.cli import main

main()
