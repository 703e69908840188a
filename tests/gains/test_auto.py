"""Which method `auto` takes for what is there, and methods that need data from what users have."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import CHOICES, RULES, Net, Stripes, quantized

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.registry import GAINS
from bitplan.gains.auto import TABLE
from bitplan.gains.base import Context, make_gain

TASK = Stripes(samples=32)
IMAGES = TensorDataset(*TASK.data("train"))
LOADER = DataLoader(IMAGES, 8)
RECIPE = bitplan.Recipe(steps=2, batch_size=8, lr=0.01)


@pytest.fixture(scope="module")
def start():
    return quantized(TASK, train=False)


@pytest.fixture(scope="module")
def float_net():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Net()


@pytest.fixture(scope="module")
def saved(start, float_net, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    bitplan.save_checkpoint(start[0], folder / "learned")
    torch.save(float_net.state_dict(), folder / "float.pth")
    return folder


def test_the_table_has_one_row_for_all_that_can_be_there():
    every = [(row.there, row.data, row.alone, row.time) for row in TABLE]
    assert len(set(every)) == len(every)
    rows = {(there, data) for there, data, alone, time in every if time == "seconds" and not alone}
    assert rows == {(there, data) for there, data, *_ in every}
    assert {there for there, _ in rows} == {"no weights", "float weights", "learned steps"}
    assert all(there != "no weights" for there, data in rows if data)
    missing = {row.method for row in TABLE} - {*GAINS}
    assert missing <= {"alps_racing"}, "only a plugin's may be missing"
    for row in (row for row in TABLE if row.method not in missing):
        make_gain(row.method, row.options)


def test_what_is_there_decides_and_one_line_says_so(start, float_net, saved):
    graph = start[1]
    on_meta = Net().to("meta")
    low = bitplan.quantize(start[0], bitplan.Plan.uniform(graph, "w2a2"))
    cases = [
        (None, None, "uniform", "no trained weights"),
        (on_meta, None, "uniform", "no trained weights"),
        (on_meta, LOADER, "uniform", "data is not used, since an untrained network answers at random"),
        (float_net, None, "eagl", "least squared error .mse.*drift.*8 passes"),
        (saved / "float.pth", None, "eagl", "least squared error"),
        (start[0], None, "eagl", "learned steps.*Better: drift"),
        (saved / "learned", None, "eagl", "learned steps"),
        (saved / "learned", LOADER, "eagl", "data is not used, since a file of weights cannot be run"),
        (low, LOADER, "eagl", "data is not used, since drift starts from every layer at w4a4"),
        (start[0], LOADER, "drift", "how far answers move.*Better: .*minutes.*alps_racing"),
        (float_net, LOADER, "drift", "calibrated at w4a4, not trained"),
    ]
    for model, batches, method, words in cases:
        gains = bitplan.estimate("auto", model, graph, choices=CHOICES, batches=batches)
        assert gains.method == method, (model, words)
        (note,) = gains.notes
        assert note.startswith(f"gains: auto takes {method}, since ")
        assert "\n" not in note
        assert " Better: " in note
        assert re.search(words, note), note


def test_weights_alone_are_planned_evenly_without_data(start, float_net, saved):
    """No score of weights alone was better than that for a language model (docs/language.md)."""
    for model in (float_net, saved / "float.pth"):
        gains = bitplan.estimate("auto", model, start[1], choices="w2a16,w3a16,w4a16")
        assert gains.method == "equal_bits"
        assert "Better: fisher, from a text" in gains.notes[0]
        costs = bitplan.price("memory", start[1], "w2a16,w3a16,w4a16")
        plan = bitplan.select(start[1], gains, costs, budget="3bpw")
        chosen = {str(plan.precisions[group.name]) for group in start[1].selectable}
        assert chosen == {"w3a16"}


def test_auto_gives_what_its_method_gives_and_takes_its_options(float_net, start):
    graph = start[1]
    asked = bitplan.estimate("eagl", float_net, graph, steps="mse")
    taken = bitplan.estimate("auto", float_net, graph)
    assert (taken.rows, taken.options, taken.id) == (asked.rows, asked.options, asked.id)
    assert asked.notes == ()
    assert bitplan.estimate("auto", float_net, graph, steps="absmax").options["steps"] == "absmax"
    with pytest.raises(InputError, match="unknown option of eagl 'samples'"):
        bitplan.estimate("auto", float_net, graph, samples=3)


def test_the_plan_has_the_notes_of_graph_and_gains(float_net):
    graph = bitplan.trace(float_net, TASK.example())
    gains = bitplan.estimate("auto", float_net, graph)
    plan = bitplan.select(graph, gains, bitplan.price("bmac", graph), budget="70%")
    ruled = graph.describe_rules(graph.fixed_beside(gains.choices))
    assert plan.notes == (*ruled, *graph.notes, *gains.notes)
    assert len(plan.notes) == len(ruled) + 2


NEEDS_LOSS = ["drop", "hawq", "hawq_v1", "hawq_v2", "alps", "regression", *({"alps_racing"} & {*GAINS})]
OPTIONS = {
    "hawq": {"probes": 2, "samples": 8},
    "hawq_v2": {"probes": 2, "samples": 8},
    "hawq_v1": {"iterations": 1, "samples": 8},
    "alps": {"steps": 1},
    "alps_racing": {"budgets": "70%", "steps": 1, "rounds": 1, "samples": 8},
    "regression": {"steps": 1, "networks": 3, "by": "loss"},
    "drop": {"samples": 16},
    "drift": {"samples": 16},
}


@pytest.mark.parametrize("method", [*NEEDS_LOSS, "drift"])
@pytest.mark.filterwarnings("ignore")
def test_every_method_that_needs_data_takes_a_loader(start, method):
    model, graph = start
    context = Context(recipe=RECIPE)
    loss = None if method == "drift" else F.cross_entropy
    given = bitplan.estimate(method, model, graph, context=context, batches=LOADER, loss=loss, **OPTIONS[method])
    again = bitplan.estimate(method, model, graph, context=context, batches=list(LOADER), loss=loss, **OPTIONS[method])
    assert set(given.rows) == {group.name for group in graph.selectable}
    assert given.rows == again.rows  # the same samples in the same order, from a loader or a list


@pytest.mark.parametrize("method", NEEDS_LOSS)
def test_a_loss_that_is_not_known_is_one_line(start, method):
    with pytest.raises(InputError, match="the loss of these batches is not known: give loss=…") as caught:
        bitplan.estimate(method, *start, context=Context(recipe=RECIPE), batches=LOADER, **OPTIONS[method])
    assert "\n" not in str(caught.value)


class Named(nn.Module):
    """As Hugging Face's models are: keyword arguments, and a loss of its own."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, pixels, labels=None):
        scores = self.net(pixels)
        return {"logits": scores, "loss": None if labels is None else F.cross_entropy(scores, labels)}


def test_a_models_own_loss_gives_what_loss_gives(float_net):
    def started(net, example):
        graph = bitplan.trace(net, example, rules=RULES)
        made = bitplan.quantize(net, bitplan.Plan.uniform(graph, "w4a4"))
        bitplan.calibrate_(made, [example if isinstance(example, dict) else (example,)])
        return made, graph

    images, labels = TASK.data("train")
    plain = bitplan.estimate("drop", *started(float_net, images[:8]), batches=LOADER, loss=F.cross_entropy, samples=16)
    named = [{"pixels": images[i : i + 8], "labels": labels[i : i + 8]} for i in range(0, 32, 8)]
    own = bitplan.estimate("drop", *started(Named(float_net), {"pixels": images[:8]}), batches=named, samples=16)
    assert [*own.rows.values()] == [*plain.rows.values()]


def test_drift_of_a_float_network_is_that_of_one_calibrated_at_the_highest_choice(float_net):
    graph = bitplan.trace(float_net, TASK.example(), rules=RULES)
    before = {name: value.clone() for name, value in float_net.state_dict().items()}
    gains = bitplan.estimate("drift", float_net, graph, batches=LOADER, samples=16)
    assert gains.notes == ("start: drift lowers a copy at w4a4 that 32 samples calibrated and nothing has trained",)
    assert all(torch.equal(value, before[name]) for name, value in float_net.state_dict().items())
    assert any(row[1] > 0 for row in gains.rows.values())


def test_what_contradicts_itself_or_is_missing_is_one_line(start):
    cases = [
        ({"loss": F.cross_entropy}, "loss=… is that of batches=…"),
        ({"batches": LOADER, "context": Context(task=TASK)}, "there are batches and a task: give one of them"),
        ({"batches": TASK, "loss": F.cross_entropy}, "the task stripes has its own loss"),
        ({}, "drop runs the network on data: give a task, --task, or batches, --data package.module:loader"),
    ]
    for given, message in cases:
        with pytest.raises(InputError, match=message):
            bitplan.estimate("drop", *start, **given)
    with pytest.raises(InputError, match="regression scores networks on a test split, and that of batches is empty"):
        bitplan.estimate("regression", *start, batches=LOADER, loss=F.cross_entropy, context=Context(recipe=RECIPE))
    by_task = bitplan.estimate("drop", *start, batches=TASK, samples=16)
    assert by_task.rows == bitplan.estimate("drop", *start, context=Context(task=TASK), samples=16).rows


MINUTES = "alps_racing" if "alps_racing" in GAINS else "drift"  # a plugin's


@pytest.mark.parametrize(("time", "method"), [("seconds", "drift"), ("minutes", MINUTES), ("hours", "alps")])
def test_more_time_takes_a_method_that_uses_it_and_one_line_says_why(start, time, method):
    more = {"context": Context(task=TASK, recipe=RECIPE)} | ({"budget": "70%"} if time == "minutes" else {})
    gains = bitplan.estimate("auto", *start, choices=CHOICES, time=time, **more)
    assert gains.method == method
    assert "time" not in gains.options
    assert gains.notes[0].startswith(f"gains: auto takes {method}, since there ")
    assert "\n" not in gains.notes[0]


def test_time_changes_nothing_where_there_is_no_data_and_must_be_a_word_that_auto_knows(start):
    assert bitplan.estimate("auto", *start, choices=CHOICES, time="hours").method == "eagl"
    with pytest.raises(InputError, match="time is seconds, minutes or hours, not 'days'"):
        bitplan.estimate("auto", *start, choices=CHOICES, time="days")
