"""fp16 and bf16 models in their own type: codes from fp32, outputs in the model's type, steps that no cast touches."""

import pytest
import torch
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer

HALVES = [torch.float16, torch.bfloat16]


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.words, self.head, self.fused = nn.Embedding(50, 32), nn.Linear(32, 7), fused
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        x = self.words(x)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.fused:
            return self.head(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(torch.softmax(q @ k.transpose(-1, -2) / 6, -1) @ v)


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8),
                         nn.ConvTranspose2d(8, 4, 2), nn.Flatten(), nn.Linear(100, 5))  # fmt: skip


TOKENS = torch.arange(12).view(2, 6)
NETWORKS = {
    "convolutions": (convolutions, lambda: torch.randn(4, 3, 8, 8)),
    "products": (lambda: Attention(fused=False), lambda: TOKENS),
    "attention": (lambda: Attention(fused=True), lambda: TOKENS),
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), lambda: torch.randn(2, 6, 32)),
}


def quantized(network, half, precision="w4a4", **options):
    torch.manual_seed(0)
    build, example = NETWORKS[network]
    model, x = build().to(half), example()
    graph = bitplan.trace(model, x, rules=bitplan.Rules(narrow=0))  # a float32 example is enough
    made = bitplan.quantize(model, bitplan.Plan.uniform(graph, precision), **options)
    x = x.to(half) if x.is_floating_point() else x
    bitplan.calibrate_(made, [x])
    return made, x


@pytest.mark.parametrize("options", [{}, {"per_channel": True}, {"method": "faq"}], ids=str)
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_a_forward_and_a_backward_pass_in_the_models_type(network, half, options):
    model, x = quantized(network, half, **options)
    out = model.train()(x)
    assert out.dtype == half
    out.float().square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if name.endswith(".step") else half)
        if parameter.requires_grad:
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_codes_are_those_of_the_same_numbers_in_fp32(half):
    model, _ = quantized("convolutions", half, per_channel=True)
    steps, codes = bitplan.quant.convert.weight_steps(model), bitplan.integer_weights(model)
    for layer, weight in bitplan.quant.convert.weights_of(model).items():
        wide = (weight.float() / steps[layer]).clamp(*(-8, 7) if str(bitplan.plan_of(model).precisions[layer]) == "w4a4"
                                                     else (-128, 127)).round()  # fmt: skip
        assert torch.equal(codes[layer].float(), wide), layer


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("network", sorted(NETWORKS))
def test_a_cast_of_a_quantized_model_leaves_its_steps_alone(network, half):
    model, x = quantized(network, torch.float32)
    quantizers = [part for part in model.modules() if isinstance(part, WeightQuantizer | InputQuantizer)]
    before = [quantizer.step.clone() for quantizer in quantizers]
    cast = model.to(half)
    assert all(torch.equal(one.step, step) for one, step in zip(quantizers, before, strict=True))
    assert cast.eval()(x.to(half) if x.is_floating_point() else x).dtype == half
    model.double()
    assert {quantizer.step.dtype for quantizer in quantizers} == {torch.float64}  # more is no harm


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_checkpoints_packed_files_and_gains_of_half_models(half, tmp_path):
    model, x = quantized("convolutions", half)
    expected = model.eval()(x)
    folder = bitplan.save_checkpoint(model, tmp_path / "net")
    for loaded in (
        bitplan.load_checkpoint(folder, convolutions().to(half)),
        bitplan.load_packed(bitplan.export(model, tmp_path / "net.packed", "packed"), convolutions().to(half)),
    ):
        assert torch.equal(loaded.eval()(x), expected)
    graph = bitplan.trace(model, x, rules=bitplan.Rules(narrow=0))
    wide, _ = quantized("convolutions", torch.float32)
    wide.load_state_dict(model.state_dict())
    gains = [bitplan.estimate("eagl", one, graph).rows for one in (model, wide)]
    assert gains[0] == gains[1]


@pytest.mark.parametrize("to", ["onnx", "qonnx", "matmulnbits"])
def test_onnx_is_written_in_fp32_and_says_so(tmp_path, to):
    model, x = quantized("convolutions", torch.bfloat16, "w4a16" if to == "matmulnbits" else "w4a4")
    with pytest.raises(InputError, match="bfloat16: bitplan writes ONNX in float32, so call model.float") as refused:
        bitplan.export(model, tmp_path / "net", to, example=x, **({"widen": True} if to == "matmulnbits" else {}))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_a_task_gives_a_half_model_what_it_takes(half):
    task = bitplan.load_task("digits")
    model, example = bitplan.load_model("digits_resnet")
    graph = bitplan.trace(model, example, rules=bitplan.Rules(narrow=0))
    batches = [next(iter(task.batches("train", 32)))]
    made = bitplan.quantize(model.to(half), bitplan.Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(made, batches, forward=task.forward)
    outputs = task.forward(made, batches[0])
    assert outputs.dtype == half
    assert task.loss(outputs, batches[0]).isfinite()
    assert 0 <= bitplan.evaluate(made, task) <= 100
