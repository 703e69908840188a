"""The graph of a checkpoint without its model: layers, kinds and links by visible rules on names."""

from pathlib import Path

import numpy as np
import pytest

import bitplan
from bitplan.core.errors import FileError, InputError
from bitplan.core.rules import Rules
from bitplan.graph.names import LinkRule, Names, read_graph, trace_checkpoint
from bitplan.weights.opened import OpenedCheckpoint, natural_key
from bitplan.weights.tensors import Tensor


def checkpoint(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> OpenedCheckpoint:
    """Only names and shapes matter here."""
    return OpenedCheckpoint(
        Path("net.safetensors"),
        {n: Tensor(n, dtype, shapes[n], np.zeros(0, np.uint16)) for n in sorted(shapes, key=natural_key)},
    )


def llama(layers: int = 11) -> dict[str, tuple[int, ...]]:
    shapes = {
        "model.embed_tokens.weight": (1000, 64),
        "lm_head.weight": (1000, 64),
        "model.norm.weight": (64,),
    }
    for i in range(layers):
        block = f"model.layers.{i}"
        shapes |= {f"{block}.self_attn.{n}_proj.weight": (s, 64) for n, s in zip("qkvo", (64, 16, 16, 64), strict=True)}
        shapes |= {f"{block}.mlp.{n}_proj.weight": (160, 64) for n in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj.weight": (64, 160), f"{block}.input_layernorm.weight": (64,)}
    return shapes


def test_llama():
    graph = read_graph(checkpoint(llama()))
    assert graph.model == "net"
    assert len(graph.layers) == 2 + 11 * 7
    assert (graph.layers[0].name, graph.layers[0].kind, graph.layers[0].macs) == (
        "model.embed_tokens",
        "embedding",
        0,
    )
    assert (graph.layers[-1].name, graph.layers[-1].kind) == ("lm_head", "linear")
    assert [layer.name for layer in graph.layers if "o_proj" in layer.name][9:] == [
        "model.layers.9.self_attn.o_proj",
        "model.layers.10.self_attn.o_proj",
    ]
    assert {link.through for link in graph.links} == {"names (rule q/k/v)", "names (rule gate/up)"}
    assert len(graph.links) == 22
    assert len(graph.groups) == 2 + 11 * 4
    assert graph.link_of("model.layers.3.self_attn.k_proj").layers == (
        "model.layers.3.self_attn.k_proj",
        "model.layers.3.self_attn.q_proj",
        "model.layers.3.self_attn.v_proj",
    )
    down = next(layer for layer in graph.layers if layer.name.endswith("down_proj"))
    assert (down.macs, down.weights, down.in_features) == (10240, 10240, 160)
    assert all(layer.fixed is None for layer in graph.layers)


def test_links_can_be_emptied_and_replaced():
    assert read_graph(checkpoint(llama()), Names(links=())).links == ()
    only = Names(links=(LinkRule("mine", r"(o|q)_proj$"),))
    assert {link.through for link in read_graph(checkpoint(llama(2)), only).links} == {"names (rule mine)"}
    with pytest.raises(InputError, match="'bad' for links"):
        read_graph(checkpoint(llama(1)), Names(links=(LinkRule("bad", "("),)))


FAMILIES = {
    "bert": (
        {f"bert.encoder.layer.0.attention.self.{n}.weight": (8, 8) for n in ("query", "key", "value")},
        3,
    ),
    "distilbert": ({f"layer.0.attention.{n}_lin.weight": (8, 8) for n in "qkv"}, 3),
    "old llama": ({f"layers.0.attention.w{n}.weight": (8, 8) for n in "qkvo"}, 3),
    "mixtral": ({f"layers.0.block_sparse_moe.experts.1.w{n}.weight": (8, 8) for n in "123"}, 2),
    "t5": ({f"encoder.block.0.layer.0.SelfAttention.{n}.weight": (8, 8) for n in "qkvo"}, 3),
    "t5 gate": ({f"encoder.block.0.layer.1.DenseReluDense.wi_{n}.weight": (8, 8) for n in "01"}, 2),
    "cross": ({f"decoder.layers.0.encoder_attn.{n}_proj.weight": (8, 8) for n in "qkv"}, 2),
    "latent": (
        {f"layers.0.self_attn.{n}.weight": (8, 8) for n in ("q_proj", "kv_a_proj_with_mqa", "o_proj")},
        2,
    ),
    "other inputs": ({"l.q_proj.weight": (8, 8), "l.k_proj.weight": (8, 8), "l.v_proj.weight": (8, 4)}, 2),
    "experts apart": ({f"m.experts.{i}.gate_proj.weight": (8, 8) for i in range(3)}, 0),
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_usual_names(family):
    shapes, linked = FAMILIES[family]
    links = read_graph(checkpoint(shapes)).links
    assert [len(link.layers) for link in links] == ([linked] if linked else [])


def test_gpt2_lies_the_other_way_round():
    graph = read_graph(checkpoint({
        "h.0.attn.c_attn.weight": (64, 192), "h.0.mlp.c_fc.weight": (64, 256),
        "h.0.mlp.c_proj.weight": (256, 64),
        "h.0.ln_1.weight": (64,), "wte.weight": (500, 64), "wpe.weight": (32, 64),
    }))  # fmt: skip
    assert {layer.name: (layer.kind, layer.in_features) for layer in graph.layers} == {
        "wpe": ("embedding", 32), "wte": ("embedding", 500), "h.0.attn.c_attn": ("linear", 64),
        "h.0.mlp.c_fc": ("linear", 64), "h.0.mlp.c_proj": ("linear", 256),
    }  # fmt: skip


def test_convolutions():
    graph = read_graph(checkpoint({
        "conv1.weight": (16, 1, 7, 7), "fc.weight": (10, 64), "fc.bias": (10,), "bn1.weight": (16,),
        "layer1.0.dw.weight": (32, 1, 3, 3), "layer2.weight": (8, 7, 5), "layer3.weight": (8, 7, 1, 2, 3),
        "layer4.norm.weight": (8, 4, 4), "layer5.bias": (3, 3),
    }, "F32"))  # fmt: skip
    assert [(layer.name, layer.kind, layer.in_features, layer.macs) for layer in graph.layers] == [
        ("conv1", "conv2d", 1, 784), ("fc", "linear", 64, 640), ("layer1.0.dw", "conv2d", 32, 288),
        ("layer2", "conv1d", 7, 280), ("layer3", "conv3d", 7, 336),
    ]  # fmt: skip


def test_stacked_experts():
    graph = read_graph(checkpoint({
        "layers.0.mlp.experts.gate_up_proj": (4, 32, 128), "layers.0.mlp.experts.down_proj": (4, 64, 32),
        "layers.0.mlp.experts.gate_up_proj_bias": (4, 128), "layers.0.mlp.router.weight": (4, 32),
    }))  # fmt: skip
    assert [(layer.name.split(".")[-1], layer.in_features, layer.weights) for layer in graph.layers] == [
        ("down_proj", 64, 8192), ("gate_up_proj", 32, 16384), ("router", 32, 128),
    ]  # fmt: skip
    assert {layer.kind for layer in graph.layers} == {"linear"}


@pytest.mark.parametrize("shapes", [{"a.bias": (3,)}, {"norm.weight": (3,)}, {"a.position": (3, 3)}])
def test_no_layers(shapes):
    with pytest.raises(FileError, match="no float weights"):
        read_graph(checkpoint(shapes))


def test_rules_fix_the_embedding_and_the_head():
    graph = trace_checkpoint(checkpoint(llama(1)), Rules(narrow=0))
    assert {layer.name: layer.why for layer in graph.layers if layer.fixed} == {
        "model.embed_tokens": "first layer",
        "lm_head": "last layer",
    }
    assert graph == bitplan.trace(checkpoint(llama(1)), rules=Rules(narrow=0))
    assert not trace_checkpoint(checkpoint(llama(1)), names=Names(links=())).links
