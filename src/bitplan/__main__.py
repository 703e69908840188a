"""`python -m bitplan` is the command line."""

from bitplan.cli import main

main()
