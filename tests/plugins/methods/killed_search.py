"""A search in a process of its own, to be killed: python killed_search.py STORE, telling every plan that is judged."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "gains"))
from toys import RECIPE, Stripes, quantized

import bitplan
from bitplan.gains.base import Context


@dataclass(frozen=True)
class Held(Stripes):
    """Stripes of which the last training samples can be held out, `held` of them."""

    held: int = 0
    shown: bool = False

    def size(self, split):
        return len(self.data(split)[1])

    def data(self, split):
        images, labels = super().data("train" if self.shown else split)
        kept = slice(None) if not self.held else slice(-self.held, None) if self.shown else slice(-self.held)
        return (images, labels) if split == "test" and not self.shown else (images[kept], labels[kept])

    def hold_out(self, share):
        held = round(share * self.samples)
        return replace(self, held=held), replace(self, held=held, shown=True)


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
