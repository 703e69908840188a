"""Everything that `trace` calls a layer is really quantized by `quantize`, under the same name."""

import pytest
import torch
from torch import nn

import bitplan
from bitplan.adapters.transformers import transformers
from bitplan.models.zoo import load_model
from bitplan.quant.convert import quantizers_of
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer

IMAGE = torch.rand(2, 3, 64, 64)
TOKENS = {"input_ids": torch.randint(0, 100, (2, 16))}
SMALL = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


def from_zoo(name, **options):
    from bitplan.adapters.torchvision import build

    return lambda: (build(name, **options), IMAGE)


def hugging_face(config, model, attention, **sizes):
    def build():
        library = transformers("this test")
        made = getattr(library, config)(**(SMALL | sizes), attn_implementation=attention)
        return getattr(library, model)(made), TOKENS

    return build


def recurrent():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.lstm, self.head = nn.Embedding(100, 16), nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, input_ids):
            return self.head(self.lstm(self.table(input_ids))[0])

    return Tagger(), TOKENS


def torch_transformer():
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.rand(2, 5, 16)


def functional():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(16, 16) / 4)
            self.project = nn.Linear(16, 16)

        def forward(self, x):
            y = torch.matmul(x, self.matrix)
            scores = torch.einsum("btk,bsk->bts", y, x)
            return torch.bmm(scores.softmax(-1), self.project(y))

    return Mixed(), torch.rand(2, 5, 16)


NETWORKS = {
    "resnet18": from_zoo("resnet18"),
    "mobilenet_v2": from_zoo("mobilenet_v2"),
    "densenet121": from_zoo("densenet121"),
    "googlenet": from_zoo("googlenet"),
    "vit": from_zoo("vit_b_32", image_size=64),
    "swin": from_zoo("swin_t"),
    "resnet20": lambda: (load_model("resnet20")[0], torch.rand(2, 3, 32, 32)),
    "bert": hugging_face("BertConfig", "BertForQuestionAnswering", "eager"),
    "bert sdpa": hugging_face("BertConfig", "BertForQuestionAnswering", "sdpa"),
    "llama": hugging_face("LlamaConfig", "LlamaForCausalLM", "sdpa", num_key_value_heads=2),
    "gpt2": hugging_face("GPT2Config", "GPT2LMHeadModel", "eager", n_embd=32, n_layer=2, n_head=4),
    "lstm": recurrent,
    "torch transformer": torch_transformer,
    "functional": functional,
}


def run(model, example):
    return model(**example) if isinstance(example, dict) else model(example)


def counted(model):
    """Count how often each quantizer runs."""
    runs = {}
    for name, module in model.named_modules():
        if isinstance(module, InputQuantizer | WeightQuantizer):
            module.register_forward_hook(lambda module, *_: runs.update({id(module): runs.get(id(module), 0) + 1}))
            runs.setdefault(id(module), 0)
            assert name
    return runs


@pytest.mark.parametrize("name", NETWORKS)
def test_every_traced_layer_runs_through_its_quantizers(name):
    torch.manual_seed(0)
    model, example = NETWORKS[name]()
    model.eval()
    graph = bitplan.trace(model, example, name=name, rules=bitplan.Rules(narrow=0))
    plan = bitplan.Plan.uniform(graph, "w4a4")
    quantized = bitplan.quantize(model, plan)
    bitplan.calibrate_(quantized, [example])
    runs = counted(quantized)
    with torch.no_grad():
        run(quantized.eval(), example)
    kept = {layer.name for layer in graph.layers if str(layer.fixed) == "w16a16"}
    quantizers = quantizers_of(quantized)
    assert set(quantizers) == {layer.name for layer in graph.layers} - kept
    for layer, (weight, inputs) in quantizers.items():
        for quantizer in filter(None, (weight, *inputs)):
            assert runs[id(quantizer)] > 0, f"{layer} is not quantized"
        assert weight or inputs, layer
    assert bitplan.plan_of(quantized).id == plan.id
    # Traced again, it is the network it was; so a quantized checkpoint needs no float model beside it.
    assert bitplan.trace(quantized, example, name=name, rules=bitplan.Rules(narrow=0)) == graph


def test_the_flow_from_a_model_to_a_mixed_one_and_back_from_disk(tmp_path):
    torch.manual_seed(0)
    model, _ = load_model("resnet20")
    images = torch.rand(4, 3, 32, 32)
    rules = bitplan.Rules(narrow=0)
    graph = bitplan.trace(model, images, name="resnet20", rules=rules)
    start = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(start, [images])
    gains = bitplan.estimate("eagl", start, graph)
    assert gains.histograms is not None
    plan = bitplan.select(graph, gains, bitplan.price("bmac", graph), budget="70%")
    mixed = bitplan.quantize(start, plan)
    assert {str(precision) for precision in bitplan.plan_of(mixed).precisions.values()} == {"w2a2", "w4a4", "w8a8"}
    bitplan.save_checkpoint(mixed, tmp_path / "mixed", spec="resnet20", graph_id=graph.id)
    again = bitplan.load_checkpoint(tmp_path / "mixed")
    assert torch.equal(mixed.eval()(images), again.eval()(images))
    # From the folder alone, EAGL uses the learned steps and agrees with the model.
    bitplan.save_checkpoint(start, tmp_path / "start", spec="resnet20")
    assert bitplan.estimate("eagl", tmp_path / "start", graph).rows == gains.rows
