"""Recurrent layers and cells: opened they are torch's own, quantized every matrix and every state has its step."""

import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.registry import EXPORTERS
from bitplan.quant.convert import quantizers_of, weight_steps, without_quantizers
from bitplan.quant.lsq import codes, first_scale
from bitplan.quant.proof import Proof
from bitplan.quant.recurrence import OPENED, plain_product
from nets import Net

RULES = bitplan.Rules(first=None, last=None, narrow=0)
LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
LENGTHS = torch.tensor([3, 7, 5])
X = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0))  # (B, T, features)


class Opened(TorchFunctionMode):
    """Runs every recurrent function in its opened form."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in OPENED:
            return OPENED[func](plain_product, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class First(nn.Module):
    """The hidden states of a recurrent layer."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, x):
        return self.rnn(x)[0]


def tensors(outputs):
    """Every tensor in what a recurrent module returns."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    return [tensor for output in outputs if output is not None for tensor in tensors(output)]


def sequence(kind=nn.LSTM, size=5, **options):
    """A network of one recurrent layer, batch first."""
    torch.manual_seed(0)
    return First(kind(4, size, batch_first=True, **options))


def quantized(network, x=X, precision="w4a4", **options):
    plan = bitplan.Plan.uniform(bitplan.trace(network, x, rules=RULES), precision)
    model = bitplan.quantize(network, plan, **options)
    bitplan.calibrate_(model, [x])
    return model


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(("layers", "dropout"), [(1, 0.0), (3, 0.0), (2, 0.5)])
@pytest.mark.parametrize("kind", LAYERS)
def test_opened_it_is_torchs_own(kind, layers, dropout):
    for bidirectional, first, bias, packed in itertools.product((False, True), repeat=4):
        for projection in (0, 3) if kind is nn.LSTM else (0,):
            options = {"proj_size": projection} if projection else {}
            module = kind(
                4, 5, layers, bias=bias, batch_first=first, dropout=dropout, bidirectional=bidirectional, **options
            )
            x = X if first else X.transpose(0, 1)
            x = pack_padded_sequence(x, LENGTHS, batch_first=first, enforce_sorted=False) if packed else x
            torch.manual_seed(1)
            expected = tensors(module(x))
            torch.manual_seed(1)  # also what is dropped is the same
            with Opened():
                found = tensors(module(x))
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("kind", [*LAYERS, *CELLS])
def test_opened_it_takes_one_sample_and_a_state(kind):
    module = kind(4, 5, nonlinearity="relu") if kind in (nn.RNN, nn.RNNCell) else kind(4, 5)
    x, state = X[0] if kind in LAYERS else X[:, 0], torch.randn(1 if kind in LAYERS else 3, 5)
    given = (state, state * 2) if kind in (nn.LSTM, nn.LSTMCell) else state
    with Opened():
        found = tensors(module(x, given))
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(found, tensors(module(x, given)), strict=True))


@pytest.mark.parametrize("kind", LAYERS)
def test_every_matrix_is_a_layer_and_both_directions_share_what_they_read(kind):
    network = sequence(kind, num_layers=2, bidirectional=True)
    graph = bitplan.trace(network, X, rules=RULES)
    assert [layer.name for layer in graph.layers] == [
        f"rnn.weight_{matrix}_l{layer}{way}" for layer in (0, 1) for way in ("", "_reverse") for matrix in ("ih", "hh")
    ]
    assert [layer.macs for layer in graph.layers] == [3 * 7 * layer.weights for layer in graph.layers]
    assert [link.layers for link in graph.links] == [
        (f"rnn.weight_ih_l{layer}", f"rnn.weight_ih_l{layer}_reverse") for layer in (0, 1)
    ]
    inputs = {name: both.inputs[0] for name, both in quantizers_of(quantized(network)).items()}
    assert inputs["rnn.weight_ih_l0"] is inputs["rnn.weight_ih_l0_reverse"]
    assert len({id(quantizer) for quantizer in inputs.values()}) == 6


@pytest.mark.parametrize("per_channel", [False, True])
def test_it_multiplies_codes_step_by_step(per_channel):
    network = sequence(nn.LSTM)
    model = quantized(network, per_channel=per_channel).eval()
    held = {name: bitplan.integer_weights(model)[name] * step for name, step in weight_steps(model).items()}
    layer, both = network.rnn, quantizers_of(model)

    def rounded(name, value):
        (quantizer,) = both[f"rnn.{name}"].inputs
        return codes(value, quantizer.step.detach(), *quantizer.range) * quantizer.step.detach()

    hidden, cell, expected = torch.zeros(3, 5), torch.zeros(3, 5), []
    for x in rounded("weight_ih_l0", X).unbind(1):
        gates = F.linear(x, held["rnn.weight_ih_l0"], layer.bias_ih_l0)
        gates = gates + F.linear(rounded("weight_hh_l0", hidden), held["rnn.weight_hh_l0"], layer.bias_hh_l0)
        into, forget, new, out = gates.chunk(4, 1)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        hidden = out.sigmoid() * cell.tanh()
        expected.append(hidden)
    assert torch.allclose(model(X), torch.stack(expected, 1), atol=1e-5)
    assert (model(X) - network(X)).abs().max() > 0.01


@pytest.mark.parametrize("kind", LAYERS)
def test_without_its_quantizers_it_is_the_float_one_to_rounding_and_left_alone_bit_by_bit(kind):
    network = Net(lambda net, x: (net.rnn(x)[0], net.head(net.rnn(x)[0])), rnn=kind(4, 5, 2), head=nn.Linear(5, 2))
    model = quantized(network).eval()
    with without_quantizers(model):
        assert torch.allclose(model(X)[0], network(X)[0], atol=1e-6)
    graph = bitplan.trace(network, X, rules=bitplan.Rules(first=None, last=None, narrow=0, fix={"rnn.*": "w16a16"}))
    alone = bitplan.quantize(network, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(alone, [X])
    assert torch.equal(alone.eval()(X)[0], network(X)[0])
    assert not torch.equal(alone(X)[1], network(X)[1])


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_in_a_loop_is_the_layer(kind):
    layer = sequence(LAYERS[CELLS.index(kind)])

    def loop(net, x):
        state, hidden = None, []
        for step in x.unbind(1):
            state = net.rnn(step, state)
            hidden.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(hidden, 1)

    cells = Net(loop, rnn=kind(4, 5))
    weights = {name.removesuffix("_l0"): value for name, value in layer.state_dict().items()}
    cells.load_state_dict(weights)
    models = quantized(layer), quantized(cells)
    names = [[name.removesuffix("_l0") for name in bitplan.integer_weights(model)] for model in models]
    assert names[0] == names[1] == ["rnn.weight_ih", "rnn.weight_hh"]
    outputs = [model(X) for model in models]
    assert torch.allclose(*outputs, atol=1e-6)
    for output in outputs:
        output.square().sum().backward()
    gradients = [
        {name.replace("_l0", ""): parameter.grad for name, parameter in model.named_parameters()} for model in models
    ]
    for name, gradient in gradients[0].items():
        # A step is shared by all values of a sequence, of which a cell sees those of one of the seven steps.
        ratio = 7**-0.5 if "input_quantizer" in name else 1.0
        assert torch.allclose(gradient, ratio * gradients[1][name], rtol=1e-3, atol=1e-5), name


def test_a_weight_is_quantized_once_and_a_state_at_every_step():
    model = quantized(sequence(nn.GRU))
    runs = dict.fromkeys(("weight_ih_l0", "weight_hh_l0"), (0, 0))
    for name, call in model.rnn.call_quantizers.items():

        def count(place, name=name):
            return lambda *_: runs.update({name: tuple(n + (k == place) for k, n in enumerate(runs[name]))})

        call.weight_quantizer.register_forward_hook(count(0))
        call.input_quantizer.register_forward_hook(count(1))
    model(X)
    assert runs == {"weight_ih_l0": (1, 1), "weight_hh_l0": (1, 7)}


def test_the_step_of_a_state_is_set_by_all_steps_of_time():
    network = sequence(nn.LSTM)
    model = bitplan.quantize(network, bitplan.Plan.uniform(bitplan.trace(network, X, rules=RULES), "w16a4"))
    bitplan.calibrate_(model, [X])
    before = torch.cat((torch.zeros(3, 1, 5), network(X)[:, :-1]), 1)  # what each step has read
    quantizer = model.rnn.call_quantizers["weight_hh_l0"].input_quantizer
    assert torch.allclose(quantizer.step, first_scale(before.abs().mean(), 7))
    assert quantizer.range == (-8, 7)


@pytest.mark.parametrize("steps", [1, 7])
def test_the_first_training_batch_sets_the_step_of_a_state_that_begins_with_zeros(steps):
    network = sequence(nn.LSTM)
    model = bitplan.quantize(network, bitplan.Plan.uniform(bitplan.trace(network, X, rules=RULES), "w4a4"))
    quantizer = model.rnn.call_quantizers["weight_hh_l0"].input_quantizer
    model.train()(X[:, :steps]).sum().backward()
    assert quantizer.range == (None if steps == 1 else (-8, 7))  # zeros say nothing
    assert model.eval()(X[:, :steps]).shape == (3, steps, 5)


def test_sequences_of_different_lengths_stay_packed():
    def forward(net, x):
        packed = pack_padded_sequence(x, LENGTHS[: len(x)], batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(net.rnn(packed)[0], batch_first=True)[0]

    padded = sequence(nn.GRU)
    network = Net(forward, rnn=padded.rnn)
    graph = bitplan.trace(padded, X, rules=RULES)
    model = bitplan.quantize(network, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(model, [X])
    whole = bitplan.quantize(padded, bitplan.Plan.uniform(graph, "w4a4"))
    whole.load_state_dict(model.state_dict())
    found, expected = model.eval()(X), whole.eval()(X)
    for row, length in enumerate(LENGTHS):
        assert torch.allclose(found[row, :length], expected[row, :length], atol=1e-6)
        assert not found[row, length:].any()


def test_it_is_pickled_and_compiled():
    model = quantized(sequence(nn.LSTM, num_layers=2)).eval()
    assert torch.equal(pickle.loads(pickle.dumps(model))(X), model(X))
    assert torch.equal(torch.compile(model, backend="eager")(X), model(X))


def test_a_function_that_is_given_any_matrices_is_quantized_too():
    network = Net(
        lambda net, x: torch.gru_cell(x[:, 0], x[:, 1] @ net.start, net.into, net.back),
        start=nn.Parameter(torch.randn(4, 5)),
        into=nn.Parameter(torch.randn(15, 4)),
        back=nn.Parameter(torch.randn(15, 5)),
    )
    model = quantized(network).eval()
    assert set(bitplan.integer_weights(model)) == {"start", "into", "back"}
    assert all(not torch.equal(quantized(network, precision=p).eval()(X), model(X)) for p in ("w2a4", "w4a2"))


class Updated(nn.Module):
    """A low-rank update of a matrix."""

    def __init__(self, rows, columns):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(2, columns) / 4), nn.Parameter(torch.randn(rows, 2) / 4)

    def forward(self, weight):
        return weight + self.up @ self.down


@pytest.mark.parametrize(
    "parametrize",
    [weight_norm, spectral_norm, lambda rnn, name: register_parametrization(rnn, name, Updated(15, 5))],
    ids=["weight norm", "spectral norm", "low-rank update"],
)
def test_what_a_parametrization_computes_is_quantized_and_not_what_it_is_computed_from(parametrize):
    network = sequence(nn.GRU).eval()
    parametrize(network.rnn, "weight_hh_l0")
    model = quantized(network).eval()
    assert bitplan.prove(model, X) == Proof({"rnn.weight_ih_l0": 1, "rnn.weight_hh_l0": 7}, {})
    model(X)
    codes = bitplan.integer_weights(model)["rnn.weight_hh_l0"]
    computed = network.rnn.weight_hh_l0
    step = weight_steps(model)["rnn.weight_hh_l0"]
    assert torch.equal(codes, (computed / step).clamp(-8, 7).round().to(torch.int8))
    model.train()(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    network(X)  # torch keeps what it computed, with its gradient
    with pytest.raises(InputError, match=r"First cannot be copied .*under torch\.no_grad"):
        bitplan.quantize(network, bitplan.plan_of(model))
    with torch.no_grad():
        network(X)
    bitplan.quantize(network, bitplan.plan_of(model))


@pytest.mark.parametrize("to", ["packed", "onnx"])
def test_files_compute_what_the_network_does(to, tmp_path):
    few = X[:, :2]  # ONNX has a node for each step
    model = quantized(sequence(nn.LSTM, bidirectional=True), few).eval()
    path = bitplan.export(model, tmp_path / f"net{'.onnx' if to == 'onnx' else ''}", to, example=few)
    report = bitplan.verify(path, model, [few])
    assert report.passed
    assert (report.layers, report.samples) == (4, 3)


def test_what_a_target_has_not_is_refused_by_name(tmp_path):
    network = First(nn.LSTM(4, 5))  # (T, B, …): ONNX keeps the first dimension free
    model = quantized(network).eval()
    with pytest.raises(InputError, match="ONNX cannot hold layer 'rnn' .*free dimension.*batch_first"):
        bitplan.export(model, tmp_path / "net.onnx", "onnx", example=X)
    graph = bitplan.trace(network, X, rules=RULES)
    for source, about in ((model, {}), (bitplan.plan_of(model), {}), (bitplan.plan_of(model), {"graph": graph})):
        if "mlx" not in EXPORTERS:  # a plugin's
            continue
        with pytest.raises(InputError, match=r"mlx cannot express rnn\.weight_ih_l0 at w4a4 \(a recurrent layer\)"):
            bitplan.export(source, tmp_path / "net.json", "mlx", **about)
