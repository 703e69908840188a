"""State dicts wherever training scripts keep them: found by what they are, not by the key they are under."""

import logging

import pytest
import torch
from torch import nn

from bitplan.core.errors import FileError
from bitplan.weights.opened import open_checkpoint

NET = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
STATE = NET.state_dict()
AVERAGE = {name: tensor * 0.5 for name, tensor in STATE.items()}
OTHER = nn.Sequential(nn.Linear(3, 9)).state_dict()


def optimizer():
    adam = torch.optim.AdamW(NET.parameters())
    NET(torch.ones(2, 4)).sum().backward()
    adam.step()
    return adam.state_dict()


def opened(tmp_path, content):
    torch.save(content, tmp_path / "m.pth")
    return open_checkpoint(tmp_path / "m.pth").tensors


def same(tensors, state):
    assert list(tensors) == list(state)
    return all(tensors[name].floats().tolist() == state[name].float().flatten().tolist() for name in state)


@pytest.mark.parametrize(
    "key", ["model_state", "model_state_dict", "ema", "params", "net", "network", "weights", "G", 0]
)
def test_the_one_network_is_found_under_any_key(tmp_path, key, caplog):
    content = {"epoch": 3, "best": torch.tensor(0.5), "mean": torch.ones(3), "optimizer": optimizer(), key: STATE,
               "scaler": {"scale": 1.0}, "rng": {"torch": torch.get_rng_state()}}  # fmt: skip
    assert same(opened(tmp_path, content), STATE)
    assert same(opened(tmp_path, {"trainer": {"step": 1}, "outer": {"inner": {key: STATE}}}), STATE)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("content", "taken", "said"),
    [
        ({"params": STATE, "params_ema": AVERAGE}, STATE, "that of params is taken, not params_ema"),
        ({"ema": {"module": AVERAGE}, "model": STATE}, STATE, "that of model is taken, not ema.module"),
        ({"state_dict": STATE, "state_dict_ema": AVERAGE}, STATE, "that of state_dict is taken, not state_dict_ema"),
        ({"ema": AVERAGE, "swa": STATE}, AVERAGE, "that of ema is taken, not swa"),
        ({"criterion": OTHER, "model": STATE}, STATE, "that of model is taken, not criterion"),
        ({"state_dict": STATE, "confusion": torch.ones(3, 3)}, STATE, "is taken, not its top level"),
    ],
)
def test_of_several_the_one_that_is_taken_is_said(tmp_path, caplog, content, taken, said):
    with caplog.at_level(logging.WARNING):
        assert same(opened(tmp_path, content), taken)
    assert said in caplog.text


def test_of_several_different_networks_one_is_asked_for(tmp_path):
    with pytest.raises(FileError) as refused:
        opened(tmp_path, {"discriminator": OTHER, "generator": STATE, "step": 2})
    message = str(refused.value)
    assert "several networks (discriminator, generator): save the one you mean alone" in message
    advice = message.partition("such as ")[2].replace("'weights.pth'", repr(str(tmp_path / "weights.pth")))
    exec(advice)  # what it says to do works
    assert same(open_checkpoint(tmp_path / "weights.pth").tensors, STATE)


def test_a_network_without_matrices_and_a_file_that_holds_itself(tmp_path):
    vectors = nn.BatchNorm1d(3).state_dict()
    assert same(opened(tmp_path, {"model": vectors}), vectors)
    endless: dict = {"step": 1}
    endless["again"] = endless
    with pytest.raises(FileError, match="holds no state_dict"):
        opened(tmp_path, endless)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", ["script", "export"])
def test_archives_of_code_and_weights_are_named_with_the_way_to_their_weights(tmp_path, kind):
    net, path = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).eval(), tmp_path / "m.pt"
    if kind == "script":
        torch.jit.script(net).save(path)
    else:
        torch.export.save(torch.export.export(net, (torch.ones(2, 4),)), tmp_path / "m.pt2")
        (tmp_path / "m.pt2").rename(path)
    with pytest.raises(FileError) as refused:
        open_checkpoint(path)
    message = str(refused.value)
    assert {"script": "is a TorchScript file", "export": "is a torch.export file"}[kind] in message
    exec(message.partition("alone: ")[2].replace("'weights.pth'", repr(str(tmp_path / "weights.pth"))))
    assert same(open_checkpoint(tmp_path / "weights.pth").tensors, net.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["net.onnx", "net.bin"])
def test_onnx_files_are_named_whatever_they_are_called(tmp_path, name):
    torch.onnx.export(nn.Linear(3, 2), (torch.ones(1, 3),), tmp_path / "net.onnx", dynamo=False)
    (tmp_path / "net.onnx").rename(tmp_path / name)
    with pytest.raises(FileError, match=f"{name} is an ONNX file: give the PyTorch model that it was made from"):
        open_checkpoint(tmp_path / name)
