"""A small network at w4a4, aims by hand, and a relaxation in a process of its own, to be killed."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "gains"))
from toys import Stripes, quantized

import bitplan
from bitplan.core.precision import parse_choices
from bitplan.gains.base import Context
from bitplan.quant.blend import Shares, blended
from bitplan.selection.budget_constraint import BudgetConstraint

CHOICES = parse_choices("w2a2,w3a3,w4a4")
RECIPE = bitplan.Recipe(steps=6, batch_size=16, lr=0.02, schedule="constant")


@dataclass(frozen=True)
class Rows(Stripes):
    """Stripes of which a half can be held out."""

    start: int = 0
    step: int = 1
    held: bool = False
    name = "rows"

    def data(self, split):
        images, labels = super().data("train" if self.held else split)
        whole = split == "test" and not self.held
        return (images, labels) if whole else (images[self.start :: self.step], labels[self.start :: self.step])

    def size(self, split):
        return len(self.data(split)[1])

    def hold_out(self, share):
        assert share == 0.5
        return Rows(self.samples, self.slow, 0, 2), Rows(self.samples, self.slow, 1, 2, held=True)


@dataclass(frozen=True)
class Flat(Rows):
    """A loss that says nothing."""

    name = "flat"

    def loss(self, outputs, batch):
        return outputs.sum() * 0


class Given(Shares):
    """Shares that stay as they are, (G, C)."""

    def __init__(self, rows):
        super().__init__()
        self.__dict__["rows"] = rows

    def of_group(self, group):
        return self.rows[group], [True] * self.rows.shape[1]


def started():
    torch.set_num_threads(1)
    return quantized(Stripes(), train=False)


def members(graph):
    return [[layer.name for layer in group.layers] for group in graph.selectable]


def mixed(start, rows, choices=CHOICES):
    """The network with such shares of the choices."""
    model, graph = start
    return blended(model, members(graph), choices, Given(rows))


def aimed(graph, budget="80%", choices=CHOICES):
    return BudgetConstraint.of(graph, choices, bitplan.price("bmac", graph, choices), budget)


def by_hand(costs, capacity, choices=CHOICES):
    """An aim of one budget; costs (G, C)."""
    whole = np.array([costs])
    return BudgetConstraint(
        tuple(f"g{place}" for place in range(whole.shape[1])), choices[: whole.shape[2]], whole, np.array([capacity])
    )


def estimated(start, method, task=None, recipe=RECIPE, budget="80%", seed=1, **more):
    names = {"store", "progress", "epochs", "teacher", "engine"}
    context = Context(
        task=task or Rows(), recipe=recipe, seed=seed, **{key: more.pop(key) for key in names & more.keys()}
    )
    return bitplan.estimate(method, *start, choices=CHOICES, context=context, budget=budget, **more)


def tell(done, total, text):
    sys.stdout.write(f"{done}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    import bitplan.tune.resume as resume

    resume.SAVE_SECONDS, resume.SAVE_SHARE = 0.0, 1.0
    estimated(started(), "fracbits", Rows(slow=0.1), store=Path(sys.argv[1]), progress=tell)
