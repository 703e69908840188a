"""Drops that add up are found to, drops that do not are told."""

import itertools
import shutil

import pytest
import torch
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.precision import parse_choices
from bitplan.core.studies import Fit, Pairs
from bitplan.gains.base import Context
from bitplan.graph.rules import Rules
from bitplan.store.run_folder import RunFolder
from bitplan.study.additivity import HOLDS, correlation, doubts, pair_drops, study_fit, study_pairs
from bitplan.study.context import RunContext
from bitplan.study.trials import starts

CHOICES = parse_choices("w2a2,w4a4")


class Sum(nn.Module):
    """Five layers side by side, each on inputs of its own: what one loses does not depend on the others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 20)
        self.parts = nn.ModuleList(nn.Linear(4, 1) for _ in range(5))
        self.last = nn.Linear(1, 1)

    def forward(self, x):
        pieces = self.first(x).split(4, dim=1)
        return self.last(torch.stack([part(piece) for part, piece in zip(self.parts, pieces, strict=True)]).sum(0))


class Nothing:
    """A task whose loss is the mean output, or its exponential."""

    name, metric, higher_is_better, version = "nothing", "nothing", False, 1

    def __init__(self, steep=None):
        self.steep = steep

    def size(self, split):
        return 64

    def batches(self, split, batch_size, seed=None):
        generator = torch.Generator().manual_seed(seed or 0)
        return (torch.randn(batch_size, 4, generator=generator) for _ in range(64 // batch_size))

    def forward(self, model, batch):
        return model(batch)

    def loss(self, outputs, batch):
        return outputs.mean() if self.steep is None else (self.steep * outputs.mean()).sin()

    def batch_score(self, outputs, batch):
        return float("nan")


@pytest.fixture
def network():
    model = Sum()
    graph = bitplan.trace(model, torch.empty(1, 4), rules=Rules(narrow=0))
    top = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(top, [torch.randn(64, 4)])
    return top, graph


def test_what_adds_up_by_construction_is_found_to(network):
    model, graph = network
    assert len(graph.selectable) == 5
    found = pair_drops(model, graph, CHOICES, Context(task=Nothing()), count=80, by="loss")
    assert len(found.pairs) == len(list(itertools.combinations(range(5), 2))), "every pair once, where there are fewer"
    for pair in found.pairs:
        assert pair.predicted == pytest.approx(found.alone[pair.first] + found.alone[pair.second])
        # the layer after the sum quantizes its input, which is all that is not linear
        assert pair.measured == pytest.approx(pair.predicted, abs=0.05)
    assert found.correlation > 0.95
    assert doubts(found, None) == []
    assert Pairs.from_json(found.to_json()) == found


def test_what_does_not_add_up_is_told(network):
    model, graph = network
    found = pair_drops(model, graph, CHOICES, Context(task=Nothing(steep=200.0)), by="loss")
    assert found.correlation < HOLDS
    (doubt,) = doubts(found, None)
    assert f"R = {found.correlation:.3f}" in doubt


def test_the_same_seed_gives_the_same_pairs(network):
    model, graph = network
    chosen = [
        [(pair.first, pair.second) for pair in pair_drops(model, graph, CHOICES, context, count=4, by="loss").pairs]
        for context in (Context(task=Nothing(), seed=seed) for seed in (1, 1, 2))
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(chosen[0]) == 4


def test_without_a_spread_there_is_no_correlation():
    with pytest.raises(InputError, match="all drops are the same"):
        correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])
    assert correlation([1.0, 2.0, 4.0], [2.0, 4.0, 8.0]) == 1


def test_both_experiments_on_a_run(swept, tmp_path):
    run = shutil.copytree(swept, tmp_path / "run")
    study = RunFolder(run).study
    pairs = study_pairs(study, run, count=3, samples=64, by="loss", trust=True)
    fit = study_fit(study, run, steps=2, per_level=2, trust=True)
    assert (RunFolder(run).pairs, RunFolder(run).fit) == (pairs, fit)
    assert pairs.metric == "training loss"
    assert len(pairs.pairs) == 3
    assert isinstance(fit, Fit)
    assert fit.networks == len(fit.vectors) >= 5
    high = RunContext(study, RunFolder(run), trust=True).start(starts(study).high.id)
    again = pair_drops(
        high,
        RunFolder(run).graph,
        study.choices,
        Context(task=RunContext(study, RunFolder(run), trust=True).task),
        count=3,
        samples=64,
        by="loss",
    )
    assert again.alone == pairs.alone
    shutil.rmtree(run / "starts")
    again = study_pairs(study, run, count=3, samples=64, by="loss", trust=True)
    assert again.pairs == pairs.pairs, "the network is made again"
    shutil.rmtree(run / "trials")
    with pytest.raises(InputError, match="has no network at w4a4 yet"):
        study_pairs(study, run, trust=True)
