"""What counts as a layer, what it costs, and what "the same tensor" means, one small network each."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bitplan
from bitplan.core.errors import TraceError
from nets import Net

FREE = bitplan.Rules(first=None, last=None, narrow=0)
X = torch.empty(2, 8, 6, 6)
T = torch.empty(2, 5, 8)


def conv(width_in=8, width=8, kernel=1, **options):
    return nn.Conv2d(width_in, width, kernel, **options)


def traced(forward, example=X, rules=FREE, **parts):
    return bitplan.trace(Net(forward, **parts), example, rules=rules)


def links(graph):
    return [link.layers for link in graph.links]


def only(graph):
    (layer,) = graph.layers
    return layer


@pytest.mark.parametrize(
    ("part", "example", "kind", "macs", "weights", "in_features"),
    [
        (nn.Linear(8, 3), T, "linear", 2 * 5 * 8 * 3, 24, 8),
        (nn.Linear(8, 3, bias=False), torch.empty(8), "linear", 24, 24, 8),
        (nn.Conv1d(8, 4, 3), torch.empty(2, 8, 10), "conv1d", 2 * 4 * 8 * (8 * 3), 96, 8),
        (nn.Conv2d(8, 4, 3, padding=1), X, "conv2d", 2 * 4 * 36 * (8 * 9), 288, 8),
        (nn.Conv2d(8, 4, 3, dilation=2), X, "conv2d", 2 * 4 * 4 * (8 * 9), 288, 8),
        (nn.Conv2d(8, 4, 3, stride=2, padding=1), X, "conv2d", 2 * 4 * 9 * (8 * 9), 288, 8),
        (nn.Conv2d(8, 8, 3, groups=8), X, "conv2d", 2 * 8 * 16 * 9, 72, 8),
        (nn.Conv2d(8, 4, 3, groups=2), X, "conv2d", 2 * 4 * 16 * (4 * 9), 144, 8),
        (nn.Conv2d(8, 4, 3, padding=1, padding_mode="reflect"), X, "conv2d", 2 * 4 * 36 * (8 * 9), 288, 8),
        (nn.Conv3d(2, 3, 2), torch.empty(1, 2, 4, 4, 4), "conv3d", 3 * 27 * (2 * 8), 48, 2),
        (nn.ConvTranspose2d(8, 4, 2, stride=2), X, "conv_transpose2d", 2 * 8 * 36 * (4 * 4), 128, 8),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), torch.empty(1, 4, 5), "conv_transpose1d", 4 * 5 * (3 * 3), 36, 4),
        (nn.ConvTranspose3d(2, 3, 2), torch.empty(1, 2, 3, 3, 3), "conv_transpose3d", 2 * 27 * (3 * 8), 48, 2),
        (nn.Embedding(20, 8), torch.zeros(2, 5, dtype=torch.long), "embedding", 0, 160, 20),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)), T, "linear", 240, 24, 8),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)), T, "linear", 240, 24, 8),
        (nn.utils.parametrizations.orthogonal(nn.Linear(8, 3)), T, "linear", 240, 24, 8),
    ],
)
def test_layers_and_what_they_cost(part, example, kind, macs, weights, in_features):
    layer = only(traced(lambda net, x: net.part(x), example, part=part))
    assert (layer.name, layer.kind) == ("part", kind)
    assert (layer.macs, layer.weights, layer.in_features) == (macs, weights, in_features)


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: F.linear(x, net.matrix),
        lambda net, x: x @ net.matrix.t(),
        lambda net, x: torch.matmul(x, net.matrix.transpose(0, 1)),
        lambda net, x: torch.einsum("btk,nk->btn", x, net.matrix),
        lambda net, x: F.linear(x, net.matrix.half().float()),
        lambda net, x: F.linear(x, net.matrix * 2),
        lambda net, x: (net.matrix @ x.reshape(-1, 8).t()).t(),
        lambda net, x: F.conv1d(x.transpose(1, 2), net.matrix[:, :, None]),
        lambda net, x: torch.stack([F.linear(one, net.matrix) for one in x]),
    ],
)
def test_parameters_used_by_functions_are_layers(forward):
    layer = only(traced(forward, T, matrix=nn.Parameter(torch.empty(3, 8))))
    assert (layer.name, layer.macs, layer.weights, layer.in_features) == ("matrix", 240, 24, 8)


def test_a_layer_called_several_times_is_one_layer_with_summed_macs():
    layer = only(traced(lambda net, x: net.conv(net.conv(x)), conv=conv()))
    assert layer.macs == 2 * (2 * 8 * 36 * 8)
    assert layer.weights == 64


def test_tied_weights_are_one_layer_which_is_the_last():
    table, middle = nn.Embedding(20, 8), nn.Linear(8, 8)
    head = nn.Linear(8, 20, bias=False)
    head.weight = table.weight
    tokens = torch.zeros(1, 4, dtype=torch.long)
    net = Net(lambda net, x: net.head(net.middle(net.table(x))), table=table, middle=middle, head=head)
    graph = bitplan.trace(net, tokens, rules=bitplan.Rules(narrow=0))
    assert [(layer.name, layer.kind, layer.macs, layer.weights) for layer in graph.layers] == [
        ("table", "linear", 4 * 8 * 20, 160),
        ("middle", "linear", 4 * 64, 64),
    ]
    assert [layer.fixed and layer.why for layer in graph.layers] == ["first layer", None]


def test_multihead_attention():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    graph = traced(lambda net, x: net.attention(x, x, x, need_weights=False)[0], T, attention=attention)
    assert [(layer.name, layer.kind, layer.macs) for layer in graph.layers] == [
        ("attention.in_proj", "linear", 10 * 8 * 24),
        ("attention.scaled_dot_product_attention", "attention", 2 * 2 * 2 * 5 * 5 * 4),
        ("attention.out_proj", "linear", 10 * 64),
    ]
    assert graph.layers[1].weights == 0
    assert graph.layers[1].why == "product of activations"


def test_attention_across_two_inputs_has_one_packed_projection():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    graph = traced(lambda net, x, y: net.attention(x, y, y)[0], (T, torch.empty(2, 7, 8)), attention=attention)
    assert [layer.name for layer in graph.layers if layer.weights] == ["attention.in_proj", "attention.out_proj"]
    assert graph.layers[0].macs == 2 * (5 * 8 * 8 + 7 * 8 * 16)
    assert graph.layers[0].weights == 192


@pytest.mark.parametrize(
    ("forward", "names"),
    [
        (lambda net, x: F.scaled_dot_product_attention(x, x, x), ["scaled_dot_product_attention"]),
        (lambda net, x: (x @ x.transpose(1, 2)).softmax(-1) @ x, ["matmul", "matmul_1"]),
        (lambda net, x: torch.bmm(torch.bmm(x, x.transpose(1, 2)).softmax(-1), x), ["bmm", "bmm_1"]),
    ],
)
def test_products_of_activations_are_layers_without_weights(forward, names):
    graph = traced(lambda net, x: net.inner(x), T, inner=Net(forward))
    assert [layer.name for layer in graph.layers] == [f"inner.{name}" for name in names]
    assert sum(layer.macs for layer in graph.layers) == 2 * (2 * 5 * 5 * 8)
    assert {(layer.weights, str(layer.fixed)) for layer in graph.layers} == {(0, "w8a8")}


def test_recurrent_layers_are_their_matrices():
    graph = traced(lambda net, x: net.lstm(x)[0], T, lstm=nn.LSTM(8, 4, batch_first=True))
    assert {layer.name: (layer.macs, layer.weights) for layer in graph.layers} == {
        "lstm.weight_ih_l0": (2 * 5 * 8 * 16, 128),
        "lstm.weight_hh_l0": (2 * 5 * 4 * 16, 64),
    }


@pytest.mark.parametrize("length", [1, 2, 3, 4, 11])
@pytest.mark.parametrize("kind", ["lstm", "projected", "gru", "rnn", "packed"])
def test_a_few_steps_stand_for_all_of_a_sequence(kind, length):
    """By shapes a few are looked at; with values all are taken."""
    builds = {"gru": nn.GRU, "rnn": nn.RNN}
    more = {"proj_size": 3} if kind == "projected" else {}
    recurrent = builds.get(kind, nn.LSTM)(8, 6, 2, batch_first=True, bidirectional=True, **more)
    width = 2 * (more.get("proj_size", 6))

    def forward(net, x):
        if kind != "packed":
            return net.head(net.recurrent(x)[0])
        lengths = torch.tensor([length, max(1, length - 2)])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return net.head(nn.utils.rnn.pad_packed_sequence(net.recurrent(packed)[0], batch_first=True)[0])

    model, x = Net(forward, recurrent=recurrent, head=nn.Linear(width, 4)), torch.randn(2, length, 8)
    whole = bitplan.trace(model, x, rules=None, values=True)
    found = whole if kind == "packed" else bitplan.trace(model, x, rules=None)
    assert [(layer.name, layer.macs) for layer in found.layers] == [(layer.name, layer.macs) for layer in whole.layers]
    assert found.links == whole.links
    hidden = {layer.name: layer for layer in found.layers}["recurrent.weight_hh_l0"]
    rows = 2 * length if kind != "packed" else length + max(1, length - 2)
    assert hidden.macs == rows * hidden.weights


def test_learned_queries_pass_through_layers_and_low_rank_updates_do_not_count():
    class LowRank(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Parameter(torch.empty(2, 8)), nn.Parameter(torch.empty(8, 2))

        def forward(self, weight):
            return weight + self.up @ self.down

    layer = nn.Linear(8, 8)
    nn.utils.parametrize.register_parametrization(layer, "weight", LowRank())
    parts = {"query": nn.Parameter(torch.empty(3, 8)), "project": nn.Linear(8, 8), "keys": layer}
    graph = traced(lambda net, x: net.project(net.query) @ net.keys(x).transpose(1, 2), T, **parts)
    assert [(layer.name, layer.weights) for layer in graph.layers] == [("project", 64), ("keys", 64), ("matmul", 0)]


SAME = {
    "the tensor itself": lambda x: x,
    "view": lambda x: x.view(2, 8, 36).view_as(x),
    "reshape": lambda x: x.reshape(2, -1).reshape(x.shape),
    "permute": lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2),
    "contiguous": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "flatten": lambda x: x.flatten(1).unflatten(1, x.shape[1:]),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "identity": nn.Identity(),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "detach": lambda x: x.detach(),
    "cast": lambda x: x.half().float(),
    "whole slice": lambda x: x[:],
}
OTHER = {
    "relu": lambda x: x.relu(),
    "scaled": lambda x: x * 1.0,
    "added": lambda x: x + 0,
    "padded and cut": lambda x: F.pad(x, (1, 1))[..., 1:-1],
    "half the channels, twice": lambda x: torch.cat([x[:, :4], x[:, 4:]], dim=1),
    "flipped": lambda x: x.flip(2),
    "expanded": lambda x: x[:, :1].expand(-1, 8, -1, -1),
    "pooled": lambda x: F.avg_pool2d(x, 1),
    "normalized": lambda x: F.layer_norm(x, x.shape[1:]),
}


@pytest.mark.parametrize("name", SAME)
def test_layers_that_read_the_same_tensor_are_linked(name):
    graph = traced(lambda net, x: net.a(F.relu(x)) + 0, a=conv())  # warm, unlinked
    assert not links(graph)

    def forward(net, x):
        y = F.relu(x)
        return net.a(y) + net.b(SAME[name](y))

    assert links(traced(forward, a=conv(), b=conv())) == [("a", "b")]


@pytest.mark.parametrize("name", OTHER)
def test_layers_that_read_another_tensor_are_not(name):
    def forward(net, x):
        y = F.relu(x)
        return net.a(y) + net.b(OTHER[name](y))

    assert not links(traced(forward, a=conv(), b=conv()))


@pytest.mark.parametrize("part", [slice(0, 4), slice(4, 8)])
def test_parts_of_a_tensor_link_only_with_the_same_part(part):
    def forward(net, x):
        y = F.relu(x)
        first, second = y.chunk(2, dim=1)
        return net.a(first) + net.b(second) + net.c(y[:, part]) + net.whole(y)

    parts = {name: conv(4) for name in "abc"} | {"whole": conv()}
    assert links(traced(forward, **parts)) == [("a", "c") if part.start == 0 else ("b", "c")]


def test_a_write_in_place_makes_a_new_value_of_every_view():
    def forward(net, x):
        y = F.relu(x)
        view = y.view(2, 8, 36)
        before = net.a(y)
        y.add_(1)
        return before + net.b(y) + net.c(view.view_as(y))

    assert links(traced(forward, a=conv(), b=conv(), c=conv())) == [("b", "c")]


def test_a_residual_added_in_place_is_not_the_tensor_before():
    def forward(net, x):
        y = F.relu_(net.stem(x))
        z = net.a(y)
        z += y
        return net.b(z) + net.c(y) + net.d(F.relu_(z))

    assert links(traced(forward, stem=conv(), a=conv(), b=conv(), c=conv(), d=conv())) == [("a", "c")]


def test_memory_that_is_freed_and_used_again_links_nothing():
    def forward(net, x):
        for layer in net.layers:
            x = layer(x.clone().relu_())  # each result is freed before the next is made
        return x

    graph = traced(forward, layers=nn.ModuleList(conv() for _ in range(20)))
    assert not links(graph)


def test_links_are_transitive_and_say_through_what():
    def forward(net, x):
        y = net.act(x)
        return net.shared(y) + net.a(y) + net.shared(net.a(y)) + net.b(net.a(y) * 2)

    graph = traced(forward, act=nn.ReLU(), shared=conv(), a=conv(), b=conv())
    assert links(graph) == [("shared", "a")]
    assert graph.links[0].through == "output of act (relu)"
    graph = traced(lambda net, x: net.a(x) + net.b(x), a=conv(), b=conv())
    assert graph.links[0].through == "model input 0"


def test_embeddings_are_not_linked_by_their_indices():
    tokens = torch.zeros(2, 5, dtype=torch.long)
    parts = {"a": nn.Embedding(9, 8), "b": nn.Embedding(9, 8)}
    assert not links(traced(lambda net, x: net.a(x) + net.b(x), tokens, **parts))


@pytest.mark.parametrize(
    ("example", "forward"),
    [
        (X, lambda net, x: net.a(x)),
        ((X, X), lambda net, x, y: net.a(x + y)),
        ([X, X], lambda net, x, y: net.a(x + y)),
        ({"x": X, "flag": True}, lambda net, x, flag: net.a(x) if flag else x),
        (({"nested": X},), lambda net, inputs: net.a(inputs["nested"])),
    ],
)
def test_examples_are_positional_keyword_or_nested(example, forward):
    assert only(traced(forward, example, a=conv())).name == "a"


def test_what_the_example_does_not_reach_is_reported():
    inner = Net(lambda net, x: x, never=nn.Linear(8, 8), norm=nn.BatchNorm2d(8))
    graph = traced(lambda net, x: net.a(x) if x.shape[0] < 5 else net.inner(x), a=conv(), inner=inner)
    assert graph.unreached == ("inner.never",)


def test_the_model_is_left_exactly_as_it_was():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer, self.cache = nn.BatchNorm2d(8), conv(), None

        def forward(self, x):
            self.cache = x
            return self.layer(self.norm(x))

    model = Caching().train()
    model.layer.register_forward_hook(lambda *_: None)
    model.norm.eval()
    before = copy.deepcopy(model.state_dict())
    hooks = {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in model.named_modules()
    }
    parameters = [id(parameter) for parameter in model.parameters()]
    state = torch.get_rng_state()
    mkldnn = torch.backends.mkldnn.enabled
    bitplan.trace(model, X, rules=FREE)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert (model.training, model.norm.training, model.layer.training) == (True, False, True)
    assert model.cache is None
    assert hooks == {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in model.named_modules()
    }
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mkldnn.enabled == mkldnn
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_no_data_is_touched_so_size_does_not_matter():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**17, 2**17, bias=False) for _ in range(4)))  # 69 billion weights
    graph = bitplan.trace(model, torch.empty(1, 2**17, device="meta"))
    assert sum(layer.weights for layer in graph.layers) == 2**36


def test_two_models_at_once_do_not_disturb_each_other():
    from concurrent.futures import ThreadPoolExecutor

    def one(width):
        return traced(lambda net, x: net.b(net.a(x)), a=conv(8, width), b=conv(width)).layers[0].weights

    before = torch.backends.mkldnn.enabled
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, range(1, 33))) == [8 * width for width in range(1, 33)]
    assert torch.backends.mkldnn.enabled == before


def test_dropout_is_passed_also_when_the_model_is_in_training():
    model = Net(lambda net, x: net.a(net.drop(x)) + net.b(x), drop=nn.Dropout(0.5), a=conv(), b=conv()).train()
    assert links(bitplan.trace(model, X, rules=FREE)) == [("a", "b")]
    assert model.drop.training


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it imports its compiler
def test_models_that_torch_wraps_are_traced_by_what_is_inside():
    model = nn.Sequential(conv(), nn.ReLU(), conv())
    graph = bitplan.trace(torch.compile(model), X, rules=FREE)
    assert [layer.name for layer in graph.layers] == ["0", "2"]


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (torch.empty(2, 7, 6, 6), r"does not fit the model: in body.0 \(Conv2d\): .*channels"),
        (torch.empty(2, 8), r"in body.0 \(Conv2d\)"),
        ((X, X), r"in Net: .*takes 2 positional arguments but 3 were given"),
        ({"y": X}, "unexpected keyword"),
        ("text", r"in body.0 \(Conv2d\)"),
    ],
)
def test_an_example_that_does_not_fit_is_reported_with_the_layer(example, words):
    def forward(net, x):
        return net.body(x)

    class Strict(Net):
        def forward(self, x):
            return self.body(x)

    Strict.__name__ = "Net"
    with pytest.raises(TraceError, match=words):
        bitplan.trace(Strict(forward, body=nn.Sequential(conv(), nn.ReLU())), example)


def test_models_that_cannot_be_traced_say_why():
    with pytest.raises(TraceError, match=r"inner \(Net\) decides by the values of a tensor"):
        traced(lambda net, x: net.inner(net.a(x)), a=conv(), inner=Net(lambda net, x: x if x.sum() > 0 else -x))
    with pytest.raises(TraceError, match="no layer that multiplies by weights"):
        traced(lambda net, x: x)
    with pytest.raises(TraceError, match="cannot be copied"):
        traced(lambda net, x: net.a(x), a=conv(), lock=__import__("threading").Lock())
    with pytest.warns(DeprecationWarning), pytest.raises(TraceError, match="scripted"):
        bitplan.trace(torch.jit.script(nn.Linear(8, 8)), T)


def test_a_lazy_model_is_told_from_one_that_has_run():
    model, example = nn.Sequential(nn.LazyLinear(8), nn.LazyLinear(3)), torch.ones(2, 4)
    with pytest.raises(TraceError, match=r"0\.weight has no shape before the model has run: call it once"):
        bitplan.trace(model, example)
    model(example)
    assert [layer.in_features for layer in bitplan.trace(model, example).layers] == [4, 8]
