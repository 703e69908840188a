"""What quantize promises about models and plans."""

import pytest
import torch
from torch import nn

from bitplan.core.errors import InputError
from bitplan.quant.convert import (
    integer_weights,
    plan_of,
    quantize,
    quantizers_of,
    weight_steps,
    without_quantizers,
)
from bitplan.quant.parameters import parameter_groups
from nets import classifier


def network():
    return classifier(3, classes=10)


class Branches(nn.Module):
    """Three layers that read one tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.a(x) + self.b(x) + self.c(x)


IMAGES = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))
MIXED = {"0": "w8a8", "3": "w4a4", "8": "w4a4"}


def test_the_given_model_stays_as_it_was(plan):
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    quantized = quantize(model, plan(**MIXED))
    quantized(IMAGES).sum().backward()
    assert [type(module) for module in model.modules()] == kinds
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_the_plan_is_read_back_equal(plan):
    given = plan(links=(("3", "8"),), **MIXED)
    quantized = quantize(network(), given)
    assert plan_of(quantized) == given
    assert plan_of(quantized).id == given.id


@pytest.mark.parametrize("training", [True, False])
def test_quantizers_are_in_the_mode_of_their_layers(training, plan):
    parts = nn.Sequential(Branches(), nn.MultiheadAttention(6, 2)).train(training)
    at = "1.scaled_dot_product_attention"
    model = quantize(
        parts, plan(links=(("0.a", "0.b"),), **{"0.a": "w4a4", "0.b": "w4a4", "1.in_proj": "w4a4", at: "w8a8"})
    )
    assert {module.training for module in model.modules()} == {training}


def test_a_float_model_has_no_plan():
    with pytest.raises(InputError, match=r"not quantized.*quantize\(model, plan\)"):
        plan_of(network())


def test_a_wrapped_quantized_model_is_not_quantized_again(plan):
    with pytest.raises(InputError, match="part of this model is quantized already"):
        quantize(nn.Sequential(quantize(network(), plan(**MIXED))), plan(**{"0.0": "w4a4"}))


def test_linked_layers_share_one_input_quantizer(plan):
    quantized = quantize(Branches(), plan(links=(("a", "b"),), a="w4a4", b="w4a4", c="w4a4"))
    assert quantized.a.input_quantizer is quantized.b.input_quantizer
    assert quantized.a.input_quantizer is not quantized.c.input_quantizer
    quantized(torch.randn(5, 6)).sum().backward()
    steps = [p for name, p in quantized.named_parameters() if "input_quantizer" in name]
    assert len(steps) == 2


def trained(plan):
    quantized = quantize(network(), plan(**MIXED))
    optimizer = torch.optim.SGD(quantized.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        quantized(IMAGES).square().mean().backward()
        optimizer.step()
    return quantized


def test_lowering_keeps_weights_and_multiplies_steps(plan):
    first = trained(plan)
    second = quantize(first, plan(**{"0": "w8a8", "3": "w2a2", "8": "w4a2"}))
    ratio = lambda layer, which: (  # noqa: E731
        getattr(second[layer], which).step / getattr(first[layer], which).step
    ).item()
    assert [ratio(0, w) for w in ("weight_quantizer", "input_quantizer")] == [1, 1]
    assert [ratio(3, w) for w in ("weight_quantizer", "input_quantizer")] == [4, 4]
    assert [ratio(8, w) for w in ("weight_quantizer", "input_quantizer")] == [1, 4]
    assert second[3].input_quantizer.range == (0, 3)
    assert torch.equal(second[3].weight, first[3].weight)
    back = quantize(second, plan_of(first))
    assert torch.equal(back.eval()(IMAGES), first.eval()(IMAGES))


def test_shared_steps_are_multiplied_once(plan):
    linked = (("a", "b"),)
    first = quantize(Branches(), plan(links=linked, a="w4a4", b="w4a4", c="w4a4"))
    first(torch.randn(5, 6))
    second = quantize(first, plan(links=linked, a="w2a2", b="w2a2", c="w4a4"))
    assert second.a.input_quantizer is second.b.input_quantizer
    assert second.a.input_quantizer.step == 4 * first.a.input_quantizer.step
    apart = quantize(first, plan(a="w2a2", b="w4a4", c="w4a4"))
    assert apart.a.input_quantizer.step == 4 * apart.b.input_quantizer.step == 4 * first.a.input_quantizer.step


def test_product_steps_are_kept_and_multiplied(plan):
    class Products(nn.Module):
        def forward(self, x):
            return (x @ x.transpose(0, 1)).softmax(-1) @ x

    first = quantize(Products(), plan(matmul="w8a8", matmul_1="w8a8"))
    first(torch.randn(4, 4))
    second = quantize(first, plan(matmul="w8a8", matmul_1="w8a6"))
    before, after = quantizers_of(first), quantizers_of(second)
    assert [new.step / old.step for old, new in zip(before["matmul"].inputs, after["matmul"].inputs, strict=True)] == [
        1
    ] * 3
    assert [
        new.step / old.step for old, new in zip(before["matmul_1"].inputs, after["matmul_1"].inputs, strict=True)
    ] == [4] * 2


def test_sixteen_bits_mean_left_alone(plan):
    model = network()
    quantized = quantize(model, plan(**{"0": "w16a16", "3": "w16a4", "8": "w4a16"}))
    assert type(quantized[0]) is nn.Conv2d
    assert quantizers_of(quantized)["3"].weight is None
    assert quantizers_of(quantized)["8"].inputs == ()
    assert set(integer_weights(quantized)) == {"8"}
    assert quantizers_of(quantize(quantized, plan(**MIXED)))["0"].weight.bits == 8


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_integer_weights_are_bit_for_bit_what_the_network_uses(bits, per_channel, plan):
    given = {"0": f"w{bits}a8", "3": f"w{bits}a8", "8": f"w{bits}a8"}
    quantized = quantize(network(), plan(**given), per_channel=per_channel)
    used = {}
    for name in given:
        layer = quantized.get_submodule(name)
        layer.weight_quantizer.register_forward_hook(lambda _, __, out, name=name: used.update({name: out}))
    quantized(IMAGES)
    codes, steps = integer_weights(quantized), weight_steps(quantized)
    assert set(codes) == set(used) == set(given)
    for name, weight in used.items():
        assert codes[name].dtype == torch.int8
        assert codes[name].min() >= -(2 ** (bits - 1))
        assert codes[name].max() <= 2 ** (bits - 1) - 1
        assert torch.equal(codes[name] * steps[name], weight)
        assert codes[name].unique().numel() > 2


def test_unquantized_is_the_float_model_and_ends(plan):
    model = network()
    quantized = quantize(model, plan(**MIXED))
    out = quantized(IMAGES)
    quantized.eval()
    model.eval().load_state_dict({k: v for k, v in quantized.state_dict().items() if "quantizer" not in k})
    with without_quantizers(quantized):
        assert torch.equal(quantized(IMAGES), model(IMAGES))
    assert not torch.equal(quantized(IMAGES), model(IMAGES))
    assert out.shape == (4, 10)


def test_parameter_groups(plan):
    quantized = quantize(network(), plan(**MIXED))
    groups = parameter_groups(quantized, lr=0.1, weight_decay=1e-4, step_lr=0.01, decay_vectors=False)
    assert [(group["lr"], group["weight_decay"], len(group["params"])) for group in groups] == [
        (0.1, 1e-4, 3),
        (0.1, 0.0, 5),
        (0.01, 0.0, 6),
    ]
    together = parameter_groups(quantized, lr=0.1, weight_decay=1e-4)
    assert [len(group["params"]) for group in together] == [8, 6]
    everything = [id(p) for group in together for p in group["params"]]
    assert sorted(everything) == sorted(id(p) for p in quantized.parameters())
    torch.optim.AdamW(together)


def test_faq_fixes_steps_at_a_percentile(plan):
    quantized = quantize(network(), plan(**MIXED), method="faq", percentile=99.0)
    quantized(IMAGES).sum().backward()
    weight = quantized[3].weight.detach().abs().flatten().sort().values
    assert quantized[3].weight_quantizer.step.item() == pytest.approx(weight[570].item() / 7)  # ⌈576·0.99⌉ = 571st
    inputs = IMAGES.abs().flatten().sort().values
    assert quantized[0].input_quantizer.step.item() == pytest.approx(inputs[427].item() / 127)  # ⌈432·0.99⌉ = 428th
    steps = [p for name, p in quantized.named_parameters() if name.endswith("step")]
    assert len(steps) == 6
    assert all(p.grad is None and not p.requires_grad for p in steps)
    assert quantized[3].weight.grad is not None
    learned = quantize(quantized, plan_of(quantized), method="lsq")
    assert learned[3].weight_quantizer.step == quantized[3].weight_quantizer.step
    assert learned[3].weight_quantizer.step.requires_grad


@pytest.mark.parametrize("options", [{"method": "dorifa"}, {"features": "all"}, {"percentile": 0.0}])
def test_wrong_options_are_one_clear_line(options, plan):
    with pytest.raises(InputError, match=r"^[^\n]+$"):
        quantize(network(), plan(**MIXED), **options)


def test_per_channel_steps_start_from_the_learned_one(plan):
    first = trained(plan)
    second = quantize(first, plan_of(first), per_channel=True)
    assert second[3].weight_quantizer.step.shape == (8, 1, 1, 1)
    assert torch.equal(second.eval()(IMAGES), first.eval()(IMAGES))
