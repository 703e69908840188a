"""ALPS in a process of its own, to be killed: python killed_alps.py STORE, telling every job that is done."""

import sys
from pathlib import Path

import torch
from toys import RECIPE, Stripes, quantized

import bitplan
from bitplan.gains.base import Context


def estimate(task, store=None, progress=None):
    """The gains of the network that is always the same, by few steps."""
    torch.set_num_threads(1)
    model, graph = quantized(Stripes())
    context = Context(task=task, recipe=RECIPE, store=store, progress=progress, seed=1)
    return bitplan.estimate("alps", model, graph, context=context, steps=5, seeds=2)


def tell(done, total, text):
    sys.stdout.write(f"{done}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    estimate(Stripes(slow=0.02), Path(sys.argv[1]), tell)
