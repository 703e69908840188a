"""Torture sweeps: `python -m benchmarks.torture --kills 1000`, and print what was survived."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.torture.blows import Blows
from benchmarks.torture.campaign import Campaign, Tally
from benchmarks.torture.network import STUDY
from bitplan.study.spec import read_study
from bitplan.study.sweep import sweep

_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # a disk that is flushed is many times slower
KINDS = {"driver": 30, "one_of_two": 20, "frozen": 1, "damaged": 6, "workers": 1, "full": 3}
"""How often each blow is struck, as shares."""


def main() -> None:
    """Strike until so many kills, then print the table; exit with 1 if anything was lost or wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=150, help="how many processes are killed")
    parser.add_argument("--seed", type=int, default=0, help="decides which blows fall, when and on whom")
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=_MEMORY) as home:
        tally = torture(Path(home), kills=options.kills, seed=options.seed)
    print(f"\n{tally.table()}\n\nseed {options.seed}, {(time.perf_counter() - begin) / 60:.1f} minutes")
    for line in tally.lines[:20]:
        print(line)
    sys.exit(bool(tally.faults))


def torture(home: Path, *, kills: int, seed: int) -> Tally:
    """Fight campaign after campaign until so many processes were killed."""
    torch.set_num_threads(1)
    (home / "study.toml").write_text(STUDY)
    study = read_study(home / "study.toml")
    sound, tally, chance = home / "sound", Tally(), random.Random(seed)
    sweep(study, sound, trust=True)  # nobody disturbs this one; and everything is imported now
    begin = time.perf_counter()
    sweep(study, home / "timed", trust=True)
    span = time.perf_counter() - begin
    print(f"an undisturbed sweep takes {span:.2f} s")
    for number in itertools.count():
        if tally.kills >= kills or tally.faults:
            return tally
        campaign = Campaign(study, home / f"run{number}", sound, chance, tally)
        campaign.fight(Blows(span), KINDS, kills)
        print(f"run {number}: {tally.kills} kills, {dict(tally.faults) or 'nothing lost or wrong'}", flush=True)
        shutil.rmtree(campaign.run)
    return tally


if __name__ == "__main__":
    main()
