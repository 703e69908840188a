"""Published weights into float models: every format, a new head, and what does not fit."""

import copy
import json
import logging
import pickle

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bitplan
from bitplan.adapters import torchvision
from bitplan.adapters.transformers import transformers
from bitplan.core.errors import FileError, InputError
from bitplan.models.pspnet import PSPNet
from bitplan.quant.convert import quantize
from nets import Bomb

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}


def bert(kind="BertForQuestionAnswering", seed=0, **sizes):
    library = transformers("the test")
    torch.manual_seed(seed)
    return getattr(library, kind)(library.BertConfig(attn_implementation="eager", **SIZES | sizes)).eval()


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def bare(tmp_path):
    """A folder as Hugging Face writes it, of BERT without a head."""
    bert("BertModel", seed=1).save_pretrained(tmp_path / "bare")
    return tmp_path / "bare"


def test_a_bare_bert_fills_the_one_with_a_head_and_the_head_stays(bare, caplog):
    model, source = bert(), bert("BertModel", seed=1)
    head = model.qa_outputs.weight.clone()
    with caplog.at_level(logging.INFO):
        bitplan.load_weights_(model, bare, fresh=["qa_outputs.*"])
    wanted = source.state_dict()
    filled = {name.removeprefix("bert."): value for name, value in model.state_dict().items()}
    for name in filled.keys() - {"qa_outputs.weight", "qa_outputs.bias"}:
        assert torch.equal(filled[name], wanted[name]), name
    assert torch.equal(model.qa_outputs.weight, head)
    assert "left aside bert.pooler.dense.bias, bert.pooler.dense.weight" in caplog.text
    ids = torch.arange(10)[None]
    torch.testing.assert_close(model.bert(ids).last_hidden_state, source(ids).last_hidden_state)


def test_a_missing_head_must_be_allowed(bare):
    model = bert()
    before = state(model)
    with pytest.raises(FileError, match=r"^[^\n]+$") as refused:
        bitplan.load_weights_(model, bare)
    assert "lacks qa_outputs.weight (2, 16), qa_outputs.bias (2,), which the model has" in str(refused.value)
    assert "add --fresh 'qa_outputs.*' (in Python: fresh=('qa_outputs.*',))" in str(refused.value)
    assert same(state(model), before)


def test_shards_and_old_names_and_heads_of_pretraining(bare, tmp_path, caplog):
    source = bert("BertForPreTraining", seed=2)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value.clone()
        for name, value in source.state_dict().items()
    }
    names = sorted(old)
    folder = tmp_path / "shards"
    folder.mkdir()
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in halves.items():
        save_file({name: old[name].clone() for name in part}, folder / shard)
    index = {"weight_map": {name: shard for shard, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = bert()
    with caplog.at_level(logging.INFO):
        bitplan.load_weights_(model, folder, fresh=["qa_outputs.*"])
    assert "cls.predictions" in caplog.text
    wanted = {n: v for n, v in source.state_dict().items() if n.startswith("bert.") and "pooler" not in n}
    assert same({n: v for n, v in state(model).items() if n.startswith("bert.")}, wanted)
    bitplan.load_weights_(bert(), folder / "model.safetensors.index.json", fresh=["qa_outputs.*"])
    (folder / "b.safetensors").unlink()
    with pytest.raises(FileError, match="the shard b.safetensors that .* names is missing"):
        bitplan.load_weights_(model, folder, fresh=["qa_outputs.*"])


def test_a_shard_without_what_its_index_says(tmp_path):
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    listed = {"weight": "a.safetensors", "bias": "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(FileError, match="says that 'bias' is in a.safetensors, but it is not"):
        bitplan.load_weights_(nn.Linear(2, 2), tmp_path)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_torchvision_networks(name, ending, tmp_path):
    torch.manual_seed(3)
    source = torchvision.build(name)
    path = tmp_path / f"{name}.{ending}"
    torch.save(source.state_dict(), path) if ending == "pth" else save_file(source.state_dict(), path)
    model, _ = bitplan.load_model(name)
    bitplan.load_weights_(model, path)
    assert same(state(model), state(source))


def test_another_number_of_classes(tmp_path):
    torch.save(torchvision.build("resnet18").state_dict(), tmp_path / "r.pth")
    model = torchvision.build("resnet18", num_classes=10)
    with pytest.raises(FileError, match=r"fc.weight is \(1000, 512\) in the file, \(10, 512\) in the model"):
        bitplan.load_weights_(model, tmp_path / "r.pth")
    head = model.fc.weight.clone()
    bitplan.load_weights_(model, tmp_path / "r.pth", fresh=["fc.*"])
    assert torch.equal(model.fc.weight, head)
    with pytest.raises(FileError, match=r"r.pth has layer1.0.conv3.weight|r.pth lacks layer1.0.conv3.weight"):
        bitplan.load_weights_(torchvision.build("resnet50"), tmp_path / "r.pth")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"num_hidden_layers": 3},
            r"lacks bert.encoder.layer.2.attention.self.query.weight \(16, 16\), .* and 12 more",
        ),
        ({"num_hidden_layers": 1}, r"has bert.encoder.layer.1.\S+, which the model lacks"),
        ({"vocab_size": 41}, r"word_embeddings.weight is \(40, 16\) in the file, \(41, 16\) in the model"),
        ({"num_attention_heads": 4}, r"config.json says num_attention_heads 2, the model has 4"),
        ({"hidden_act": "relu"}, r"config.json says hidden_act 'gelu', the model has 'relu'"),
    ],
)
def test_another_architecture_is_one_line_and_changes_nothing(bare, sizes, message):
    model = bert(**sizes)
    before = state(model)
    with pytest.raises(FileError, match=rf"^[^\n]*{message}[^\n]*$"):
        bitplan.load_weights_(model, bare, fresh=["qa_outputs.*"])
    assert same(state(model), before)


def test_a_file_that_is_nothing_alike(tmp_path):
    save_file({"other.weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(
        FileError, match="has no tensor of this model: it has other.weight …, the model has weight, bias …"
    ):
        bitplan.load_weights_(nn.Linear(2, 2), tmp_path / "a.safetensors")


def test_codes_are_no_weights(tmp_path):
    save_file({"weight": torch.ones(2, 2, dtype=torch.int8), "bias": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(FileError, match=r"stores 'weight' as integers \(I8\): bitplan starts from float weights"):
        bitplan.load_weights_(nn.Linear(2, 2), tmp_path / "a.safetensors")
    save_file({"weight": torch.ones(2, 2), "bias": torch.zeros(2, dtype=torch.int8)}, tmp_path / "a.safetensors")
    with pytest.raises(FileError, match="bias is torch.int8 in the file, torch.float32 in the model"):
        bitplan.load_weights_(nn.Linear(2, 2), tmp_path / "a.safetensors")


def test_half_precision_is_widened(tmp_path):
    source = nn.Linear(3, 2)
    save_file({name: value.half() for name, value in source.state_dict().items()}, tmp_path / "a.safetensors")
    model = nn.Linear(3, 2)
    bitplan.load_weights_(model, tmp_path / "a.safetensors")
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, source.weight.half().float())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pth"])
def test_no_pickle_is_run(name, tmp_path):
    (tmp_path / name).write_bytes(pickle.dumps({"weight": Bomb()}))
    with pytest.raises(FileError, match=r"^[^\n]*wants to run code when it is read, so it is refused[^\n]*$"):
        bitplan.load_weights_(nn.Linear(2, 2), tmp_path if name.endswith("bin") else tmp_path / name)


def test_what_cannot_be_asked(tmp_path, plan):
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(FileError, match="there is no such file or folder"):
        bitplan.load_weights_(model, tmp_path / "none")
    with pytest.raises(FileError, match="holds neither model.safetensors nor"):
        bitplan.load_weights_(model, tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="fresh 'head.*' matches no tensor of the model"):
        bitplan.load_weights_(model, tmp_path, fresh=["head.*"])
    with pytest.raises(InputError, match=r"fresh is the text '0.\*': give a list of patterns"):
        bitplan.load_weights_(model, tmp_path, fresh="0.*")
    precisions = {"0": "w4a4"}
    with pytest.raises(InputError, match="load them first, then quantize"):
        bitplan.load_weights_(quantize(model, plan(**precisions)), tmp_path)
    bitplan.load_weights_(model, tmp_path)


def test_a_published_classifier_is_the_backbone_of_a_network_around_it(tmp_path):
    torch.manual_seed(1)
    published = torchvision.build("resnet18")
    torch.save(published.state_dict(), tmp_path / "resnet18.pth")
    body = torchvision.build("resnet18")
    del body.fc, body.avgpool
    network = PSPNet(body, classes=3, width=512)
    bitplan.load_weights_(network, tmp_path / "resnet18.pth", fresh=["pyramid.*", "head.*", "auxiliary.*"])
    expected = {name: value for name, value in published.state_dict().items() if not name.startswith("fc.")}
    assert same(state(network.backbone), expected)


class Versioned(nn.Sequential):
    """Refuses a state that does not say which version of its code wrote it, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state, prefix, about, *rest):
        if about.get("version") != 2:
            raise ValueError("version should be 2")
        super()._load_from_state_dict(state, prefix, about, *rest)


def test_networks_that_ask_for_the_version_of_a_state_are_loaded(tmp_path):
    model = Versioned(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    graph = bitplan.trace(model, torch.randn(1, 8))
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(quantized, [torch.randn(4, 8)])
    bitplan.save_checkpoint(quantized, tmp_path / "q")
    again = bitplan.load_checkpoint(tmp_path / "q", copy.deepcopy(model))
    assert torch.equal(again(torch.ones(1, 8)), quantized(torch.ones(1, 8)))
    torch.save(dict(model.state_dict()), tmp_path / "float.pth")
    bitplan.load_weights_(copy.deepcopy(model), tmp_path / "float.pth")
