"""A batch of a user's data means the same wherever it is given: what is input, and what are labels."""

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import bitplan
from bitplan.adapters.timm import timm
from bitplan.core.errors import InputError
from bitplan.tasks.loaded import Loaded, UserFunction, samples_of

Pair = namedtuple("Pair", "x y")


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        yield


class Gained(nn.Module):
    """As many are written: an optional second argument, which labels would fit."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, gain=None):
        hidden = F.relu(self.first(x))
        return self.third(F.relu(self.second(hidden if gain is None else hidden * (1 + gain[:, None]))))


class Masked(Gained):
    """Two arguments that are both needed; products of activations, so that the root itself is quantized."""

    def forward(self, x, mask):
        hidden = F.relu(self.second(F.relu(self.first(x))))
        return self.third(torch.matmul(hidden[:, None] * mask[:, None], hidden[:, :, None]).squeeze(2) * hidden)


def input_steps(model):
    return {name: value for name, value in model.state_dict().items() if "input_quantizer" in name}


def calibrated(model, plan, batch):
    quantized = bitplan.quantize(model, plan)
    bitplan.calibrate_(quantized, [batch])
    return input_steps(quantized)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


X, Y = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), torch.arange(1, 6)
WITH_LABELS = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "named tuple": Pair,
    "nested": lambda x, y: ((x,), y),
    "mapping": lambda x, y: {"x": x, "labels": y},
    "mapping with a further column": lambda x, y: {"x": x, "labels": y, "row": y},
    "mapping and labels": lambda x, y: ({"x": x}, y),
}


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("kind", WITH_LABELS)
def test_labels_enter_no_model(kind, count, tmp_path):
    model, batch = Gained().eval(), WITH_LABELS[kind](X[:count], Y[:count])
    plan = bitplan.choose(model, X, budget="70%")
    wanted = calibrated(model, plan, X[:count])
    assert same(calibrated(model, plan, batch), wanted)
    quantized = bitplan.quantize(model, plan, batches=[batch], finish="compensate").eval()
    assert same(input_steps(quantized), wanted)
    bitplan.export(quantized, tmp_path / "m.onnx", "onnx", example=X)
    alone, labelled = (bitplan.verify(tmp_path / "m.onnx", quantized, [one]) for one in (X[:count], batch))
    assert alone == labelled
    assert labelled.passed
    graph = bitplan.trace(model, X)
    drifts = [bitplan.estimate("drift", model, graph, batches=[one]).rows for one in (X[:count], batch)]
    assert drifts[0] == drifts[1]


@pytest.mark.parametrize("count", [1, 3])
def test_nor_that_of_timm(count):
    size = {"img_size": 32, "num_classes": 4, "depth": 2}
    model = timm().create_model("vit_tiny_patch16_224", pretrained=False, **size).eval()
    images, labels = torch.randn(count, 3, 32, 32), torch.ones(count, dtype=torch.long)
    plan = bitplan.choose(model, images, budget="70%")
    assert same(calibrated(model, plan, (images, labels)), calibrated(model, plan, images))


@pytest.mark.parametrize(
    "batch", [(X, Y[:, None], Y), ((X, Y[:, None]), Y), ((X, Y[:, None]),), {"x": X, "mask": Y[:, None]}]
)
def test_several_inputs_are_told_from_labels(batch):
    model, inputs = Masked().eval(), {"x": X, "mask": Y[:, None]}
    plan = bitplan.choose(model, inputs, budget="70%")
    assert same(calibrated(model, plan, batch), calibrated(model, plan, inputs))
    assert bitplan.choose(model, batches=[batch], budget="70%").precisions.keys() == plan.precisions.keys()


def test_two_inputs_without_labels_are_one_line():
    model = Masked().eval()
    quantized = bitplan.quantize(model, bitplan.choose(model, (X, Y[:, None]), budget="70%"))
    with pytest.raises(InputError, match=r"takes \(x, mask\): missing a required argument: 'mask'.*\(\(x, mask\),\)"):
        bitplan.calibrate_(quantized, [(X, Y[:, None])])


@pytest.mark.parametrize("made", [Gained, Masked])
def test_a_mapping_with_labels_does_for_the_default_method_and_a_quantized_network(made):
    """The model takes no labels; a forward that bitplan has put in the place of its own takes any argument."""
    model, inputs = made().eval(), {"x": X} | ({"mask": Y[:, None]} if made is Masked else {})
    batch = inputs | {"labels": Y, "row": Y}
    plan = bitplan.choose(model, batches=[batch], budget="70%", rules=bitplan.Rules(last=None, narrow=0))
    assert plan.method == "drift"
    assert same(calibrated(model, plan, batch), calibrated(model, plan, inputs))


def hugging_face(**options):
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 16, "num_labels": 3}
    return BertForSequenceClassification(BertConfig(**sizes, **options)).eval()


@pytest.mark.parametrize("count", [1, 4])
def test_a_batch_of_hugging_face_is_verified_without_its_loss(count, tmp_path):
    from transformers import BatchEncoding

    model, tokens = hugging_face(), torch.randint(5, 60, (count, 8))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    labels = torch.zeros(count, dtype=torch.long)
    plan = bitplan.choose(model, batches=[BatchEncoding(inputs | {"labels": labels})], budget="70%")
    assert plan.method == "drift"
    quantized = bitplan.quantize(model, plan, batches=[(BatchEncoding(inputs), labels)]).eval()
    bitplan.export(quantized, tmp_path / "m.onnx", "onnx", example=inputs)
    batches = [BatchEncoding(inputs | {"labels": labels})]
    assert bitplan.verify(tmp_path / "m.onnx", quantized, batches).passed
    task = bitplan.task(train=batches, test=[inputs | {"labels": labels}])
    assert bitplan.verify(tmp_path / "m.onnx", quantized, task, limit=count).passed


@pytest.mark.parametrize("wrap", ["dict", "BatchEncoding"])
def test_a_score_weighs_batches_by_their_samples_whichever_mapping_they_are(wrap):
    """Collators of Hugging Face give mappings that torch does not look into."""
    from transformers import BatchEncoding

    kind = {"dict": dict, "BatchEncoding": BatchEncoding}[wrap]
    rows = samples_of(DataLoader(range(5), collate_fn=lambda rows: kind({"x": X[rows], "labels": Y[rows] % 4})))
    right = UserFunction(lambda outputs, labels: (outputs.argmax(1) == labels).float().mean())
    task = Loaded("rows", "right", True, train=rows, test=rows, of_loss=UserFunction(F.cross_entropy), of_score=right)
    model = Gained().eval()
    assert task.score(model) == pytest.approx(float((model(X).argmax(1) == Y % 4).float().mean()))
