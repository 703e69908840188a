"""Every use of a weight that a plan quantizes is quantized, whatever the network does with the weight."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.records import Use
from bitplan.quant.convert import integer_weights, quantizers_of, weight_steps
from bitplan.quant.proof import allow_unreached_, prove
from bitplan.quant.sites import find_sites
from nets import Net, dynamo

FREE = bitplan.Rules(first=None, last=None, narrow=0, embeddings=None)
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([[2, 0, 1], [1, 1, 3]])


def matrix(*shape):
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))


def standardized(net, x):
    weight = net.part.weight.flatten(1)
    weight = F.batch_norm(weight[None], None, None, weight=net.gain.view(-1) * 0.5, training=True, momentum=0.0)
    return F.linear(x, weight.view_as(net.part.weight), net.part.bias)


class Head(nn.Module):
    """Multiplies by a weight that it is given."""

    def forward(self, x, weight):
        return F.linear(x, weight)


class Table(nn.Module):
    """Computes a weight for others."""

    def __init__(self):
        super().__init__()
        self.rows = matrix(4, 8)

    def forward(self):
        return torch.tanh(self.rows) * 0.5


def parts():
    torch.manual_seed(0)
    made = {
        "part": nn.Linear(8, 4), "deep": nn.Sequential(nn.Linear(8, 4)), "conv": nn.Conv1d(8, 4, 3), "head": Head(),
        "first": nn.Linear(8, 8), "second": nn.Linear(8, 8), "table": Table(),
        "normed": nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)),
        "m": matrix(4, 8), "wide": matrix(6, 8), "tall": matrix(8, 4), "a": matrix(8, 6), "b": matrix(6, 4),
        "bias": nn.Parameter(torch.randn(4)), "gain": nn.Parameter(torch.rand(4, 1) + 0.5),
        "up": matrix(4, 1), "down": matrix(1, 8),
    }  # fmt: skip
    made["second"].weight = made["first"].weight
    return made


# What a network does, and the layers that it has.
NETWORKS = {
    "a child's weight": (lambda net, x: F.linear(x, net.part.weight, net.bias), {"part"}),
    "a child's weight by keyword": (lambda net, x: F.linear(input=x, weight=net.part.weight), {"part"}),
    "called and handed out": (lambda net, x: net.part(x) + F.linear(x.tanh(), net.part.weight), {"part"}),
    "a grandchild's weight": (lambda net, x: F.linear(x, net.deep[0].weight), {"deep.0"}),
    "given to a stranger": (lambda net, x: net.head(x, net.part.weight), {"part"}),
    "a view given to a stranger": (lambda net, x: net.head(x, net.part.weight[1:3]), {"part"}),
    "a copy given to a stranger": (lambda net, x: net.head(x, net.part.weight.flip(0)), {"part"}),
    "tied modules": (lambda net, x: net.second(net.first(x).tanh()), {"first"}),
    "transposed": (lambda net, x: x @ net.m.t(), {"m"}),
    "transposed by attribute": (lambda net, x: x @ net.m.mT, {"m"}),
    "transposed and copied": (lambda net, x: x @ net.m.T.contiguous(), {"m"}),
    "from the left": (lambda net, x: (net.m @ x.transpose(1, 2)).transpose(1, 2), {"m"}),
    "sliced": (lambda net, x: F.linear(x, net.wide[1:5]) + F.linear(x.tanh(), net.wide[:4]), {"wide"}),
    "cast": (lambda net, x: F.linear(x, net.m.double().float()), {"m"}),
    "concatenated": (lambda net, x: F.linear(x, torch.cat([net.m, net.wide])), {"m", "wide"}),
    "gathered": (lambda net, x: torch.einsum("btd,ijd->btij", x, net.m[INDEX]), {"m"}),
    "three operands": (lambda net, x: torch.einsum("btd,de,ef->btf", x, net.a, net.b), {"a", "b"}),
    "tensordot": (lambda net, x: torch.tensordot(x, net.tall, dims=1), {"tall"}),
    "inner": (lambda net, x: torch.inner(x, net.m), {"m"}),
    "addmm": (lambda net, x: torch.addmm(net.bias, x.reshape(-1, 8), net.tall), {"tall"}),
    "a convolution": (lambda net, x: F.conv1d(x.transpose(1, 2), net.conv.weight), {"conv"}),
}
COMPUTED = {
    "scaled": (lambda net, x: F.linear(x, net.m * 0.5), {"m"}),
    "standardized": (standardized, {"part"}),
    "resized": (lambda net, x: x @ F.interpolate(net.tall[None], 6, mode="linear")[0], {"tall"}),
    "with a low-rank update": (lambda net, x: F.linear(x, net.part.weight + net.up @ net.down), {"part"}),
    "a product of two": (lambda net, x: x @ (net.a @ net.b), {"a"}),
    "multiplied before what is read": (lambda net, x: torch.einsum("de,ef,btd->btf", net.a, net.b, x), {"a"}),
    "computed elsewhere": (lambda net, x: net.head(x, net.table()), {"table.rows"}),
    "parametrized and handed out": (lambda net, x: F.linear(x, net.normed.weight), {"normed"}),
}


def quantized(name, precision="w4a4", **options):
    forward, _ = (NETWORKS | COMPUTED)[name]
    model = Net(forward, **parts()).eval()
    graph = bitplan.trace(model, X, rules=FREE)
    made = bitplan.quantize(model, bitplan.Plan.uniform(graph, precision), **options)
    bitplan.calibrate_(made, [X])
    return model, made.eval()


class OnGrid(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the products whose two operands are whole multiples of some step, and those where one is not."""

    def __init__(self, levels):
        super().__init__()
        self.levels, self.good, self.bad = levels, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        first = {"addmm": 1, "baddbmm": 1}.get(name, 0)
        if name in ("linear", "mm", "bmm", "addmm", "baddbmm", "convolution", "mv"):
            fine = all(self.fits(operand) for operand in args[first : first + 2])
            self.good, self.bad = self.good + fine, self.bad + (not fine)
        return func(*args, **(kwargs or {}))

    def fits(self, operand):
        values = operand.detach().double().unique()
        step = values.diff().min() if len(values) > 1 else values.abs().max()
        codes = values / step
        return bool(len(values) <= self.levels and (codes - codes.round()).abs().max() < 0.03)  # half floats are coarse


@pytest.mark.parametrize("name", [*NETWORKS, *COMPUTED])
def test_every_product_has_operands_on_a_grid(name):
    _, made = quantized(name, "w3a3")
    assert set(quantizers_of(made)) == (NETWORKS | COMPUTED)[name][1]
    proof = prove(made, X)
    assert not proof.in_float
    assert not proof.unreached
    for context in (torch.no_grad, torch.enable_grad):
        with context(), OnGrid(8) as seen:
            expected = made(X)
        # Two weights side by side have two grids; products of parameters are not of the plan.
        of_parameters = ("with a low-rank update", "a product of two", "multiplied before what is read")
        beside = {"concatenated": (0, 1)} | dict.fromkeys(of_parameters, (1, 1))
        assert (seen.good, seen.bad) == beside.get(name, (sum(proof.quantized.values()), 0))
    with torch.inference_mode():
        assert torch.allclose(made(X), expected, atol=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_it_multiplies_by_the_codes_that_are_told(name):
    """With these codes times their steps as its weights, the float network gives the same answers."""
    model, made = quantized(name, "w3a16")
    steps = weight_steps(made)
    with torch.no_grad():
        for layer, codes in integer_weights(made).items():
            find_sites(model, [layer])[layer].weight.copy_(codes * steps[layer])
    assert torch.allclose(made(X), model(X), atol=1e-5)


@pytest.mark.parametrize("name", COMPUTED)
def test_the_codes_of_a_computed_weight_are_of_what_it_is_now(name):
    _, made = quantized(name, "w3a16")
    (layer,) = integer_weights(made)
    assert integer_weights(made)[layer].unique().numel() <= 8
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.5)
    with pytest.raises(InputError, match=f"layer '{layer}' computes its weight as it runs: run the network once"):
        integer_weights(made)
    made(X)
    assert integer_weights(made)


@pytest.mark.parametrize("name", [*NETWORKS, *COMPUTED])
def test_another_step_is_another_answer_and_every_step_learns(name):
    _, made = quantized(name)
    assert torch.equal(copy.deepcopy(made)(X), made(X))
    made(X).square().sum().backward()
    for layer, (weight, inputs) in quantizers_of(made).items():
        for quantizer in (weight, *inputs):
            assert quantizer.step.grad.isfinite().all()
            assert quantizer.step.grad.abs() > 0, f"{layer} runs in float"
            before = made(X)
            with torch.no_grad():
                quantizer.step.mul_(1.7)
            assert not torch.allclose(made(X), before, atol=1e-4), f"{layer} runs in float"


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(
    "name", ["a child's weight", "a view given to a stranger", "transposed and copied", "tied modules"]
)
def test_steps_per_channel_go_with_their_rows(name, per_channel):
    model, made = quantized(name, "w3a16", per_channel=per_channel)
    with torch.no_grad():
        for layer, codes in integer_weights(made).items():
            find_sites(model, [layer])[layer].weight.copy_(codes * weight_steps(made)[layer])
    assert torch.allclose(made(X), model(X), atol=1e-5)


def test_a_computed_weight_of_another_shape_has_no_channels_of_its_own():
    part = nn.Linear(8, 4)
    model = Net(lambda net, x: F.linear(x, (net.part.weight * 2)[:3]), part=part)
    plan = bitplan.Plan.uniform(bitplan.trace(model, X, rules=FREE), "w4a16")
    with pytest.raises(InputError, match="quantize with per_channel=False"):
        bitplan.quantize(model, plan, per_channel=True)(X)


class Handing(nn.Module):
    """Hands its child's weight to a function, as BEiT does."""

    def __init__(self):
        super().__init__()
        self.qkv, self.b = nn.Linear(8, 6), nn.Parameter(torch.randn(6))
        self.proj = nn.Linear(6, 8)

    def forward(self, x):
        return self.proj(F.linear(x, self.qkv.weight, self.b).relu())


def handing(**options):
    torch.manual_seed(0)
    model = Handing()
    graph = bitplan.trace(model, X, rules=FREE)
    return model, bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"), **options)


def test_the_graph_and_the_plan_tell_where_it_is_used_and_keep_their_ids():
    model, made = handing()
    graph = bitplan.trace(model, X, rules=FREE)
    assert graph.uses == {"qkv": (Use(module="", function="linear"),)}
    assert graph.model_copy(update={"uses": None}).id == graph.id
    plan = bitplan.plan_of(made)
    assert plan.uses == graph.uses
    assert bitplan.Plan.from_json(plan.to_json()) == plan
    assert plan.model_copy(update={"uses": None}).id == plan.id
    plain = bitplan.trace(nn.Sequential(nn.Linear(8, 8)), X, rules=FREE)
    assert plain.uses == {}
    assert bitplan.Graph.from_json(plain.model_copy(update={"uses": None}).to_json()).uses is None


def test_it_survives_files_pickles_and_another_plan(tmp_path):
    model, made = handing()
    bitplan.calibrate_(made, [X])
    expected = made.eval()(X)
    assert torch.equal(pickle.loads(pickle.dumps(made))(X), expected)
    path = bitplan.save_checkpoint(made, tmp_path / "net")
    assert torch.equal(bitplan.load_checkpoint(path, Handing()).eval()(X), expected)
    packed = bitplan.export(made, tmp_path / "net.safetensors", "packed")
    assert torch.equal(bitplan.load_packed(packed, Handing()).eval()(X), expected)
    lower = bitplan.quantize(made, bitplan.Plan.uniform(bitplan.trace(model, X, rules=FREE), "w2a2")).eval()
    assert integer_weights(lower)["qkv"].unique().numel() <= 4
    assert not torch.equal(lower(X), expected)
    assert bitplan.trace(made, X, rules=FREE) == bitplan.trace(model, X, rules=FREE)


@dynamo
@pytest.mark.parametrize(
    "name", ["a child's weight", "given to a stranger", "gathered", "concatenated", "standardized"]
)
def test_it_compiles(name):
    _, made = quantized(name)
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(made), backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(X), made(X), atol=1e-6)


@pytest.mark.parametrize("name", ["a child's weight", "gathered", "standardized"])
def test_it_runs_under_autocast(name):
    _, made = quantized(name, "w3a3")
    with torch.autocast("cpu", torch.bfloat16), OnGrid(8) as seen:
        assert made(X).dtype == torch.bfloat16
    assert seen.good
    assert not seen.bad


def test_a_table_that_is_also_the_output_layer():
    table, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = table.weight
    model = Net(lambda net, x: net.head(net.table(x).tanh()), table=table, head=head)
    tokens = torch.arange(10).view(2, 5)
    graph = bitplan.trace(model, tokens, rules=FREE)
    assert graph.uses == {"table": (Use(module="table", function=""), Use(module="head", function=""))}
    for plan in (bitplan.Plan.uniform(graph, "w3a3"), by_hand(table="w3a3")):
        made = bitplan.quantize(model, plan)
        bitplan.calibrate_(made, [tokens])
        assert prove(made, tokens).quantized == {"table": 2}
        with OnGrid(8) as seen:
            made.eval()(tokens)
        assert (seen.good, seen.bad) == (1, 0)
        assert made.head.weight_quantizer is made.table.weight_quantizer
        assert [key for key in made.state_dict() if "quantizer" in key] == [
            "table.weight_quantizer.step", "table.weight_quantizer.saved_bits",
            "table.input_quantizer.step", "table.input_quantizer.saved_bits", "table.input_quantizer.signed",
        ]  # fmt: skip


def test_look_ups_in_bare_tables_read_indices():
    parts = {"table": matrix(20, 8), "rows": matrix(20, 8), "bag": nn.EmbeddingBag(20, 8), "head": nn.Linear(8, 4)}
    model = Net(lambda net, i: net.head(F.embedding(i, net.table) + net.rows[i] + net.bag(i)[:, None]), **parts)
    tokens = torch.arange(10).view(2, 5)
    graph = bitplan.trace(model, tokens, rules=FREE)
    assert {layer.name: layer.kind for layer in graph.layers} == {
        "table": "embedding", "rows": "embedding", "bag": "embedding", "head": "linear",
    }  # fmt: skip
    made = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w2a4"))
    bitplan.calibrate_(made, [tokens])
    assert not any(quantizers_of(made)[name].inputs for name in ("table", "rows", "bag"))
    assert prove(made, tokens).quantized == dict.fromkeys(("table", "rows", "bag", "head"), 1)


def test_what_quantize_cannot_reach_is_left_alone_and_said():
    with pytest.warns(DeprecationWarning):
        scripted = torch.jit.script(_scaled)
    parts = {"m": matrix(8, 8), "twice": nn.Linear(8, 8), "head": nn.Linear(8, 4)}
    model = Net(lambda net, x: net.head(scripted(x, net.m) + net.twice(F.linear(x, net.twice.weight * 2))), **parts)
    graph = bitplan.trace(model, X, rules=FREE)
    assert {layer.name: layer.why for layer in graph.layers if str(layer.fixed) == "w16a16"} == {
        "m": "operation is not quantized",
        "twice": "a weight used as it is and computed anew is not quantized",
    }
    made = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    assert prove(made, X).quantized == {"head": 1}


def _scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, weight)


def by_hand(**precisions):
    return bitplan.Plan(model="net", precisions=precisions, method="by hand", selector="by hand")


def test_a_plan_that_is_not_executed_is_refused_by_name():
    plan = by_hand(qkv="w4a4", proj="w4a4")
    words = "the plan quantizes layer qkv, which this network computes in float: make the plan from a graph"
    with pytest.raises(InputError, match=words):
        bitplan.quantize(Handing(), plan, example=X)
    for run in (lambda net: net(X), lambda net: bitplan.calibrate_(net, [X]), lambda net: net.eval()(X)):
        with pytest.raises(InputError, match=words):
            run(bitplan.quantize(Handing(), plan))
    told = plan.model_copy(update={"uses": {"qkv": (Use(module="elsewhere", function="linear"),)}})
    with pytest.raises(InputError, match="says that elsewhere uses qkv"):
        bitplan.quantize(Handing(), told)
    told = plan.model_copy(update={"uses": {"qkv": (Use(module="", function="linear"),)}})
    assert prove(bitplan.quantize(Handing(), told, example=X), X).quantized == {"qkv": 1, "proj": 1}


def test_a_layer_that_is_never_run_is_refused_by_name_unless_that_is_known(caplog):
    model = Net(lambda net, x: net.used(x), used=nn.Linear(8, 8), unused=nn.Linear(8, 8))
    plan = by_hand(used="w4a4", unused="w4a4")
    with pytest.raises(InputError, match="never ran layer unused of its plan"):
        bitplan.quantize(model, plan, example=X)
    made = bitplan.quantize(model, plan)
    with pytest.raises(InputError, match="never ran layer unused of its plan"):
        made(X)
    made = bitplan.quantize(model, plan)
    allow_unreached_(made)
    made(X)
    assert "never ran layer unused" in caplog.text
    caplog.clear()
    made(X)
    assert not caplog.text


def test_a_proof_needs_no_data_and_changes_nothing():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**14, 2**14), nn.ReLU(), nn.Linear(2**14, 2**14))
    made = bitplan.quantize(model, by_hand(**{"0": "w4a4", "2": "w4a4"}))
    assert prove(made, torch.empty(1, 2**14, device="meta")).quantized == {"0": 1, "2": 1}
    _, made = handing()
    state, forward = copy.deepcopy(made.state_dict()), torch.get_rng_state()
    prove(made, X)
    assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())
    assert torch.equal(torch.get_rng_state(), forward)
    assert torch.is_grad_enabled()


def test_a_network_that_decides_by_its_data_is_proven_on_data():
    model = Net(lambda net, x: net.a(x) if x.sum() > 0 else net.b(x), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    made = bitplan.quantize(model, by_hand(a="w4a4", b="w4a4"))
    assert prove(made, X.abs()).quantized == {"a": 1, "b": 0}
    assert prove(made, -X.abs()).unreached == ("a",)


def test_products_without_a_softmax_between_have_no_quantizer_for_one():
    parts = {"q": nn.Linear(8, 8), "k": nn.Linear(8, 8)}
    model = Net(lambda net, x: net.q(x).relu() @ (net.k(x).transpose(1, 2) @ x), **parts)
    made = bitplan.quantize(model, bitplan.Plan.uniform(bitplan.trace(model, X, rules=FREE), "w4a4"))
    bitplan.calibrate_(made, [X])
    assert [len(quantizers_of(made)[name].inputs) for name in ("matmul", "matmul_1")] == [2, 2]
    softmax = Net(lambda net, x: (net.q(x) @ net.k(x).mT).softmax(-1) @ x, **parts)
    made = bitplan.quantize(softmax, bitplan.Plan.uniform(bitplan.trace(softmax, X, rules=FREE), "w4a4"))
    assert [len(quantizers_of(made)[name].inputs) for name in ("matmul", "matmul_1")] == [3, 2]
