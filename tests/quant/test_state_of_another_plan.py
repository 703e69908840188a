"""Bits are part of a network's state: names and shapes that agree are not enough to load it."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bitplan.core.errors import InputError
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import quantize, quantize_

EXAMPLE = torch.linspace(-1, 1, 30).view(5, 6)


def network(plan, bits):
    torch.manual_seed(0)
    model = quantize(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4)), plan(**{"0": "w8a8", "2": bits}))
    calibrate_(model, [EXAMPLE])
    return model


def averaged(model, folder):
    """The state of a moving average of all tensors, as some training loops keep it."""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    for _ in range(50):
        average.update_parameters(model)
    return average.module.state_dict()


def written(model, folder):
    save_file(model.state_dict(), folder / "model.safetensors")
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("there", "here"), [("w4a8", "w2a8"), ("w8a4", "w8a2")])
@pytest.mark.parametrize("state_of", [lambda model, _: model.state_dict(), averaged, written])
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_of_another_plan_is_refused(there, here, state_of, strict, plan, tmp_path):
    saved, model = network(plan, there), network(plan, here)
    state = state_of(saved, tmp_path)
    with pytest.raises(
        InputError, match=r"^2\..*_quantizer has 4 bits in this state dict and 2 in the model: quantize"
    ):
        model.load_state_dict(state, strict=strict)
    within = {f"0.{name}": value for name, value in state.items()}
    with pytest.raises(InputError, match="has 4 bits in this state dict"):
        nn.Sequential(model).load_state_dict(within, strict=strict)
    quantize_(model, plan(**{"0": "w8a8", "2": there}))
    model.load_state_dict(state)
    assert torch.equal(model(EXAMPLE), saved(EXAMPLE))


def test_bits_follow_a_network_that_is_quantized_again(plan):
    model, wanted = network(plan, "w4a4"), network(plan, "w2a2")
    quantize_(model, plan(**{"0": "w8a8", "2": "w2a2"}))
    wanted.load_state_dict(model.state_dict())
    assert model[2].weight_quantizer.saved_bits == model[2].input_quantizer.saved_bits == 2
