"""A plain loop over a quantized network: compiled, with gradient checkpointing, or shared by two processes."""

import tiny_bert as tiny
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import bitplan
from nets import dynamo


def train(model, run=None, share=slice(None)):
    """An epoch of the given rows of every batch; the loss of every step."""
    optimizer, losses = tiny.optimizer(model), []
    for batch in tiny.loader():
        loss = (model if run is None else run)(**{name: column[share] for name, column in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_same(model, plain, tolerance=1e-4):
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=tolerance, atol=tolerance, msg=name)
    assert not torch.equal(tiny.logits(plain), tiny.logits(tiny.quantized(dropout=0))), "it learned"


@dynamo
def test_compiled_it_ends_with_the_same_weights():
    model, plain = tiny.quantized(dropout=0), tiny.quantized(dropout=0)
    torch._dynamo.reset()
    losses = train(model.train(), run=torch.compile(model, backend="aot_eager"))  # tests/quant tries inductor
    torch.testing.assert_close(losses, train(plain.train()), rtol=1e-4, atol=1e-4)
    check_same(model, plain)


def test_recomputed_in_the_backward_pass_it_ends_with_the_same_weights():
    model, plain = tiny.quantized(), tiny.quantized()
    model.gradient_checkpointing_enable()
    runs = []
    model.bert.encoder.layer[0].intermediate.dense.register_forward_hook(lambda *_: runs.append(1))
    for one in (model, plain):
        torch.manual_seed(3)  # of dropout
        train(one.train())
    assert len(runs) == 2 * len(tiny.loader()), "once forward, once backward"
    check_same(model, plain)


def _one_of_two(rank, folder):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    model = tiny.quantized(dropout=0)
    parallel = DistributedDataParallel(model.train())
    train(model, run=parallel, share=slice(rank, None, 2))
    torch.save(parallel.state_dict(), f"{folder}/{rank}.pth")
    distributed.barrier()  # who leaves first may leave the other waiting for ever
    del parallel
    distributed.destroy_process_group()


def test_two_processes_end_with_the_weights_of_one(tmp_path):
    torch.multiprocessing.spawn(_one_of_two, (str(tmp_path),), nprocs=2)
    first, second = (bitplan.load_checkpoint(tmp_path / f"{rank}.pth", tiny.quantized()) for rank in (0, 1))
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value), name
    alone = tiny.quantized(dropout=0)
    train(alone.train())
    check_same(first, alone)
