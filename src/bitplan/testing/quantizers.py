"""The contract of methods of quantization."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.core.codes import code_range
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.core.registry import QUANTIZERS
from bitplan.core.rules import Rules
from bitplan.exporters.base import export
from bitplan.exporters.packed import load_packed
from bitplan.gains.base import estimate
from bitplan.graph.trace import trace
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.checkpoint import load_checkpoint, save_checkpoint
from bitplan.quant.convert import quantize, quantizers_of, weights_of
from bitplan.quant.methods import ALL_BITS, Quantizer
from bitplan.quant.parameters import parameter_groups
from bitplan.quant.sites import Quantizers
from bitplan.tasks.base import load_task
from bitplan.testing.contract import Contract
from bitplan.testing.networks import Branching, plan_for

_RULES = Rules(first=None, last=None, narrow=0)
_BATCH, _STEPS, _RATE = 64, 24, 0.02


def check_quantizer(method: Quantizer) -> None:
    """Hold a method to its contract, on a small network of digits; where it is not registered, it is meanwhile."""
    kind = type(method)
    name = next((name for name in QUANTIZERS if QUANTIZERS.get(name) is kind), None)
    contract = Contract(f"quantizer {name or kind.__name__.lower()}")
    bits = [*getattr(method, "weight_bits", ()), *getattr(method, "input_bits", ())]
    sound = isinstance(method, Quantizer) and bool(bits) and set(bits) <= set(ALL_BITS)
    contract.clause("it is a Quantizer with bits from 2 to 15", sound, bits[:4])
    with nullcontext() if name else QUANTIZERS.registered(kind.__name__.lower(), kind):
        _check(contract, method, _written(method))


def _check(contract: Contract, method: Quantizer, written: str) -> None:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        network = Branching()
    task = load_task("digits")
    batches = list(itertools.islice(task.batches("train", _BATCH, seed=0), _STEPS))
    images = batches[0][0]
    graph = trace(network, images, rules=_RULES, name="digits")
    lowest = Precision(weight_bits=min(method.weight_bits), act_bits=min(method.input_bits))
    highest = Precision(weight_bits=max(b for b in method.weight_bits if b <= 8), act_bits=8)
    for precision in dict.fromkeys((lowest, highest)):
        with contract.leaves_as_it_was(network), contract.works("it quantizes a network at the bits that it has"):
            model = _quantized(network, graph, precision, written, images)
        _check_levels(contract, model, images)
        _check_files(contract, network, model.eval(), images)
        with contract.works("EAGL counts its codes"):
            estimate("eagl", model, graph, choices=f"w2a2,{precision}" if precision.weight_bits > 2 else "w2a2,w2a8")
    model = _quantized(network, graph, lowest, written, images)
    _check_training(contract, model.train(), batches)
    with contract.works("what was trained can be given other bits it has, and be trained on"):
        other = quantize(model, plan_for(graph, {layer.name: str(highest) for layer in graph.layers})).train()
        other(images).sum().backward()


def _quantized(network: nn.Module, graph: Graph, precision: Precision, written: str, images: Tensor) -> nn.Module:
    """All layers at one precision, calibrated."""
    plan = plan_for(graph, {layer.name: str(precision) for layer in graph.layers})
    model = quantize(network, plan, method=written)
    calibrate_(model, [images])
    return model


@torch.no_grad()
def _check_levels(contract: Contract, model: nn.Module, images: Tensor) -> None:
    model.eval()(images)  # whatever is set at the first run
    weights = weights_of(model)
    for layer, both in quantizers_of(model).items():
        assert both.weight is not None
        weight, quantizer = weights[layer], both.weight
        with contract.works("it gives codes of weights and inputs, and the level of each"):
            codes, levels = quantizer.codes(weight).long(), quantizer.levels(weight)
            found = levels.expand(*weight.shape, levels.shape[-1]).gather(-1, (codes - quantizer.range[0])[..., None])
            inputs = _input_levels(both)
        low, high = code_range(quantizer.bits) if quantizer.uniform else quantizer.range
        inside = bool(((codes >= low) & (codes <= high)).all())
        contract.clause("codes are whole numbers of so many bits", inside, f"{layer} has {codes.unique().tolist()[:6]}")
        same = torch.equal(found[..., 0], quantizer(weight))
        contract.clause("a weight becomes the levels of its codes, exactly", same, layer)
        contract.clause("an input becomes the levels of its codes, exactly", inputs, layer)


def _input_levels(both: Quantizers) -> bool:
    """Whether the quantizer of an input gives the levels of its codes."""
    (quantizer,) = both.inputs
    assert quantizer.range is not None
    low, _ = quantizer.range
    values = torch.linspace(-3, 3, 101) * float(quantizer.levels().abs().max())
    return torch.equal(quantizer.levels()[(quantizer.codes(values) - low).long()], quantizer(values))


def _check_files(contract: Contract, network: nn.Module, model: nn.Module, images: Tensor) -> None:
    expected, uniform = model(images), all(both.weight.uniform for both in quantizers_of(model).values() if both.weight)
    with tempfile.TemporaryDirectory() as folder:
        with contract.works("its networks can be saved and loaded"):
            loaded = load_checkpoint(save_checkpoint(model, Path(folder) / "net"), network).eval()
        same = torch.equal(loaded(images), expected)
        if uniform:
            with contract.works("where its levels are equally far apart, its networks can be packed"):
                packed = load_packed(export(model, Path(folder) / "net.safetensors", "packed"), network).eval()
            same = same and torch.equal(packed(images), expected)
    contract.clause("loaded, it gives the same answers bit for bit", same)


def _check_training(contract: Contract, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD(parameter_groups(model, lr=_RATE), momentum=0.9)
    losses: list[float] = []
    with contract.works("it trains"):
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            _check_gradients(contract, model)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    part = len(losses) // 4
    falls = sum(losses[-part:]) < sum(losses[:part])
    contract.clause("the loss falls", falls, f"from {losses[0]:.3g} to {losses[-1]:.3g}")


def _check_gradients(contract: Contract, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        found = parameter.grad
        contract.clause("every weight, and all that it learns, gets a gradient", found is not None, f"not {name}")
        assert found is not None
        contract.clause("every gradient is finite", bool(found.isfinite().all()), f"not that of {name}")


def _written(method: Quantizer) -> str:
    """A method with its options as `quantize` takes it."""
    options = {option.name: getattr(method, option.name) for option in dataclasses.fields(method)}
    shown = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]
    return f"{method.name}:{','.join(shown)}" if shown else method.name
