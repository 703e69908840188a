"""The contract of layer types."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from bitplan.core.naming import weight_names
from bitplan.core.records import Graph
from bitplan.core.registry import EXECUTIONS, LAYERS
from bitplan.core.rules import Rules
from bitplan.exporters.base import export
from bitplan.exporters.packed import load_packed
from bitplan.gains.base import estimate
from bitplan.graph.trace import trace
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.checkpoint import load_checkpoint, save_checkpoint
from bitplan.quant.convert import integer_weights, quantize, weight_steps
from bitplan.quant.layers import LayerType, type_for_class, type_for_forward
from bitplan.quant.proof import take_proof_off_
from bitplan.quant.quantizers import InputQuantizer
from bitplan.testing.contract import Contract
from bitplan.testing.networks import plan_for

_RULES = Rules(first=None, last=None, narrow=0, embeddings=None)
_CLOSE = 1e-5  # of the largest output: products are added up in another order


def check_layer(kind: type[LayerType]) -> None:
    """Hold a layer type to its contract, on its example; it must be registered, or it is registered meanwhile."""
    name = next((name for name in LAYERS if LAYERS.get(name) is kind), None)
    contract = Contract(f"layer type {name or kind.__name__}")
    with contract.works("it is made without arguments"):
        made = kind()
    with nullcontext() if name else LAYERS.registered(kind.__name__, kind):
        _check(contract, made)


def _check(contract: Contract, layer_type: LayerType) -> None:
    with contract.works("its example is a module and an input that it takes"), torch.random.fork_rng([]):
        torch.manual_seed(0)
        module, x = layer_type.example()
        module(x)
    with contract.works("it can stand beside the other layer types"):
        parts = [part for part in module.modules() if isinstance(type_for_class(part), type(layer_type))]
    contract.clause("its example is of this type", bool(parts), type(module).__name__)
    _check_channels(contract, layer_type, parts[0])
    network = nn.Sequential(module)
    with contract.works("its example multiplies by its weights"):
        graph = trace(network, x, rules=_RULES, name="example")
    if layer_type.quantized is not None:
        clause = "it knows the forward of its example"
        contract.clause(clause, isinstance(type_for_forward(module), type(layer_type)), type(module).__name__)
    _check_same_products(contract, layer_type, network, graph, x)
    for per_channel in (False, True):
        model = _quantized(contract, network, graph, x, "w4a4", per_channel=per_channel)
        _check_training(contract, copy.deepcopy(model), x)
        _check_files(contract, network, model.eval(), x)
        _check_integers(contract, model, x)
        with contract.works("EAGL counts its weights, with one step and with one per channel"):
            estimate("eagl", model, graph)


def _quantized(
    contract: Contract, network: nn.Module, graph: Graph, x: Tensor, precision: str, *, per_channel: bool = False
) -> nn.Module:
    """All layers at one precision, calibrated."""
    with contract.works("its example can be quantized and calibrated"):
        plan = plan_for(graph, {layer.name: precision for layer in graph.layers})
        model = quantize(network, plan, per_channel=per_channel)
        take_proof_off_(model)
        calibrate_(model, [x], unreached="warn")  # what does not run is said more exactly below
    return model


def _check_channels(contract: Contract, layer_type: LayerType, module: nn.Module) -> None:
    weights = {name: p for name, p in module.named_parameters(recurse=False) if layer_type.holds(name)}
    contract.clause("`weights` are names of its parameters", bool(weights), layer_type.weights)
    channels = layer_type.channels(module)
    for name, weight in weights.items():
        dimensions = weight.dim() + (channels.groups > 1)
        inside = all(0 <= axis < dimensions for axis in channels.axes)
        found = f"{channels.axes} of {name} {tuple(weight.shape)}"
        contract.clause("`channels` are axes of its weights", inside, found)


def _check_same_products(
    contract: Contract, layer_type: LayerType, network: nn.Module, graph: Graph, x: Tensor
) -> None:
    """The counterpart does with quantized tensors what the module does with plain ones."""
    model = _quantized(contract, network, graph, x, "w4a16").eval()
    codes, steps = integer_weights(model), weight_steps(model)
    held = {_parameter_of(name, network): codes[name] * steps[name] for name in codes}
    clause = "quantized, it does with its codes what it did with its weights"
    with contract.works(clause):
        _check_close(contract, clause, model(x), _with_weights(network, held, x))
    if not layer_type.float_input or len(codes) > 1:  # of several weights the later ones read what is inside
        return
    model = _quantized(contract, network, graph, x, "w16a4").eval()
    (quantizer,) = (part for part in model.modules() if isinstance(part, InputQuantizer))
    clause = "with its input quantized it does what it did with such an input"
    with contract.works(clause):
        _check_close(contract, clause, model(x), network(quantizer(x)))


def _check_training(contract: Contract, model: nn.Module, x: Tensor) -> None:
    with contract.works("it trains"):
        model.train()(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        contract.clause("every parameter and every step gets a gradient", parameter.grad is not None, f"not {name}")
        assert parameter.grad is not None
        contract.clause("every gradient is finite", bool(parameter.grad.isfinite().all()), f"not that of {name}")


def _check_files(contract: Contract, network: nn.Module, model: nn.Module, x: Tensor) -> None:
    expected = model(x)
    with tempfile.TemporaryDirectory() as folder, contract.works("it can be saved and packed, and loaded"):
        saved = load_checkpoint(save_checkpoint(model, Path(folder) / "net"), network).eval()(x)
        packed = load_packed(export(model, Path(folder) / "net.safetensors", "packed"), network).eval()(x)
    same = torch.equal(saved, expected) and torch.equal(packed, expected)
    contract.clause("loaded, it gives the same answers bit for bit", same)


@torch.no_grad()
def _check_integers(contract: Contract, model: nn.Module, x: Tensor) -> None:
    clause = "its integer kernel, if it has one, computes the same"
    if "integer" in EXECUTIONS:  # a plugin's
        with contract.works(clause):
            _check_close(contract, clause, EXECUTIONS.get("integer")(model)(x), model(x))


def _with_weights(network: nn.Module, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    plain = {name: value.detach() for name, value in network.named_parameters()}
    out: Tensor = torch.func.functional_call(network, {**plain, **weights}, (x,))
    return out


def _parameter_of(layer: str, network: nn.Module) -> str:
    """The name of the parameter that a layer is called after."""
    names = {name for name, _ in network.named_parameters()}
    return next(name for name in weight_names(layer) if name in names)


@torch.no_grad()
def _check_close(contract: Contract, clause: str, found: Tensor, expected: Tensor) -> None:
    same = found.shape == expected.shape
    contract.clause(clause, same, f"{tuple(found.shape)} instead of {tuple(expected.shape)}")
    off = float((found - expected).abs().max()) / max(1e-6, float(expected.abs().max()))
    contract.clause(clause, off <= _CLOSE, f"off by {off:.2g} of the largest answer")
