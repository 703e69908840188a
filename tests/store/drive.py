"""A driver in a process of its own: `python drive.py FOLDER COUNT SECONDS ENGINE [key=value …]`."""

import sys
from pathlib import Path

from errands import Errand, Square, shelf

from bitplan.store.engines import make_engine
from bitplan.store.jobs import run_jobs


def main() -> None:
    """Square the first numbers, and print the answers."""
    folder, count, seconds, name, *written = sys.argv[1:]
    options = {key: int(value) if value.isdecimal() else value for key, _, value in (w.partition("=") for w in written)}
    (Path(folder) / "diary").mkdir(parents=True, exist_ok=True)
    work = Square(Path(folder) / "diary", seconds=float(seconds))
    jobs = [Errand(number=number) for number in range(int(count))]
    outcomes = run_jobs(work, jobs, shelf=shelf(Path(folder)), engine=make_engine(name, options))
    sys.stdout.write(f"{sorted(outcome.value for _, outcome in outcomes)}\n")


if __name__ == "__main__":
    main()
