"""What racing, searches and judges say that they spent is what ran."""

from dataclasses import replace

import pytest
import torch
from test_choosing import SHARE, Marked
from test_spend import CHOICES, SHORT, G, N, Watched, spent
from toys import Stripes, quantized

from bitplan.core.precision import parse_choices
from bitplan.core.registry import CHOOSERS
from bitplan.core.spend import meter_spend
from bitplan.gains.base import Context, make_constraint
from bitplan.tasks.base import choosing_task


@pytest.fixture(scope="module")
def start():
    torch.set_num_threads(1)
    return quantized(Stripes(), train=False)


def test_racing_says_both_the_screen_and_the_trainings(start):
    gains = spent(start, "alps_racing", budgets="80%", steps=4, rounds=2, samples=N)
    trained = gains.counts["samples"]
    said = gains.spend
    assert (said.forwards, said.backwards) == (N * (1 + G * 2) + trained, trained)
    assert said.trainings == gains.counts["trainings"]
    assert said.labels


@pytest.mark.parametrize(("judge", "labels"), [("drift:samples=32", False), ("drop:samples=32", True),
                                               ("finetuned:steps=2", True)])  # fmt: skip
def test_a_search_says_what_its_meter_does_and_that_is_what_ran(start, judge, labels):
    context = Context(task=Watched(samples=128), recipe=SHORT)
    with meter_spend() as meter:
        gain = CHOOSERS.make("random_search", {"judge": judge, "spend": 300})
        context = replace(context, aim=make_constraint(start[1], parse_choices(CHOICES), "80%"))
        found = gain.layer_gains(*start, parse_choices(CHOICES), context)
    assert found.spend == meter.spent
    assert found.spend.labels is labels
    assert 0 < found.spend.passes <= 300


def test_the_finetuned_judge_says_what_it_takes(start):
    search = CHOOSERS.make("random_search", {"judge": "finetuned:steps=2", "spend": 600})
    choices = parse_choices(CHOICES)
    context = Context(task=choosing_task(Marked(), SHARE), recipe=SHORT, aim=make_constraint(start[1], choices, "80%"))
    with meter_spend() as meter:
        found = search.layer_gains(*start, choices, context)
    assert found.spend == meter.spent
    assert found.spend.passes == found.spend.trainings * (3 * 32 + 32)
