"""accelerate's own loop, on quantized networks as they are."""

import accelerate
import tiny_bert as tiny
import torch
from loops import prepared, train
from safetensors.torch import load_file, load_model, save_model

import bitplan


def test_a_saved_state_goes_on_where_it_was(tmp_path):
    accelerator, *unbroken = prepared()
    train(accelerator, *unbroken)
    accelerator.save_state(tmp_path / "state")
    train(accelerator, *unbroken)
    accelerator, *resumed = prepared()
    accelerator.load_state(tmp_path / "state")
    train(accelerator, *resumed)
    for name, value in unbroken[0].state_dict().items():
        assert torch.equal(resumed[0].state_dict()[name], value), name


def test_save_model_writes_what_every_loader_reads(tmp_path):
    accelerator, model, optimizer, data = prepared()
    train(accelerator, model, optimizer, data)
    accelerator.save_model(model, tmp_path / "saved")
    path = tmp_path / "saved" / "model.safetensors"
    assert load_file(path).keys() == model.state_dict().keys()
    fresh = tiny.quantized()
    accelerate.load_checkpoint_in_model(fresh, tmp_path / "saved")
    others = [bitplan.load_checkpoint(path, tiny.quantized()), tiny.quantized()]
    load_model(others[1], path)
    save_model(model, tmp_path / "by_safetensors.safetensors")
    others.append(bitplan.load_checkpoint(tmp_path / "by_safetensors.safetensors", tiny.quantized()))
    for one in (fresh, *others):
        assert torch.equal(tiny.logits(one), tiny.logits(model))
