"""What methods say of themselves, beside the page of all methods and beside what they do."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from killed_search import RECIPE, Stripes, quantized
from typer.testing import CliRunner

import bitplan
from bitplan.cli.app import app
from bitplan.core.errors import InputError
from bitplan.core.method_facts import describe_method
from bitplan.core.registry import CHOOSERS, GAINS, JUDGES, QUANTIZERS, RELAXATIONS, SEARCHES
from bitplan.gains.base import Context, is_bound

PAGE = (Path(__file__).parents[3] / "docs" / "methods.md").read_text()
OPTIONS = {"alps_racing": {"budgets": "70%"}, "table": {"path": "x.csv"}}
ABOUT = {name: describe_method(CHOOSERS.make(name, OPTIONS.get(name, {}))) for name in CHOOSERS}
BOUND = [name for name in CHOOSERS if is_bound(CHOOSERS.get(name))]
BLIND = [name for name, about in ABOUT.items() if about.data and not about.labels]
N, G, C = 64, 4, 3
CHOICES = "w2a2,w3a3,w4a4"
KINDS = (GAINS, SEARCHES, RELAXATIONS, JUDGES)


@dataclass(frozen=True)
class Counting(Stripes):
    """Counts the samples that run."""

    name = "counting"

    def forward(self, model, batch):
        SEEN.append(len(batch[0]))
        return super().forward(model, batch)


@dataclass(frozen=True)
class Unlabelled(Counting):
    """Has labels that nobody may look at."""

    def loss(self, outputs, batch):
        raise AssertionError("looked at a label")

    batch_score = loss

    def batches(self, split, batch_size, seed=None):
        return ((images, None) for images, _ in super().batches(split, batch_size, seed))


SEEN = []


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(Stripes(), train=False)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in kind])
def test_the_page_says_of_each_what_it_says_of_itself(kind, name):
    about = describe_method(kind.get(name))
    rows = [row for row in re.findall(r"^\| `.*$", PAGE, re.MULTILINE) if f"`{name}`" in row.split(" | ")[0]]
    told = [[cell.strip() for cell in row.strip("| ").split(" | ")][-5:] for row in rows]
    yes = ["yes" if one else "no" for one in (about.data, about.labels, about.trains)]
    assert [*yes, about.passes, about.source] in told


@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_the_page_has_the_bits_of_every_quantizer(name):
    row = re.search(rf"^\| `{re.escape(name)}`.*$", PAGE, re.MULTILINE)[0]
    *_, bits, uniform, source = (cell.strip() for cell in row.strip("| ").split(" | "))
    method = QUANTIZERS.get(name)
    assert uniform == ("yes" if method.uniform else "no")
    assert bits == f"{shown_bits(method.weight_bits)}; {shown_bits(method.input_bits)}"
    assert source.split()[0] in method.source


def shown_bits(bits):
    whole = list(bits) == list(range(bits[0], bits[-1] + 1))
    return f"{bits[0]} to {bits[-1]}" if whole else ", ".join(map(str, bits))


@pytest.mark.parametrize("name", [name for name in CHOOSERS if name != "table"])
def test_who_says_that_it_needs_data_does_and_nobody_else(start, name):
    about = ABOUT[name]
    options = OPTIONS.get(name, {}) | ({"budget": "80%"} if name in BOUND else {})

    def estimated():
        return bitplan.estimate(name, *start, context=Context(recipe=RECIPE), **options)

    if about.data:
        with pytest.raises(InputError, match="task"):
            estimated()
    else:
        assert estimated().rows


@pytest.mark.parametrize("name", BLIND)
def test_who_says_that_it_looks_at_no_label_does_not(start, name):
    options = {"budget": "80%"} if name in BOUND else {}
    options |= {"spend": 300} if name in SEARCHES else {}
    assert bitplan.estimate(name, *start, context=Context(task=Unlabelled(samples=64)), **options).rows


@pytest.mark.parametrize("name", ["drift", "drop", "ompq", "imprint", "adaptive"])
def test_passes_are_those_that_are_run(start, name):
    options = {"samples": N} | ({"levels": 4} if name == "adaptive" else {})
    SEEN.clear()
    bitplan.estimate(name, *start, choices=CHOICES, context=Context(task=Counting(samples=N)), **options)
    written = ABOUT[name].passes
    python = written.replace("·", "*").replace("−", "-")
    expected = eval(python, {"N": N, "G": G, "C": C, "levels": 4})
    assert expected <= sum(SEEN) <= expected + 4  # a few to see that the task fits


def test_a_search_spends_what_its_judge_takes(start):
    for judge, least in (("drift", N), ("drop", N)):
        SEEN.clear()
        context = Context(task=Counting(samples=N))
        gains = bitplan.estimate("random_search", *start, choices=CHOICES, context=context, budget="80%", judge=judge,
                                 spend=4 * least)  # fmt: skip
        assert gains.counts["spend"] == 4 * least <= sum(SEEN) <= 4 * least + 4


def test_the_list_says_it():
    said = CliRunner().invoke(app, ["list", "searches"]).output
    assert {"name", "data", "labels", "trains", "passes", "source"} <= set(said.split())
    told = json.loads(CliRunner().invoke(app, ["list", "gains", "--json"]).output)
    assert told["fisher"] == {"data": True, "labels": False, "trains": False, "passes": "3·N",
                              "source": "Chen et al. 2021"}  # fmt: skip
    assert set(told) == set(GAINS)
