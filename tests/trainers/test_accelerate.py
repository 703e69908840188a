"""accelerate's own loop, and DistributedDataParallel below it, on quantized networks as they are."""

import accelerate
import pytest
import tiny_bert as tiny
import torch
from safetensors.torch import load_file, load_model, save_model
from torch.nn.parallel import DistributedDataParallel

import bitplan


def prepared():
    accelerator = accelerate.Accelerator(cpu=True)
    model = tiny.quantized(dropout=0)
    return accelerator, *accelerator.prepare(model, tiny.optimizer(model), tiny.loader())


def train(accelerator, model, optimizer, data):
    for batch in data:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


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


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_distributed_data_parallel_trains_and_saves(tmp_path):
    alone, model = tiny.quantized(dropout=0), tiny.quantized(dropout=0)
    parallel = DistributedDataParallel(model)
    for run, trained in ((alone, alone), (parallel, model)):
        optimizer = tiny.optimizer(trained)
        for batch in tiny.loader():
            run(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(tiny.logits(model), tiny.logits(alone))
    torch.save(parallel.state_dict(), tmp_path / "parallel.pth")
    again = bitplan.load_checkpoint(tmp_path / "parallel.pth", tiny.quantized())
    assert torch.equal(tiny.logits(again), tiny.logits(model))
