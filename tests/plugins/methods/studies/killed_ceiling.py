"""A search for the ceiling in a process of its own, to be killed: python killed_ceiling.py STUDY RUN; tells events."""

import sys
from pathlib import Path

import torch

from bitplan.plugins.methods.ceiling import Effort, find_ceiling
from bitplan.study.spec import read_study

EFFORT = Effort(trainings=9, finalists=2, seed=3)


def search(study, run):
    """The ceiling at 70 %."""
    torch.set_num_threads(1)
    return find_ceiling(read_study(study), run, "70%", effort=EFFORT, progress=tell, trust=True)


def tell(done, total, what):
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    search(Path(sys.argv[1]), Path(sys.argv[2]))
