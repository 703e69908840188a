"""First and last layer of real files, in both forms: as the traced network has them, or said not to be known."""

import logging
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bitplan
from bitplan.adapters.transformers import transformers
from bitplan.weights.opened import keeps_order, open_checkpoint

SMALL = {
    "vocab_size": 3000,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TOKENS = torch.zeros(1, 8, dtype=torch.long)
PAIRS = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}


def zoo(name):
    return lambda: (bitplan.load_model(name)[0], torch.empty(1, 3, 64, 64))


def of_hugging_face(kind, config, example, **sizes):
    def build():
        library = transformers("a test")
        return getattr(library, kind)(getattr(library, config)(**sizes)), example

    return build


def bert(kind):
    return of_hugging_face(kind, "BertConfig", {"input_ids": TOKENS}, **SMALL)


def llama(**more):
    sizes = SMALL | {"num_key_value_heads": 2} | more
    return of_hugging_face("LlamaForCausalLM", "LlamaConfig", {"input_ids": TOKENS}, **sizes)


T5 = {"vocab_size": 3000, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = {"vocab_size": 3000, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4}  # fmt: skip


def gray():
    head = nn.Sequential(nn.Flatten(), nn.Linear(24, 9))
    parts = {
        "stem": nn.Conv2d(1, 8, 3),
        "middle": nn.Conv2d(8, 24, 3),
        "pool": nn.AdaptiveAvgPool2d(1),
        "classes": head,
    }
    return nn.Sequential(OrderedDict(parts)), torch.empty(1, 1, 12, 12)


def generator():
    """Its last layer has the shape of a first one, as (in, out) matrices have."""
    ups = [nn.ConvTranspose2d(*sizes, 4) for sizes in ((100, 32), (32, 16), (16, 3))]
    return nn.Sequential(*ups), torch.empty(1, 100, 1, 1)


# network → whether sorted names let its first and its last layer be known
NETWORKS = {
    "resnet18": (zoo("resnet18"), True, True),
    "mobilenet_v2": (zoo("mobilenet_v2"), True, True),
    "efficientnet_b0": (zoo("timm/efficientnet_b0"), True, True),
    "densenet121": (zoo("densenet121"), True, True),
    "bert": (bert("BertForSequenceClassification"), True, True),
    "bare bert": (bert("BertModel"), True, False),
    "masked bert": (bert("BertForMaskedLM"), True, False),
    "llama": (llama(), True, True),
    "tied llama": (llama(tie_word_embeddings=True), True, False),
    "t5": (of_hugging_face("T5ForConditionalGeneration", "T5Config", PAIRS, **T5), True, False),
    "bart": (of_hugging_face("BartForConditionalGeneration", "BartConfig", PAIRS, **BART), True, False),
    "gray": (gray, True, True),
    "generator": (generator, False, False),
}  # fmt: skip


def ends(graph):
    """The layers fixed as first and last; a table that is both, as tied ones are, is fixed as the first."""
    return {layer.rule: layer.name for layer in graph.layers if layer.is_end}


@pytest.mark.parametrize("form", ["pth", "safetensors"])
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_a_file_has_the_ends_of_its_network_or_says_that_it_does_not_know(tmp_path, caplog, network, form):
    build, first, last = NETWORKS[network]
    model, example = build()
    expected = ends(bitplan.trace(model.eval(), example, rules=bitplan.Rules(narrow=0)))
    path = tmp_path / f"net.{form}"
    if form == "pth":
        torch.save(model.state_dict(), path)
        known = {"first": True, "last": network != "bare bert"}
    else:
        state = {id(tensor): (name, tensor) for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
        save_file({name: tensor.detach().contiguous() for name, tensor in state.values()}, path)
        known = {"first": first, "last": last}
    assert open_checkpoint(path).in_order == (form == "pth")
    with caplog.at_level(logging.WARNING):
        graph = bitplan.trace(path, rules=bitplan.Rules(narrow=0))
    assert ends(graph) == {end: name for end, name in expected.items() if known[end]}
    unknown = [end for end in ("first", "last") if not known[end]]
    assert caplog.text.count("does not tell which layer is the") == bool(unknown)
    assert all(end in caplog.text for end in unknown)


def test_a_tied_table_is_one_layer_as_it_is_of_the_network(tmp_path):
    model, example = llama(tie_word_embeddings=True)()
    torch.save(model.state_dict(), tmp_path / "net.pth")
    traced, read = bitplan.trace(model, example), bitplan.trace(tmp_path / "net.pth")
    weighted = {layer.name: (layer.kind, layer.in_features) for layer in traced.layers if layer.weights}
    assert {layer.name: (layer.kind, layer.in_features) for layer in read.layers} == weighted


def test_encoders_come_before_decoders_where_names_are_sorted(tmp_path):
    model, _ = NETWORKS["t5"][0]()
    save_file({name: tensor.clone() for name, tensor in model.encoder.state_dict(prefix="encoder.").items()}
              | {name: tensor.clone() for name, tensor in model.decoder.state_dict(prefix="decoder.").items()},
              tmp_path / "net.safetensors")  # fmt: skip
    names = [layer.name for layer in bitplan.trace(tmp_path / "net.safetensors").layers if layer.kind != "embedding"]
    sides = [name.partition(".")[0] for name in names]
    assert sides == sorted(sides, reverse=True)


def test_rules_that_are_off_are_not_missed(tmp_path, caplog):
    torch.save(bert("BertModel")()[0].state_dict(), tmp_path / "net.pth")
    with caplog.at_level(logging.WARNING):
        bitplan.trace(tmp_path / "net.pth", rules=bitplan.Rules(last=None))
    assert caplog.text == ""


def test_what_keeps_the_order_of_modules(tmp_path):
    """Sorted names do not, in whatever way, nor do shuffled ones; a header that has them as modules do does."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    torch.save(net.state_dict(), tmp_path / "net.pth")
    tensors = dict(open_checkpoint(tmp_path / "net.pth").tensors)
    assert keeps_order(tensors)
    names = list(tensors)
    shuffled = [names[index] for index in torch.randperm(len(names), generator=torch.Generator().manual_seed(1))]
    for others in (sorted(names), shuffled, [*names[::2], *names[1::2]][::-1]):
        assert not keeps_order({name: tensors[name] for name in others})


def test_matrices_that_are_not_planned_are_named(tmp_path, caplog):
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3))
    net = nn.Sequential(OrderedDict(stem=nn.Linear(4, 8), norm=nn.LayerNorm((2, 8)), head=spectral))
    net.register_parameter("table", nn.Parameter(torch.ones(5, 4)))
    torch.save(net.state_dict(), tmp_path / "net.pth")
    with caplog.at_level(logging.WARNING):
        graph = bitplan.trace(tmp_path / "net.pth", rules=bitplan.Rules(first=None, last=None))
    assert [layer.name for layer in graph.layers] == ["stem"]
    assert caplog.text.endswith("not named like weights: table, head.parametrizations.weight.original\n")
