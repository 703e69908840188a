"""The finish `tune`: nearer to the float network than compensated rounding, for every kind of network; it goes on."""

import pytest
import torch
from torch import nn

import bitplan
from bitplan.adapters.transformers import transformers
from bitplan.core.errors import InputError
from bitplan.plugins.ptq import blockwise_tuning
from bitplan.plugins.ptq.blockwise_tuning import tune_
from bitplan.quant.convert import plan_of
from texts import llama

RULES = bitplan.Rules(first=None, last=None, narrow=0, embeddings="w16a16")


class Residual(nn.Module):
    """A stem, blocks in a list with norms and a grouped convolution, and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(*(_block() for _ in range(2)))
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def _block():
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU()
    )


def images():
    return Residual(), [torch.randn(8, 3, 8, 8) for _ in range(4)], "w3a4"


def vision():
    library = transformers("a test")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = library.ViTConfig(image_size=16, patch_size=4, **sizes)
    return library.ViTForImageClassification(config), [torch.randn(4, 3, 16, 16) for _ in range(4)], "w3a8"


def language():
    return llama(use_cache=False), [torch.randint(32, (4, 16)) for _ in range(4)], "w2a16"


def quantized(made, finish="round", **options):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batches, precision = made()
    model.eval()
    graph = bitplan.trace(model, batches[0], rules=RULES)
    plan = bitplan.Plan.uniform(graph, precision)
    method = "groups:size=8,zeros=true" if precision.endswith("a16") else "lsq"
    network = bitplan.quantize(model, plan, method=method, finish=finish, batches=batches, **options)
    return model, network, batches


def apart(model, network, batches):
    with torch.no_grad():
        return sum(
            float((blockwise_tuning._joined(network.eval()(one)) - blockwise_tuning._joined(model(one))).square().sum())
            for one in batches
        )


@pytest.mark.parametrize("made", [images, vision, language])
def test_it_is_nearer_to_the_float_network_than_the_other_finishes(made):
    found = {finish: apart(*quantized(made, finish)) for finish in ("round", "compensate", "tune")}
    share = 0.9 if made is language else 0.8  # block by block, what comes out at the end is not what is trained for
    assert found["tune"] < share * found["compensate"]
    assert found["tune"] < share * found["round"]


def test_blocks_are_trained_one_by_one_whether_or_not_the_network_was_run_before():
    model, run_before, batches = quantized(language)
    fresh = bitplan.quantize(model, plan_of(run_before), method="groups:size=8,zeros=true")
    left = blockwise_tuning.tune_(fresh, batches)
    assert list(left) == ["model.layers.0", "model.layers.1"]
    assert blockwise_tuning.tune_(run_before, batches) == left


@pytest.mark.parametrize(("made", "parts"), [(images, ["network"]), (language, ["model.layers.0", "model.layers.1"])])
def test_blocks_are_tuned_one_after_the_other_where_they_hold_nearly_all(made, parts):
    _, network, batches = quantized(made)
    left = tune_(network, batches, steps=8)
    assert list(left) == parts
    assert all(0 < share <= 1 for share in left.values())


def test_it_leaves_modes_gradients_and_statistics_alone():
    _, network, batches = quantized(images)
    network.train()
    norms = {name: value.clone() for name, value in network.state_dict().items() if "running" in name}
    asked = [one.requires_grad for one in network.parameters()]
    tune_(network, batches, steps=4)
    assert network.training
    assert all(one.grad is None for one in network.parameters())
    assert [one.requires_grad for one in network.parameters()] == asked
    assert all(torch.equal(norms[name], network.state_dict()[name]) for name in norms)


def test_what_is_no_nearer_is_undone():
    _, network, batches = quantized(images)
    bitplan.compensate_(network, batches)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    _, again, _ = quantized(images)
    assert tune_(again, batches, steps=4, rate=1e4) == {"network": 1.0}  # far too fast
    assert all(torch.equal(before[name], value) for name, value in again.state_dict().items())


def test_a_killed_one_goes_on(tmp_path):
    told = []

    def kill(done, total, part):
        told.append(part)
        if part == "model.layers.0":
            raise KeyboardInterrupt

    _, whole, batches = quantized(language)
    expected = tune_(whole, batches, steps=8)
    _, network, batches = quantized(language)
    with pytest.raises(KeyboardInterrupt):
        tune_(network, batches, steps=8, store=tmp_path, progress=kill)
    _, network, batches = quantized(language)
    calls = []
    hook = network.model.layers[0].register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    assert tune_(network, batches, steps=8, store=tmp_path) == expected
    hook.remove()
    assert not any(calls)  # the first block was not trained again
    for name, value in whole.state_dict().items():
        assert torch.equal(value, network.state_dict()[name]), name


def test_what_cannot_be_tuned_is_said():
    _, network, batches = quantized(images)
    with pytest.raises(InputError, match="tuning got no batches"):
        tune_(network, [])
    with pytest.raises(InputError, match="at least one step and a rate above 0, not 0"):
        tune_(network, batches, steps=0)
    with pytest.raises(InputError, match="near names|did you mean|finish"):
        bitplan.quantize(network, bitplan.plan_of(network), finish="tuned", batches=batches)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_are_tuned_too_and_nothing_is_warned_of(kind, caplog):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())), nn.Linear(32, 16))
    model.to(kind).eval()
    batches = [torch.randn(64, 32).to(kind) for _ in range(4)]
    plan = bitplan.Plan.uniform(bitplan.trace(model, batches[0], rules=RULES), "w3a16")
    network = bitplan.quantize(model, plan, method="lsq", finish="tune", batches=batches)
    rounded = bitplan.quantize(model, plan, method="lsq", finish="compensate", batches=batches)
    with torch.no_grad():
        wanted = [model(batch) for batch in batches]
        tuned_error, other = (
            sum(
                float((one(batch) - target).float().square().sum())
                for batch, target in zip(batches, wanted, strict=True)
            )
            for one in (network, rounded)
        )
    assert tuned_error < 0.8 * other
    assert {parameter.dtype for parameter in network[0].parameters()} >= {kind}
    assert caplog.text == ""
