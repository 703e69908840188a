"""Links of well-known architectures, against lists written by hand from their papers and definitions."""

import pytest
import torch

import bitplan
from bitplan.adapters.transformers import transformers
from bitplan.models.zoo import load_model


def traced(name, **options):
    model, example = load_model(name, weightless=True)
    return bitplan.trace(model, example, name=name, rules=bitplan.Rules(**options))


def counts(graph):
    return len(graph.layers), len(graph.groups) - 2, len(graph.selectable)


def links(graph):
    return {frozenset(link.layers) for link in graph.links}


def joined(*names):
    return frozenset(names)


def resnet_links(prefix=""):
    """The first convolution of each stage and the shortcut's read the same tensor."""
    return {joined(f"{prefix}layer{n}.0.conv1", f"{prefix}layer{n}.0.downsample.0") for n in range(1, 5)}


@pytest.mark.parametrize(("name", "expected"), [("resnet50", (54, 48, 41)), ("resnet101", (105, 99, 92))])
def test_bottleneck_resnets(name, expected):
    graph = traced(name)
    assert counts(graph) == expected  # layers, groups between first and last, selectable
    assert links(graph) == resnet_links()
    assert graph.layers[0].why == "first layer"
    assert graph.layers[-1].why == "last layer"
    assert not graph.unreached


def test_resnet18_has_no_shortcut_convolution_in_its_first_stage():
    assert links(traced("resnet18")) == {
        joined(f"layer{n}.0.conv1", f"layer{n}.0.downsample.0") for n in range(2, 5)
    }  # fmt: skip


def test_cifar_resnets_have_no_shortcut_convolutions():
    graph = traced("resnet20", narrow=0)
    assert (len(graph.layers), len(graph.selectable), len(graph.links)) == (20, 18, 0)
    assert sum(layer.macs for layer in graph.layers) == 40_551_040
    assert not traced("resnet20", narrow=128).selectable
    assert len(traced("resnet20").selectable) == 18, "a rule nobody wrote leaves layers to choose"


def test_bert():
    graph = traced("bert-base")
    encoder = [layer for layer in graph.layers if ".encoder." in layer.name and layer.weights]
    assert len(encoder) == 72
    assert len(graph.selectable) == 48
    assert {layer.name for group in graph.selectable for layer in group.layers} == {layer.name for layer in encoder}
    attention = "bert.encoder.layer.{}.attention.self.{}"
    assert links(graph) == {
        joined(*(attention.format(n, part) for part in ("query", "key", "value"))) for n in range(12)
    }
    products = [layer.name for layer in graph.layers if not layer.weights]
    assert products == [attention.format(n, part) for n in range(12) for part in ("matmul", "matmul_1")]
    assert graph.layers[0].name == "bert.embeddings.word_embeddings"
    assert graph.layers[0].why == "first layer"
    assert graph.layers[-1].why == "last layer"
    assert sum(layer.weights for layer in encoder) == 12 * (4 * 768 * 768 + 2 * 768 * 3072)


def test_pspnet():
    graph = traced("pspnet50")
    assert links(graph) == resnet_links("backbone.")  # the pyramid's four means are different tensors
    assert len(graph.layers) == 53 + 4 + 2
    assert graph.unreached == ("auxiliary.0", "auxiliary.4")  # only training reads the auxiliary head


def test_vision_transformer():
    graph = traced("vit_b_16")
    block = "encoder.layers.encoder_layer_{}."
    parts = ("self_attention.in_proj", "self_attention.scaled_dot_product_attention", "self_attention.out_proj",
             "mlp.0", "mlp.3")  # fmt: skip
    assert [layer.name for layer in graph.layers] == [
        "conv_proj", *(block.format(n) + part for n in range(12) for part in parts), "heads.head",
    ]  # fmt: skip
    assert not graph.links  # query, key and value are one packed matrix
    assert len(graph.selectable) == 48


def test_swin():
    graph = traced("swin_t")
    weighted = [layer.name for layer in graph.layers if layer.weights]
    blocks = {1: 2, 3: 2, 5: 6, 7: 2}
    expected = ["features.0.0"]
    for stage, count in blocks.items():
        for block in range(count):
            expected += [f"features.{stage}.{block}.{part}" for part in ("attn.qkv", "attn.proj", "mlp.0", "mlp.3")]
        if stage < 7:
            expected.append(f"features.{stage + 1}.reduction")
    assert weighted == [*expected, "head"]
    assert not graph.links


@pytest.mark.parametrize(
    "name", ["mobilenet_v2", "mobilenet_v3_large", "densenet121", "efficientnet_b0", "convnext_tiny"]
)
def test_chains_residuals_and_concatenations_link_nothing(name):
    graph = traced(name)
    assert not graph.links
    assert not graph.unreached


def test_densenet_layers_follow_its_blocks():
    graph = traced("densenet121")
    assert len(graph.layers) == 121
    assert sum(".denselayer" in layer.name for layer in graph.layers) == 2 * (6 + 12 + 24 + 16)


def test_mobilenet_depthwise_layers_have_all_channels_as_input_features():
    layers = {layer.name: layer for layer in traced("mobilenet_v2").layers}
    depthwise = layers["features.7.conv.1.0"]
    assert (depthwise.in_features, depthwise.weights, depthwise.macs) == (192, 192 * 9, 192 * 9 * 14 * 14)
    assert depthwise.fixed is None


def test_googlenet():
    """Of the four branches three begin with a convolution of the block's input; the fourth pools first."""
    blocks = ["3a", "3b", "4a", "4b", "4c", "4d", "4e", "5a", "5b"]
    graph = traced("googlenet")
    assert links(graph) == {
        joined(*(f"inception{block}.{part}.conv" for part in ("branch1", "branch2.0", "branch3.0"))) for block in blocks
    }
    assert {name.split(".")[0] for name in graph.unreached} == {"aux1", "aux2"}


def test_inception():
    def block(name, *parts):
        return joined(*(f"Mixed_{name}.{part}.conv" for part in parts))

    expected = {block(name, "branch1x1", "branch5x5_1", "branch3x3dbl_1") for name in ("5b", "5c", "5d")}
    expected |= {block("6a", "branch3x3", "branch3x3dbl_1")}
    expected |= {block(name, "branch1x1", "branch7x7_1", "branch7x7dbl_1") for name in ("6b", "6c", "6d", "6e")}
    expected |= {block("7a", "branch3x3_1", "branch7x7x3_1")}
    for name in ("7b", "7c"):
        expected |= {
            block(name, "branch1x1", "branch3x3_1", "branch3x3dbl_1"),
            block(name, "branch3x3_2a", "branch3x3_2b"),
            block(name, "branch3x3dbl_3a", "branch3x3dbl_3b"),
        }
    graph = traced("inception_v3")
    assert links(graph) == expected
    assert graph.unreached == ("AuxLogits.conv0.conv", "AuxLogits.conv1.conv", "AuxLogits.fc")


def test_squeezenet_expands_the_same_squeezed_tensor():
    assert links(traced("squeezenet1_0")) == {
        joined(f"features.{n}.expand1x1", f"features.{n}.expand3x3") for n in (3, 4, 5, 7, 8, 9, 10, 12)
    }


def test_timm_models_where_installed():
    graph = traced("timm/vit_tiny_patch16_224")
    assert [layer.name for layer in graph.layers if layer.weights][:3] == [
        "patch_embed.proj", "blocks.0.attn.qkv", "blocks.0.attn.proj",
    ]  # fmt: skip
    assert {layer.name.split(".")[-1] for layer in graph.layers if not layer.weights} == {
        "scaled_dot_product_attention"
    }


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_decoder_of_hugging_face(attention):
    library = transformers("this test")
    config = library.LlamaConfig(
        vocab_size=100, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    with torch.device("meta"):
        model = library.LlamaForCausalLM(config)
    graph = bitplan.trace(model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)})
    expected = set()
    for n in range(2):
        expected |= {
            joined(*(f"model.layers.{n}.self_attn.{part}_proj" for part in "qkv")),
            joined(*(f"model.layers.{n}.mlp.{part}_proj" for part in ("gate", "up"))),
        }
    assert links(graph) == expected
    assert graph.layers[0].why == "first layer"
    assert graph.layers[-1].name == "lm_head"


def test_a_mixture_of_experts():
    library = transformers("this test")
    config = library.MixtralConfig(
        vocab_size=100, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = library.MixtralForCausalLM(config).to(torch.bfloat16)
    graph = bitplan.trace(model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)})
    layers = {layer.name: layer for layer in graph.layers}
    experts = layers["model.layers.0.mlp.experts.down_proj"]
    assert experts.weights == 4 * 128 * 256
    assert experts.macs == 16 * 2 * 128 * 256  # two experts a token


def test_gpt2_with_its_transposed_layers_and_tied_head():
    library = transformers("this test")
    config = library.GPT2Config(
        vocab_size=100, n_embd=128, n_layer=2, n_head=4, n_positions=32, attn_implementation="eager"
    )
    graph = bitplan.trace(library.GPT2LMHeadModel(config), {"input_ids": torch.zeros(1, 16, dtype=torch.long)})
    layers = {layer.name: layer for layer in graph.layers}
    assert layers["transformer.h.0.attn.c_attn"].in_features == 128
    assert layers["transformer.h.0.mlp.c_proj"].in_features == 512
    assert layers["transformer.h.0.mlp.c_proj"].macs == 16 * 512 * 128
    assert layers["transformer.wte"].macs == 16 * 128 * 100
    assert layers["transformer.wte"].why == "first layer"
    assert layers["transformer.h.1.mlp.c_proj"].fixed is None  # the tied table is the last layer, not this one
    assert not graph.links
