"""Torture sweeps: `python -m benchmarks.torture --kills 1000`, and print what was survived."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # a disk that is flushed is many times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    """Strike until so many kills, then say what came of it; exit code 1 where anything was lost or wrong."""
    from benchmarks.torture.disk import start_where_mounting_is_allowed

    asked = _arguments()
    start_where_mounting_is_allowed()
    from benchmarks.torture.run import torture

    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=asked.home) as home:
        tally = torture(Path(home), kills=asked.kills, seed=asked.seed, ray=asked.ray, tell=print)
    print(f"\n{tally.table()}\n\nseed {asked.seed}, {(time.perf_counter() - begin) / 60:.1f} minutes")
    for line in tally.lines[:20]:
        print(line)
    sys.exit(bool(tally.faults))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=150, help="how many processes are killed")
    parser.add_argument("--seed", type=int, default=0, help="what is done, when and to whom follows from it")
    parser.add_argument("--ray", type=int, default=2, help="how many runs are swept on Ray; 0 for none")
    parser.add_argument("--home", type=Path, default=_MEMORY, help="where runs lie; in memory unless said, if there is")
    return parser.parse_args()


if __name__ == "__main__":
    main()
