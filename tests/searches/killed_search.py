"""A search in a process of its own, to be killed: python killed_search.py STORE, telling every plan that is judged."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "gains"))
from toys import RECIPE, Stripes, quantized

import bitplan
from bitplan.gains.base import Context


def searched(method, task, store=None, progress=None, recipe=RECIPE, **options):
    """What a search finds for the network that is always the same, untrained."""
    torch.set_num_threads(1)
    model, graph = quantized(Stripes(), train=False)
    context = Context(task=task, recipe=recipe, store=store, progress=progress, seed=1)
    told = {"judge": "drift:samples=64", "spend": 128 * 12} | options
    return bitplan.estimate(method, model, graph, choices="w2a2,w3a3,w4a4", context=context, budget="80%", **told)


def tell(done, total, text):
    sys.stdout.write(f"{done}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    searched("evolution", Stripes(slow=0.05), Path(sys.argv[1]), tell, population=2)
