"""What every recipe does: keeps a plan or refuses it by name, widens aloud, holds links, survives odd names."""

import json
import logging
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llms import llama_shapes, plan_for, save_llama, scanned
from torch import nn

import bitplan
from bitplan.core.errors import FileError, InputError
from bitplan.core.precision import Precision
from bitplan.core.registry import EXPORTERS
from bitplan.exporters.base import make_exporter
from bitplan.graph.rules import Rules
from bitplan.plugins.runtimes.llama_cpp import tensor_of
from bitplan.plugins.runtimes.recipes import escape_name, unescape_name
from bitplan.quant.layer_types import Conv1D
from nets import Net

RECIPES = ["compressed-tensors", "torchao", "llama.cpp", "mlx"]
WEIGHTS_ONLY = ["llama.cpp", "mlx"]
WEIGHTS = {"llama.cpp": {2, 3, 4, 5, 6, 8, 16}, "mlx": {2, 3, 4, 5, 6, 8, 16}}
ANY = set(range(2, 9)) | {16}


def renamed(to, name):
    return tensor_of(name) if to == "llama.cpp" else name


def written(to, plan, graph=None, **options):
    with tempfile.TemporaryDirectory() as folder:
        path = bitplan.export(plan, Path(folder) / "recipe", to, graph=graph, **options)
        return make_exporter(to, {}).read(path).precisions


def expressible(to, precision):
    if precision.weight_bits == 16:
        return precision.act_bits == 16
    acts = {16} if to in WEIGHTS_ONLY else {8, 16}
    return precision.weight_bits in WEIGHTS.get(to, ANY) and precision.act_bits in acts


precisions = st.builds(
    lambda weight, act: Precision(weight_bits=weight, act_bits=act), st.integers(2, 16), st.sampled_from([2, 4, 8, 16])
)


@st.composite
def llama_plans(draw):
    """Two blocks of a llama; q/k/v and gate/up are linked and share a precision."""
    names = [name for name in llama_shapes() if "embed" not in name]
    links = [
        tuple(f"model.layers.{i}.{part}_proj" for part in parts)
        for i in range(2)
        for parts in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up"))
    ]
    chosen = {name: draw(precisions) for name in names}
    for link in links:
        chosen |= dict.fromkeys(link, chosen[link[0]])
    return plan_for(chosen, links)


def test_every_recipe_is_registered():
    assert set(RECIPES) <= set(EXPORTERS)


@pytest.mark.parametrize("to", RECIPES)
@given(made=llama_plans())
@settings(max_examples=25)
def test_a_recipe_says_what_the_plan_says_or_is_refused(to, made):
    plan, graph = made
    lost = [name for name, precision in plan.precisions.items() if not expressible(to, precision)]
    if lost or all(precision.weight_bits == 16 for precision in plan.precisions.values()):
        with pytest.raises(InputError) as refusal:
            written(to, plan, graph)
        assert "\n" not in str(refusal.value)
        assert not lost or f"{to} cannot express {lost[0]} at {plan.precisions[lost[0]]} (" in str(refusal.value)
    else:
        assert written(to, plan, graph) == {renamed(to, name): it for name, it in plan.precisions.items()}


@pytest.mark.parametrize("to", RECIPES)
@given(made=llama_plans())
@settings(max_examples=25)
def test_widening_never_narrows_and_holds_links(to, made):
    plan, graph = made
    if all(precision.weight_bits > 8 for precision in plan.precisions.values()):
        return
    read = written(to, plan, graph, widen=True)
    for name, asked in plan.precisions.items():
        given_bits = read[renamed(to, name)]
        assert given_bits == asked or (given_bits.above(asked) and not expressible(to, asked))
        assert expressible(to, given_bits)
    for link in plan.links:
        assert len({read[renamed(to, name)] for name in link}) == 1


@pytest.mark.parametrize("to", RECIPES)
def test_a_scan_of_a_checkpoint(tmp_path, to):
    plan, graph = scanned(
        save_llama(tmp_path / "model.safetensors"), rules=Rules(narrow=0, first="w8a8", embeddings="w8a8")
    )
    assert {str(precision) for precision in plan.precisions.values()} == {"w2a16", "w4a16", "w8a8", "w8a16"}
    read = written(to, plan, graph)
    assert len(read) == len(plan.precisions)
    for name, precision in plan.precisions.items():
        # an embedding reads indices: the bits of its input say nothing
        expected = Precision.parse("w8a16") if "embed" in name else precision
        assert read[renamed(to, name)] == expected


@pytest.mark.parametrize("to", RECIPES)
def test_widening_is_said_aloud_with_every_layer(caplog, to):
    plan, graph = plan_for({"model.layers.0.mlp.down_proj": "w4a2", "lm_head": "w4a2"})
    with pytest.raises(InputError, match=r"cannot express .*\(2-bit activations\).*--widen"):
        written(to, plan, graph)
    with caplog.at_level(logging.WARNING):
        written(to, plan, graph, widen=True)
    act = 16 if to in WEIGHTS_ONLY else 8
    expected = f"widened for {to}: w4a2 → w4a{act} (2-bit activations): model.layers.0.mlp.down_proj, lm_head"
    assert [record.getMessage() for record in caplog.records] == [expected]


@pytest.mark.parametrize("to", RECIPES)
@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("conv1", "conv2d", "a conv2d"),
        ("up", "conv_transpose2d", "a conv_transpose2d"),
        ("layers.0.attention.matmul", "product", "a product"),
        ("layers.0.scaled_dot_product_attention", "attention", "a product"),
        ("layers.0.attn.in_proj_weight", "linear", "a parameter"),
        ("layers.0.attn.in_proj", "parameter", "a parameter"),
    ],
)
def test_what_is_no_linear_layer_is_refused_by_name(to, name, kind, words):
    plan, graph = plan_for({name: "w4a16", "lm_head": "w4a16"}, kinds={name: kind})
    with pytest.raises(InputError) as refusal:
        written(to, plan, graph)
    assert f"{to} cannot express {name} at w4a16 ({words})" in str(refusal.value)


@pytest.mark.parametrize("to", ["compressed-tensors", "torchao", "mlx"])
def test_what_is_no_linear_layer_can_be_left_alone(to):
    plan, graph = plan_for({"conv1": "w4a4", "x.matmul": "w8a8", "fc": "w4a16"}, kinds={"conv1": "conv2d"})
    read = written(to, plan, graph, widen=True)
    assert {name: str(precision) for name, precision in read.items()} == {"conv1": "w16a16", "fc": "w4a16"}


@pytest.mark.parametrize("to", RECIPES)
def test_a_recipe_that_quantizes_nothing_is_refused(to):
    plan, graph = plan_for({"lm_head": "w4a4"}, kinds={"lm_head": "conv2d"})
    with pytest.raises(InputError, match="leave every layer of net at 16 bits"):
        written(to, plan, graph, widen=True)


@pytest.mark.parametrize("to", RECIPES)
def test_a_link_is_widened_as_a_whole_or_refused(to):
    link = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj")
    plan, graph = plan_for(
        dict.fromkeys(link, "w4a16") | {"lm_head": "w4a16"}, [link], kinds={link[1]: "conv1d"}, rows={link[1]: 64}
    )
    with pytest.raises(InputError, match=r"k_proj at w4a16 \(a conv1d\), .*q_proj at w4a16 \(linked with .*k_proj"):
        written(to, plan, graph)
    read = written(to, plan, graph, widen=True)
    assert {str(read[renamed(to, name)]) for name in link} == {"w16a16"}
    assert str(read[renamed(to, "lm_head")]) == "w4a16"


def test_a_plan_alone_is_taken_at_its_word(caplog):
    plan, _ = plan_for({"fc": "w4a16", "y.bmm_1": "w8a8", "model.embed_tokens": "w8a8"})
    with caplog.at_level(logging.WARNING):
        read = written("torchao", plan, widen=True)
    assert {name: str(it) for name, it in read.items()} == {"fc": "w4a16", "model.embed_tokens": "w8a16"}
    assert "every layer of net is taken to be linear" in caplog.text
    assert "y.bmm_1" in caplog.text


def forward(net, x):
    x = net.table(x)
    x = net.attention(x, x, x)[0]
    return net.fc(net.conv(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("to", ["compressed-tensors", "torchao"])
def test_a_quantized_model_says_itself_what_its_layers_are(to):
    attention = nn.MultiheadAttention(64, 2, batch_first=True)
    net = Net(forward, table=nn.Embedding(10, 64), attention=attention, conv=nn.Conv1d(64, 64, 1), fc=nn.Linear(64, 64))
    graph = bitplan.trace(net, torch.zeros(1, 4, dtype=torch.long), rules=Rules(narrow=0, first=None, last=None))
    model = bitplan.quantize(net, bitplan.Plan.uniform(graph, "w4a8"))
    with pytest.raises(InputError) as refusal:
        written(to, model)
    for words in ("in_proj at w4a8 (a parameter)", "out_proj at w4a8 (a parameter)", "(a product)"):
        assert words in str(refusal.value)
    read = written(to, model, widen=True)
    assert {name: str(it) for name, it in read.items() if it.weight_bits < 16} == {"table": "w8a16", "fc": "w4a8"}


def test_a_quantized_gpt2_has_matrices_that_lie_the_other_way_round():
    """Their rows are 64 inputs, though the last axis of the weight is 100 outputs, which MLX could not cut."""
    block = Conv1D(100, 64)
    blocks = nn.ModuleList([nn.ModuleDict({"mlp": nn.ModuleDict({"c_fc": block})})])
    net = Net(lambda net, x: net.h[0]["mlp"]["c_fc"](x), h=blocks)
    graph = bitplan.trace(net, torch.zeros(1, 64), rules=Rules(narrow=0, first=None, last=None))
    model = bitplan.quantize(net, bitplan.Plan.uniform(graph, "w4a16"))
    read = written("mlx", model)
    assert {name: str(it) for name, it in read.items()} == {"h.0.mlp.c_fc": "w4a16"}
    with pytest.raises(InputError, match=r"c_fc at w4a16 \(a \(in, out\) matrix\)"):
        written("torchao", model)


def test_the_graph_of_another_network_is_refused():
    plan, _ = plan_for({"fc": "w4a16"})
    _, other = plan_for({"head": "w4a16"})
    with pytest.raises(InputError, match="has no layer 'fc'"):
        written("torchao", plan, other)


ODD = [
    "a.b[0]",
    "a(b|c)+",
    "x.*",
    "^x$",
    "re:.*",
    "_default",
    "Linear",
    "back\\slash",
    "spa ce",
    "ümlaut.ß",
    "d\\Z",
    "a\nb",
]


@pytest.mark.parametrize("to", ["compressed-tensors", "torchao", "mlx"])
def test_odd_names_come_back(to):
    plan, graph = plan_for({name: f"w{2 + i % 3}a16" for i, name in enumerate(ODD)})
    assert written(to, plan, graph) == dict(plan.precisions)


@given(st.text(min_size=1))
def test_any_name_can_be_written_literally(name):
    assert unescape_name(escape_name(name)) == name


BAD = [
    "{",
    "[]",
    "{}",
    "a=b=c",
    "\0",
    '{"quantization_config": 3}',
    '{"quantization_config": {"ignore": [], "config_groups": {"g": {}}}}',
    '{"_data": {"fqn_to_config": {"a": 1}}}',
    '{"_data": {"fqn_to_config": {"a": {"_type": "Evil", "_data": {"weight_dtype": {"_data": "int4"}}}}}}',
    '{"quantization": []}',
    '{"quantization": {"a": {"bits": "x"}}}',
]


@pytest.mark.parametrize("to", RECIPES)
@pytest.mark.parametrize("text", BAD)
def test_a_file_that_is_no_recipe(tmp_path, to, text):
    path = tmp_path / "recipe"
    path.write_text(text)
    with pytest.raises(FileError, match=str(path)):
        make_exporter(to, {}).read(path)


@pytest.mark.parametrize("to", RECIPES)
def test_an_existing_file_is_kept_unless_told(tmp_path, to):
    plan, graph = plan_for({"lm_head": "w4a16"})
    path = tmp_path / "recipe"
    path.write_text("mine")
    with pytest.raises(FileError, match="exists"):
        bitplan.export(plan, path, to, graph=graph)
    assert path.read_text() == "mine"
    bitplan.export(plan, path, to, graph=graph, force=True)
    assert "mine" not in path.read_text()


@pytest.mark.parametrize("to", ["compressed-tensors", "torchao", "mlx"])
@pytest.mark.parametrize("size", [0, -1])
def test_impossible_groups(to, size):
    plan, graph = plan_for({"fc": "w4a16"})
    with pytest.raises(InputError, match="group_size must be"):
        written(to, plan, graph, group_size=size)


@pytest.mark.parametrize("to", RECIPES)
def test_a_recipe_repeats(tmp_path, to):
    plan, graph = scanned(
        save_llama(tmp_path / "model.safetensors"), rules=Rules(narrow=0, first="w8a8", embeddings="w8a8")
    )
    first, second = (bitplan.export(plan, tmp_path / name, to, graph=graph).read_bytes() for name in ("one", "two"))
    assert first == second
    if to != "llama.cpp":
        assert json.loads(first)
