"""Damage files and read them: `python -m benchmarks.fuzz [--seconds N] [--reader NAME] [--seed S]`.

Every reader of bitplan's gets files of the corpus (tests/fuzz/corpus) and damaged ones made from them, in a process
whose memory is limited. Only bitplan's own errors may come out, in one line that names the file, within seconds and
without much memory. What breaks this is said, and written into the corpus.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from benchmarks.fuzz.driving import CORPUS, drive
from benchmarks.fuzz.readers import READERS


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--seconds", type=float, default=60.0, help="in all, shared by the readers")
    asked.add_argument("--reader", action="append", choices=sorted(READERS), help="one or several; else all")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--seeds", action="store_true", help="write the sound files anew, and do nothing else")
    options = asked.parse_args()
    if options.seeds:
        from benchmarks.fuzz.seeds import write_seeds

        write_seeds(CORPUS)
        return 0
    readers = options.reader or sorted(READERS)
    done = drive(readers, CORPUS, seed=options.seed, seconds=options.seconds)
    for name in readers:
        refused = f"{done.refused[name]:,} refused" if done.read[name] else "no file"
        print(f"{name:12} {done.read[name]:8,} files, {refused}")
    print(f"{sum(done.read.values()):,} files in all, {len(done.found)} findings")
    for (reader, what), count in Counter((one.reader, one.what) for one in done.found).most_common():
        print(f"  {reader}: {what} ({count} times)")
    return bool(done.found)


sys.exit(main())
