"""Trained by someone else's loop, copied and wrapped by someone else's tools."""

import copy
import math
import shutil

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bitplan.adapters.transformers import transformers as library
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import plan_of, quantize
from bitplan.quant.lsq import lsq
from bitplan.quant.parameters import parameter_groups
from nets import classifier, dynamo

PLAN = {"0": "w8a8", "3": "w4a4", "8": "w8a8"}


def network():
    return classifier(1)


def data(count=64):
    """Two classes a network can tell apart: bright on the left, or on the right."""
    labels = torch.arange(count) % 2
    images = torch.randn(count, 1, 8, 8)
    images[labels == 0, :, :, :4] += 1.0
    images[labels == 1, :, :, 4:] += 1.0
    return images, labels


def train(model, steps=30, run=None):
    images, labels = data()
    optimizer = torch.optim.SGD(parameter_groups(model, lr=0.05, weight_decay=1e-4), momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy((run or model)(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def quantized(plan):
    return quantize(network(), plan(**PLAN))


@pytest.mark.parametrize("options", [{}, {"per_channel": True}, {"method": "faq"}])
def test_a_plain_loop_learns(options, plan):
    model = quantize(network(), plan(**PLAN), **options)
    model(data()[0])  # the first training batch sets input steps
    before = {name: p.detach().clone() for name, p in model.named_parameters() if name.endswith("step")}
    losses = train(model)
    assert losses[-1] < 0.2 < losses[0]
    moved = [not torch.equal(model.get_parameter(name), value) for name, value in before.items()]
    assert all(moved) if options.get("method") != "faq" else not any(moved)
    images, labels = data()
    assert (model.eval()(images).argmax(1) == labels).float().mean() > 0.9


def test_accelerates_loop_learns(quantized):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=32)
    optimizer = torch.optim.AdamW(parameter_groups(quantized, lr=0.01, step_lr=1e-4))
    model, optimizer, loader = accelerator.prepare(quantized, optimizer, loader)
    losses = []
    for _ in range(12):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.3 < losses[0]
    assert plan_of(accelerator.unwrap_model(model)) == plan_of(quantized)


@dynamo
def test_a_compiled_model_learns_the_same(quantized):
    calibrate_(quantized, [data()[0]])
    torch.manual_seed(3)
    eager = train(copy.deepcopy(quantized), steps=3)
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = copy.deepcopy(quantized)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert train(model, steps=3, run=compiled) == pytest.approx(eager, rel=1e-3)
    assert plan_of(compiled) == plan_of(model)


@dynamo
def test_a_compiled_model_can_start_uncalibrated(quantized):
    torch._dynamo.reset()
    losses = train(quantized, steps=3, run=torch.compile(quantized, backend="aot_eager"))
    assert all(math.isfinite(loss) for loss in losses)
    assert quantized[3].input_quantizer.range == (0, 15)


@dynamo
def test_compiled_codes_are_exact():
    assert shutil.which("g++"), "inductor needs a C++ compiler: install g++"
    torch._dynamo.reset()
    step = torch.tensor(0.1, requires_grad=True)
    v = (torch.arange(-127, 127).double() + 0.5).mul(0.1).float().requires_grad_()  # where a reciprocal goes wrong
    grads = []
    for run in (lsq, torch.compile(lsq)):
        y = run(v, step, -128, 127)
        grads.append((y.detach(), *torch.autograd.grad(y.square().sum(), (v, step))))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])
    assert torch.allclose(grads[0][2], grads[1][2], rtol=1e-4)


def test_state_dict_round_trip(quantized, plan):
    images, _ = data()
    train(quantized, steps=3)
    other = quantize(network(), plan(**PLAN))
    assert other.load_state_dict(quantized.state_dict()).missing_keys == []
    assert torch.equal(other.eval()(images), quantized.eval()(images))


def test_deepcopy_is_independent(quantized):
    images, _ = data()
    train(quantized, steps=2)
    before = quantized.eval()(images)
    twin = copy.deepcopy(quantized)
    assert torch.equal(twin(images), before)
    train(twin.train(), steps=2)
    assert torch.equal(quantized(images), before)
    assert plan_of(twin) == plan_of(quantized)


def test_channels_last_gives_the_same(plan):
    model = quantize(network(), plan(**PLAN))
    images, _ = data()
    calibrate_(model, [images])
    expected = model.eval()(images)
    last = copy.deepcopy(model).to(memory_format=torch.channels_last)
    seen = []
    last[3].input_quantizer.register_forward_hook(lambda _, __, out: seen.append(out))
    got = last(images.to(memory_format=torch.channels_last))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    # The layouts sum in another order, so a value at a rounding tie may fall to the other side: rarely, by one step.
    apart = (got - expected).abs() > 1e-4
    assert apart.float().mean() < 0.05


def test_bf16_autocast_quantizes_in_fp32(quantized):
    images, labels = data()
    calibrate_(quantized, [images])
    weights = []
    quantized[3].weight_quantizer.register_forward_hook(lambda _, __, out: weights.append(out))
    with torch.autocast("cpu", torch.bfloat16):
        out = quantized(images)
        loss = F.cross_entropy(out.float(), labels)
    loss.backward()
    assert out.dtype == torch.bfloat16
    quantizer = quantized[3].weight_quantizer
    assert torch.equal(weights[0], quantizer.codes(quantized[3].weight) * quantizer.step)
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in quantized.parameters())
    exact = quantized(images)
    assert torch.allclose(out.float(), exact, atol=0.1)


def test_exponential_averages_follow_even_when_made_before_the_first_batch(quantized):
    average = torch.optim.swa_utils.AveragedModel(
        quantized, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    images, _ = data()
    train(quantized, steps=1)
    average.update_parameters(quantized)
    train(quantized, steps=3)
    average.update_parameters(quantized)
    assert plan_of(average) == plan_of(quantized)
    assert average.eval()(images).isfinite().all()
    assert average.module[3].input_quantizer.range == (0, 15)
    assert average.module[3].weight_quantizer.step != quantized[3].weight_quantizer.step


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, plan):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            h = torch.relu(self.a(x))
            return self.b(h) @ h.transpose(0, 1)

    given = plan(**{"0.a": "w4a4", "0.b": "w4a4", "0.matmul": "w8a8"})
    plain = quantize(nn.Sequential(Block()), given)
    x = torch.randn(6, 8, requires_grad=True)
    recomputed = copy.deepcopy(plain)
    plain(x).square().sum().backward()
    checkpoint(recomputed, x, use_reentrant=reentrant).square().sum().backward()  # steps are set inside, too
    for (name, p), q in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, atol=1e-5), name


@pytest.fixture
def group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_distributed_data_parallel(quantized):
    parallel = nn.parallel.DistributedDataParallel(quantized)
    losses = train(quantized, steps=10, run=parallel)
    assert losses[-1] < losses[0]
    assert plan_of(parallel) == plan_of(quantized)


def _one_rank(rank, path, given, results):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/two", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(quantize(network(), given))
    torch.manual_seed(rank)  # each process sees data of its own
    losses = train(model.module, steps=2, run=model)
    results[rank] = [q.item() for name, q in model.module.named_parameters() if name.endswith("step")], losses
    torch.distributed.barrier()  # who leaves first may leave the other waiting for ever
    del model
    torch.distributed.destroy_process_group()


def test_processes_agree_on_the_first_steps(plan, tmp_path):
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(_one_rank, (str(tmp_path), plan(**PLAN), results), nprocs=2)
        (first, losses), (second, others) = results[0], results[1]
    assert first == second
    assert losses != others


def test_hugging_face_bert_trains(plan):
    transformers = library("this test")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    for implementation, products in (
        ("eager", ("matmul", "matmul_1")),
        ("sdpa", ("scaled_dot_product_attention",)),
    ):
        config._attn_implementation = implementation
        model = transformers.BertForQuestionAnswering(config)
        at = "bert.encoder.layer.0.attention.self."
        qkv = tuple(at + name for name in ("query", "key", "value"))
        given = dict.fromkeys(qkv, "w4a4") | {at + name: "w8a8" for name in products}
        given |= {"bert.embeddings.word_embeddings": "w8a8", "qa_outputs": "w8a8"}
        quantized = quantize(model, plan(links=(qkv,), **given))
        ids, mask = torch.randint(0, 50, (4, 9)), torch.ones(4, 9, dtype=torch.long)
        mask[1:, 6:] = 0
        optimizer = torch.optim.AdamW(parameter_groups(quantized, lr=1e-3, step_lr=1e-4))
        starts = torch.tensor([1, 2, 3, 4])
        losses = []
        for _ in range(15):
            optimizer.zero_grad()
            out = quantized(input_ids=ids, attention_mask=mask, start_positions=starts, end_positions=starts)
            out.loss.backward()
            assert all(p.grad is not None for p in quantized.parameters())
            optimizer.step()
            losses.append(out.loss.item())
        assert losses[-1] < losses[0] - 0.5
        changed = ids.clone()
        changed[1:, 6:] = 7  # hidden by the mask
        quantized.eval()
        logits = [quantized(input_ids=i, attention_mask=mask).start_logits[1:, :6] for i in (ids, changed)]
        assert torch.equal(*logits)


def test_hugging_faces_conv1d_is_a_linear_layer(plan):
    library("this test")
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(5, 6))
    quantized = quantize(model, plan(**{"0": "w4a16"}))
    x = torch.randn(2, 3, 6)
    weight = quantized[0].weight_quantizer(quantized[0].weight)
    assert weight.unique().numel() <= 16
    assert torch.allclose(quantized(x), x @ weight + quantized[0].bias, atol=1e-6)
