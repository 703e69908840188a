"""The naming contract: round trips on any names, and one network on which everybody uses the same names."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import bitplan
from bitplan.core import naming
from bitplan.core.errors import InputError
from bitplan.core.naming import PRODUCT_NAMES, join_names, layer_of, layer_of_quantizer
from bitplan.graph.names import read_graph
from bitplan.quant.convert import quantizers_of, weight_steps
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.sites import find_sites
from bitplan.weights.opened import learned_step, open_checkpoint

RESERVED = {"weight", "parametrizations", naming.CALL_QUANTIZERS, naming.WEIGHT_QUANTIZER, naming.INPUT_QUANTIZER}
parts = st.text("abkz019_", min_size=1, max_size=8).filter(
    lambda part: part not in RESERVED and not part.endswith("_weight") and not part.startswith("weight_")
)
modules = st.lists(parts, max_size=4).map(".".join)
functions = st.sampled_from(sorted(PRODUCT_NAMES))


@given(modules, parts)
def test_what_is_inside_a_module_is_split_off_again(module, part):
    assert naming.split_name(join_names(module, part)) == (module, part)


@given(modules, parts)
def test_a_parameter_is_among_the_names_of_its_layers_weight(module, part):
    for parameter in (join_names(module, "weight"), join_names(module, part), join_names(module, f"{part}_weight")):
        assert parameter in naming.weight_names(layer_of(parameter))
    assert layer_of(join_names(module, "weight")) == (module or "weight")
    assert (
        layer_of(join_names(module, part)) == layer_of(join_names(module, f"{part}_weight")) == join_names(module, part)
    )


@given(modules, parts, st.sampled_from(["original", "original0", "0.lora_A", "original1.x"]))
def test_a_parametrized_parameter_is_the_parameter(module, part, rest):
    for parameter in ("weight", part, f"{part}_weight"):
        assert layer_of(join_names(module, f"parametrizations.{parameter}.{rest}")) == layer_of(
            join_names(module, parameter)
        )


@pytest.mark.parametrize("parameter", ["a.weight_g", "a.weight_v", "a.weight_orig"])
def test_older_norms_keep_the_weight_under_other_names(parameter):
    assert layer_of(parameter) == "a"


def test_a_parameter_called_weight_with_a_line_before_it_keeps_its_name():
    assert layer_of("a._weight") == "a._weight"


@given(modules, functions, st.integers(0, 10**6))
def test_the_function_and_its_number_are_told_apart(module, function, number):
    layer = join_names(module, naming.product_name(function, number))
    assert naming.function_of(layer) == function
    assert naming.is_product(layer)
    assert naming.quantizer_places(layer)[1] == join_names(module, f"call_quantizers.{naming.split_name(layer)[1]}")


@given(functions, st.integers(0, 30), st.integers(0, 30))
def test_products_of_one_module_have_names_of_their_own(function, first, second):
    names = {naming.product_name(function, first), naming.product_name(function, second)}
    assert len(names) == 2 - (first == second)


@pytest.mark.parametrize("name", ["a.matmul_0", "a.matmul_01", "a.matmul_x", "a.addmm_", "a.mymatmul", "matmul.a", ""])
def test_what_is_no_product(name):
    assert not naming.is_product(name)


@given(modules, parts)
def test_a_quantizer_leads_back_to_its_layer(module, part):
    layer = join_names(module, part)
    for place in naming.quantizer_places(layer):
        for below in (naming.WEIGHT_QUANTIZER, f"{naming.INPUT_QUANTIZER}.step", f"{naming.INPUT_QUANTIZER}.signed"):
            assert layer_of_quantizer(f"{place}.{below}") == layer
    assert layer_of_quantizer(join_names(module, f"call_quantizers.{part}.left.step")) == layer
    assert [layer_of_quantizer(key) for key in naming.step_keys(layer)] == [layer] * 3
    for parameter in (layer, f"{layer}.weight", f"{layer}_weight", f"{layer}.bias"):
        assert layer_of_quantizer(parameter) is None


def test_the_models_own_weight():
    assert layer_of("weight") == layer_of("parametrizations.weight.original") == "weight"
    assert "call_quantizers.weight.weight_quantizer.step" in naming.step_keys("weight")
    assert layer_of_quantizer("call_quantizers.weight.weight_quantizer.step") == "weight"


class Scaled(nn.Linear):
    """A module with a forward of its own."""

    def forward(self, x):
        return F.linear(x, self.weight * 0.5, self.bias)


class Scores(nn.Module):
    """Products of activations, and between them a call that is given a parameter."""

    def __init__(self):
        super().__init__()
        self.mix_weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x):
        scores = torch.matmul(x, x.transpose(1, 2))
        mixed = torch.matmul(x, self.mix_weight)
        return scores.softmax(-1) @ mixed


class Everything(nn.Module):
    """One of each row of the table in `core/naming.py`."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.stem = nn.Linear(16, 16)
        self.matrix = nn.Parameter(torch.randn(16, 16) / 4)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.normed = weight_norm(nn.Linear(16, 16))
        self.scaled = Scaled(16, 16)
        self.scores = Scores()
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.cell = nn.LSTMCell(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        x = self.stem(self.table(tokens))
        x = torch.matmul(x, self.matrix)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.gru(self.scores(self.scaled(self.normed(x))))[0]
        return self.head(self.cell(x[:, -1])[0])


EXAMPLE = torch.arange(10).reshape(2, 5)
WEIGHTED = {
    "table", "stem", "matrix", "attention.in_proj", "attention.out_proj", "normed", "scaled", "scores.mix", "head",
    "gru.weight_ih_l0", "gru.weight_hh_l0", "cell.weight_ih", "cell.weight_hh",
}  # fmt: skip
PRODUCTS = {"attention.scaled_dot_product_attention", "scores.matmul", "scores.matmul_1"}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Everything().eval()


@pytest.fixture(scope="module")
def graph(model):
    computed = dict.fromkeys(("normed", "scaled"), bitplan.Precision.parse("w8a8"))  # no file has them
    return bitplan.trace(model, EXAMPLE, rules=bitplan.Rules(first=None, last=None, narrow=0, fix=computed))


@pytest.fixture(scope="module")
def quantized(model, graph):
    made = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(made, [EXAMPLE])
    return made.eval()


@pytest.fixture(scope="module")
def saved(quantized, tmp_path_factory):
    return bitplan.save_checkpoint(quantized, tmp_path_factory.mktemp("naming") / "net")


def test_trace_calls_layers_so(graph):
    assert {layer.name for layer in graph.layers if layer.weights} == WEIGHTED
    assert {layer.name for layer in graph.layers if not layer.weights} == PRODUCTS


def test_every_parameter_leads_to_the_layer_that_trace_found(model, graph):
    weights = {name for name, value in model.named_parameters() if value.dim() > 1}
    assert {layer_of(name) for name in weights} == WEIGHTED


@pytest.mark.parametrize("which", ["model", "quantized"])
def test_quantize_finds_what_trace_found(which, graph, request):
    sites = find_sites(request.getfixturevalue(which), [layer.name for layer in graph.layers])
    assert {layer: site.kind == "product" for layer, site in sites.items()} == {
        layer.name: not layer.weights for layer in graph.layers
    }


def test_every_quantizer_is_where_its_layers_name_says(quantized, graph):
    paths = dict(quantized.named_modules(remove_duplicate=False))
    for layer, found in quantizers_of(quantized).items():
        places = [place for place in naming.quantizer_places(layer) if place in paths]
        for quantizer in filter(None, (found.weight, *found.inputs)):
            own = [path for path, module in paths.items() if module is quantizer and layer_of_quantizer(path) == layer]
            assert len(own) == 1, layer
            assert any(own[0].startswith(f"{place}.") for place in places)
    every = {path for path, module in paths.items() if isinstance(module, WeightQuantizer | InputQuantizer)}
    assert {layer_of_quantizer(path) for path in every} == WEIGHTED | PRODUCTS


def test_the_keys_of_a_saved_checkpoint_lead_to_the_same_layers(saved, quantized):
    tensors = open_checkpoint(saved).tensors
    of_quantizers = {name for name in tensors if layer_of_quantizer(name) is not None}
    assert {layer_of_quantizer(name) for name in of_quantizers} == WEIGHTED | PRODUCTS
    assert {layer_of(name) for name in tensors.keys() - of_quantizers if len(tensors[name].shape) > 1} == WEIGHTED
    steps = weight_steps(quantized)
    for layer in WEIGHTED:
        assert len([key for key in naming.step_keys(layer) if key in tensors]) == 1
        assert learned_step(layer, tensors).floats().tolist() == [steps[layer].item()]


def test_eagl_from_the_file_alone_is_eagl_from_the_model(saved, quantized, graph, model):
    from_file = bitplan.estimate("eagl", saved, graph)
    assert from_file.rows == bitplan.estimate("eagl", quantized, graph).rows
    assert set(from_file.rows) == WEIGHTED - {"normed", "scaled", "table"}
    assert from_file.counts["learned_steps"] == len(from_file.rows)
    assert set(bitplan.estimate("eagl", model, graph, steps="mse").rows) == set(from_file.rows)


def test_a_parametrized_weight_is_not_in_a_file_which_is_said_by_the_layers_name(saved, model):
    free = bitplan.trace(model, EXAMPLE, rules=bitplan.Rules(narrow=0))
    with pytest.raises(InputError, match="holds no float weight of 256 elements for layer 'normed'"):
        bitplan.estimate("eagl", saved, free)


def test_the_graph_of_a_file_has_the_names_of_the_graph_of_its_model(saved, quantized):
    graph = read_graph(saved)
    kinds = {layer.name: layer.kind for layer in graph.layers}
    recurrent = {"gru.weight_ih_l0", "gru.weight_hh_l0", "cell.weight_ih", "cell.weight_hh"}
    assert set(kinds) == {"table", "stem", "attention.in_proj", "attention.out_proj", "scaled", "head"} | recurrent
    assert kinds["attention.in_proj"] == "parameter"
    assert {kinds[name] for name in recurrent} == {"recurrent"}
    planned = bitplan.quantize(quantized, bitplan.Plan.uniform(graph, "w2a2"))
    assert set(quantizers_of(planned)) == set(kinds)


@pytest.mark.parametrize("parametrized", [False, True])
def test_a_model_that_is_one_layer(parametrized, tmp_path):
    model = weight_norm(nn.Linear(8, 8)) if parametrized else nn.Linear(8, 8)
    x = torch.randn(3, 8)
    graph = bitplan.trace(model, x, rules=bitplan.Rules(first=None, last=None, narrow=0))
    assert [layer.name for layer in graph.layers] == ["weight"]
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(quantized, [x])
    assert not torch.equal(quantized(x), model(x))
    path = bitplan.save_checkpoint(quantized, tmp_path / "one")
    assert learned_step("weight", open_checkpoint(path).tensors) is not None
    if not parametrized:
        assert bitplan.estimate("eagl", path, graph).rows == bitplan.estimate("eagl", quantized, graph).rows
