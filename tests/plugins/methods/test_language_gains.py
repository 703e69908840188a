"""Gains of language models: weights alone are quantized, in groups, and the float network is what they start from."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.jobs import Job
from bitplan.gains.base import Context
from bitplan.gains.jobs import BatchWork
from bitplan.plugins.methods.weight_error import WeightError
from bitplan.quant.convert import quantizers_of, weights_of
from texts import language_task

CHOICES = "w2a16,w3a16,w4a16"
GROUPS = "groups:size=16,zeros=true"
RULES = bitplan.Rules(first="w16a16", last="w16a16", embeddings="w16a16", narrow=0).for_choices(CHOICES)
DATA = ("drift", "drop", "fisher", "moments")


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A small trained model, its task and its graph."""
    model, folder, task = language_task(tmp_path_factory.mktemp("language"))
    return model, bitplan.trace(model, task.example(), rules=RULES), task, folder


def estimated(language, method, **options):
    model, graph, task, _ = language
    context = Context(task=task, quantizer=GROUPS)
    return bitplan.estimate(method, model, graph, choices=CHOICES, context=context, **options)


def at(language, lowered):
    """The float network with these groups' layers quantized as by a plan, everything else float."""
    model, graph, _, _ = language
    precisions = {
        layer.name: lowered.get(group.name, bitplan.Precision.parse("w16a16"))
        for group in graph.groups
        for layer in group.layers
    }
    plan = bitplan.Plan.uniform(graph, "w4a16").model_copy(update={"precisions": precisions})
    return bitplan.quantize(model, plan, method=GROUPS)


@pytest.mark.parametrize("method", [*DATA, "weight_error"])
def test_more_bits_gain_more_and_the_model_stays(language, method):
    model = language[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gains = estimated(language, method)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    rows = np.array(list(gains.rows.values()))
    assert (rows[:, 0] == 0).all()
    total = rows.sum(axis=0)
    if method != "drop":  # whose loss, of a few windows of a little trained network, may fall as well
        assert 0 < total[1] < total[2]


def test_drift_is_the_divergence_from_the_float_network(language):
    model, graph, task, _ = language
    gains = estimated(language, "drift", samples=3)
    assert gains.options == {"samples": 3, "batch_size": 1, "temperature": 1.0}  # as the task says
    context = Context(task=task, quantizer=GROUPS)

    job = Job(work="drift", network="", weights="", task="", seed=0, batches=3, batch_size=1)
    batches = BatchWork(model, context.task).drawn(job)
    group = graph.selectable[2].name
    found = []
    for choice in map(bitplan.Precision.parse, CHOICES.split(",")):
        network = at(language, {group: choice})
        with torch.no_grad():
            logs = [[F.log_softmax(one(batch).logits, -1) for one in (model, network)] for batch in batches]
        found.append(
            np.mean([float(F.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()) for p, q in logs])
        )
    assert gains.rows[group] == pytest.approx([found[0] - one for one in found], rel=1e-4, abs=1e-7)


def test_moments_are_what_quantized_weights_change_about_a_layer_s_outputs(language):
    model, graph, task, _ = language
    gains = estimated(language, "moments", samples=task.size("train"), batch_size=task.size("train"))
    name = "model.layers.1.mlp.down_proj"
    read = {}
    hook = model.get_submodule(name).register_forward_hook(lambda _, args, out: read.update(x=args[0], out=out))
    with torch.no_grad():
        model(torch.cat(list(task.batches("train", 8))))
    hook.remove()
    group = next(group.name for group in graph.selectable if any(layer.name == name for layer in group.layers))
    expected = []
    for choice in CHOICES.split(","):
        lost = _rounded(language, name, choice) - model.get_submodule(name).weight.detach()
        expected.append(float(F.linear(read["x"], lost).square().sum() / read["out"].square().sum()))
    assert gains.rows[group] == pytest.approx([expected[0] - one for one in expected], rel=1e-3)
    absolute = estimated(language, "moments", relative=False).rows[group]
    assert absolute[2] != pytest.approx(gains.rows[group][2])


def _rounded(language, layer, choice):
    model, graph, _, _ = language
    made = bitplan.quantize(model, bitplan.Plan.uniform(graph, choice), method=GROUPS)
    weight = weights_of(made)[layer]
    return quantizers_of(made)[layer].weight(weight).detach()


@pytest.mark.parametrize("relative", [True, False])
def test_weight_errors_of_the_network_and_of_its_file_are_the_same(language, relative):
    model, graph, _, folder = language
    context = Context(quantizer=GROUPS)
    options = {"choices": CHOICES, "context": context, "relative": relative}
    network = bitplan.estimate("weight_error", model, graph, **options)
    file = bitplan.estimate("weight_error", folder, graph, **options)
    for name, row in network.rows.items():
        assert file.rows[name] == pytest.approx(row, rel=1e-4)
    single = next(group for group in graph.selectable if len(group.layers) == 1)
    layer = single.layers[0].name
    weight = model.get_submodule(layer).weight.detach()
    errors = [float((_rounded(language, layer, choice) - weight).square().sum()) for choice in CHOICES.split(",")]
    scale = float(weight.square().sum()) if relative else 1.0
    assert network.rows[single.name] == pytest.approx([(errors[0] - one) / scale for one in errors], rel=1e-4)


def test_some_rows_of_a_file_tell_about_all(language):
    _, graph, _, folder = language
    context = Context(quantizer=GROUPS)
    whole = bitplan.estimate("weight_error", folder, graph, choices=CHOICES, context=context)
    some = bitplan.estimate("weight_error", folder, graph, choices=CHOICES, context=context, rows=8)
    for name, row in some.rows.items():
        assert row[-1] == pytest.approx(whole.rows[name][-1], rel=0.5)
        assert row != whole.rows[name]


def test_the_quantizer_that_will_be_used_counts(language):
    model, graph, task, _ = language
    found = [
        bitplan.estimate(
            "weight_error", model, graph, choices=CHOICES, context=Context(task=task, quantizer=quantizer)
        ).rows
        for quantizer in ("groups:size=8,zeros=true", "lsq", None, "groups")
    ]
    assert found[0] != found[1]
    assert found[2] == found[3]  # weights alone have steps by group, unless it is said


def test_in_context_groups_are_moved_from_the_plan_that_is_settled_on(language):
    model, graph, task, _ = language
    context = Context(task=task, quantizer=GROUPS)
    gains = bitplan.estimate(
        "drift_in_context", model, graph, choices=CHOICES, context=context, budget="3bpw", samples=2, decide=4
    )
    plan = bitplan.select(graph, gains, bitplan.price("memory", graph, CHOICES), budget="3bpw")
    assert len(set(map(str, plan.precisions.values()))) > 1
    assert gains.budgets


def test_bad_options_are_said(language):
    with pytest.raises(InputError, match="rows must be at least 0"):
        WeightError(rows=-1)
    with pytest.raises(InputError, match="reads a torch.nn.Module or a checkpoint's path, not int"):
        bitplan.estimate("weight_error", 3, language[1], choices=CHOICES)
    with pytest.raises(InputError, match="moments looks at what layers read: give a task"):
        bitplan.estimate("moments", language[0], language[1], choices=CHOICES)
    with pytest.raises(InputError, match="no 9 bits"):
        bitplan.estimate("weight_error", language[3], language[1], choices="w2a16,w9a16")


def test_a_convolution_and_a_bare_weight_count_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.table = nn.Conv2d(3, 8, 3), nn.Parameter(torch.randn(10, 8))

        def forward(self, x):
            return F.linear(self.conv(x).mean((2, 3)), self.table)

    torch.manual_seed(0)
    model = Net()
    graph = bitplan.trace(model, torch.zeros(1, 3, 8, 8), rules=bitplan.Rules(first=None, last=None, narrow=0))
    data = [(torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.long)) for _ in range(2)]
    for choices in ("w2a16,w4a16", "w2a4,w4a4"):
        gains = bitplan.estimate("moments", model, graph, choices=choices, batches=data, samples=8, batch_size=4)
        assert all(row[1] > 0 for row in gains.rows.values())
