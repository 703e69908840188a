"""Every tensor of a quantizer once in a state dict, whoever holds the quantizer; any of its names is loaded."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bitplan.quant.calibrate import calibrate_
from bitplan.quant.checkpoint import fingerprint, load_checkpoint, save_checkpoint
from bitplan.quant.convert import quantize, quantizers_of
from bitplan.quant.quantizers import find_shared_names, full_state
from nets import Net

EXAMPLE = torch.linspace(-1, 1, 30).view(5, 6)


def linked():
    """Two layers that read the same input; `b` stands first in the model, `a` in the plan."""
    return Net(_added, b=nn.Linear(6, 4), a=nn.Linear(6, 4))


def _added(net, x):
    return net.b(x) + net.a(x)


def twice():
    """One layer that the model holds under two names."""
    net = Net(lambda self, x: self.other(self.layer(x)), layer=nn.Linear(6, 6))
    net.other = net.layer
    return net


@pytest.fixture
def quantized(plan):
    model = quantize(linked(), plan(a="w4a4", b="w4a4", links=(("a", "b"),)))
    calibrate_(model, [EXAMPLE])
    return model


@pytest.fixture
def old(quantized):
    """A state dict as bitplan wrote it before, with every name of the shared step."""
    return {name: value.detach() for name, value in full_state(quantized).items()}


def test_the_first_place_in_the_model_names_it(quantized, old):
    assert quantized.a.input_quantizer is quantized.b.input_quantizer
    names = {f"a.input_quantizer.{name}" for name in ("step", "signed", "saved_bits")}
    assert find_shared_names(quantized) == {name: name.replace("a.", "b.") for name in names}
    assert old.keys() - quantized.state_dict().keys() == names
    assert len({value.data_ptr() for value in quantized.state_dict().values()}) == len(quantized.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it imports its compiler
@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential, nn.DataParallel, torch.compile])
def test_safetensors_takes_it_and_gives_it_back(wrap, quantized, plan, tmp_path):
    save_file(wrap(quantized).state_dict(), tmp_path / "model.safetensors")
    fresh = quantize(linked(), plan(a="w4a4", b="w4a4", links=(("a", "b"),)))
    wrap(fresh).load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(fresh(EXAMPLE), quantized(EXAMPLE))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy])
def test_copies_do_so_too(copied, quantized):
    same = copied(quantized)
    assert same.state_dict().keys() == quantized.state_dict().keys()
    assert same.a.input_quantizer is same.b.input_quantizer
    quantizers = quantizers_of(same)
    assert quantizers["a"].inputs == quantizers["b"].inputs == (same.a.input_quantizer,)


def test_all_old_names_or_any_one_of_them_are_loaded(old, quantized, plan):
    for left_out in (set(), {"a.input_quantizer.step"}, {"b.input_quantizer.step"}):
        fresh = quantize(linked(), plan(a="w4a4", b="w4a4", links=(("a", "b"),)))
        fresh.load_state_dict({name: value for name, value in old.items() if name not in left_out})
        assert torch.equal(fresh(EXAMPLE), quantized(EXAMPLE))
    with pytest.raises(RuntimeError, match=r"Missing key.*b.input_quantizer.step"):
        fresh.load_state_dict({name: value for name, value in old.items() if not name.endswith("input_quantizer.step")})


def test_files_of_before_are_read(old, quantized, tmp_path):
    torch.save(old, tmp_path / "old.pth")
    assert torch.equal(load_checkpoint(tmp_path / "old.pth", quantized)(EXAMPLE), quantized(EXAMPLE))


def test_checkpoints_of_before_are_read(quantized, tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(type(quantized), "state_dict", lambda self, **_: full_state(self))
        path = save_checkpoint(quantized, tmp_path / "old")
    assert "a.input_quantizer.step" in (path / "checkpoint.json").read_text()
    assert torch.equal(load_checkpoint(path, linked())(EXAMPLE), quantized(EXAMPLE))


def test_fingerprints_stay_what_they_were(quantized, monkeypatch):
    now = fingerprint(quantized)
    monkeypatch.setattr(type(quantized), "state_dict", lambda self, **_: full_state(self))
    assert fingerprint(quantized) == now


def test_whoever_is_quantized_again_says_it_once_as_well(quantized, plan):
    alone = quantize(quantized, plan(a="w4a4", b="w2a2"))
    assert find_shared_names(alone) == {}
    assert "a.input_quantizer.step" in alone.state_dict()
    together = quantize(alone, plan(a="w4a4", b="w4a4", links=(("a", "b"),)))
    assert together.state_dict().keys() == quantized.state_dict().keys()
    assert len(together._state_dict_hooks) == 1


def test_a_layer_that_a_model_holds_twice_has_its_steps_once(plan):
    model = quantize(twice(), plan(layer="w4a4"))
    calibrate_(model, [EXAMPLE])
    assert find_shared_names(model).keys() == {
        "other.weight_quantizer.step",
        "other.weight_quantizer.saved_bits",
        "other.input_quantizer.step",
        "other.input_quantizer.saved_bits",
        "other.input_quantizer.signed",
    }
    assert model.state_dict().keys() - twice().state_dict().keys() == {
        name.replace("other", "layer") for name in find_shared_names(model)
    }
    fresh = quantize(twice(), plan(layer="w4a4"))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(EXAMPLE), model(EXAMPLE))
