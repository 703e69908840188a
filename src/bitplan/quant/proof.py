"""Proof that a quantized network executes its plan: one forward pass in which every multiplication is checked.

The pass runs on tensors without data (`forward/shadow.py`). Each quantizer only leaves its mark on its input. A layer
is proven if both its operands have the marks of its quantizers. A weight of the plan that is multiplied without them
runs in float.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from bitplan.adapters.torch import uncompiled
from bitplan.core.errors import InputError
from bitplan.core.naming import split_name
from bitplan.core.parsing import first_line
from bitplan.core.records import Plan
from bitplan.forward.operations import Key, Operations, Product, Values, find_products, tensors_in, written_tensors
from bitplan.forward.shadow import Shadow, arguments_of
from bitplan.quant.calls import AttentionCall, sources_of
from bitplan.quant.integer import additions_of, operands_of
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.sites import PLAN, Site, call_at, quantized_layers, quantizers_at, sites_of, unwrap

Unreached = Literal["raise", "warn"]
"""Layers of a plan that never run are an error, or a warning if a task does not use them."""

PROVES = "proves"
"""Marks a hook that proves a run ."""

_log = logging.getLogger(__name__)
_SHOWN = 8
_MARK = "quantizer "
_SUMS = (torch.ops.aten.add, torch.ops.aten.add_)


@dataclass(frozen=True)
class Proof:
    """The number of times each layer was multiplied as planned, and the number of times its weight was in float.

    Additions of a network made for integers are included. Layers that the plan leaves in float are not.
    """

    quantized: Mapping[str, int]
    in_float: Mapping[str, int]

    @property
    def unreached(self) -> tuple[str, ...]:
        """The layers that the forward pass never came to."""
        return tuple(layer for layer, count in self.quantized.items() if not count and not self.in_float.get(layer))

    def check(self, unreached: Unreached = "raise") -> None:
        """Raise an error that names the layers which run in float; raise or warn for those that do not run."""
        if self.in_float:
            raise InputError(
                f"the plan quantizes {list_layers(self.in_float)}, which this network computes in float: make the plan "
                "from a graph of this model, with trace(model, example); if it is from one, fix what bitplan cannot "
                f"reach: --rules 'fix={next(iter(self.in_float))}=w16a16', or Rules(fix=…)"
            )
        report_unreached(self.unreached, unreached)


def report_unreached(layers: Collection[str], unreached: Unreached) -> None:
    """Raise an error, or only warn, about layers that a plan quantizes and no run has reached."""
    if not layers:
        return
    if unreached == "warn":
        _log.warning("the network never ran %s", list_layers(layers))
        return
    raise InputError(
        f"the network never ran {list_layers(layers)} of its plan: make the plan from a graph of this model, or, if "
        'the task does not use them, say so: calibrate_(model, batches, unreached="warn"), or --unreached warn'
    )


def list_layers(layers: Collection[str]) -> str:
    """Return the names of some layers, shortened if there are many."""
    names = list(layers)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{'layers' if len(names) > 1 else 'layer'} {', '.join(names[:_SHOWN])}{more}"


def prove(model: nn.Module, example: Any) -> Proof:
    """Run a quantized model once, without data, and return which layers of its plan are really quantized.

    `example` is as for `trace`, and only its shapes matter. If the model cannot run on shapes alone, a copy of the
    model is run on the example. The model itself is neither run nor changed; the proof is of inference.
    """
    return prove_run(unwrap(model), *arguments_of(example), training=False)


def prove_run(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Proof:
    """Return the proof of one run with these arguments, in training or in inference."""
    shadow = Shadow(root)
    try:
        copied = shadow.arguments((args, kwargs))
        return PlanVerifier(_set_mode(shadow.model, root, training)).watch(shadow.running(), *copied)
    except Exception:  # it decides by values, or an operation knows the shapes of fewer types than it computes
        if any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
            raise
        model, (args, kwargs) = copy.deepcopy(root), copy.deepcopy((args, kwargs))
        with torch.random.fork_rng(devices=[]):
            return PlanVerifier(_set_mode(model, root, training)).watch(nullcontext(), args, kwargs)


def _set_mode(copied: nn.Module, root: nn.Module, training: bool) -> nn.Module:
    """Put a copy into a mode; if the original is in that mode, module by module as the original."""
    copied.train(training)
    if root.training == training:
        for mine, other in zip(copied.modules(), root.modules(), strict=True):
            mine.training = other.training
    return copied


def awaits_proof(root: nn.Module) -> bool:
    """Tell whether the first run of a model is going to prove it."""
    return any(hasattr(hook, PROVES) for hook in root._forward_pre_hooks.values())


def take_proof_off_(root: nn.Module) -> bool:
    """Remove the proof from the first run of a model; tell whether there was one."""
    found = [key for key, hook in root._forward_pre_hooks.items() if hasattr(hook, PROVES)]
    for key in found:
        del root._forward_pre_hooks[key]
        root._forward_pre_hooks_with_kwargs.pop(key, None)
    return bool(found)


@dataclass(frozen=True)
class _PlannedLayer:
    """The names of the two operands of a layer as planned, in pairs.

    `own` are the operands that no other layer multiplies: its weight, quantized or not, or both operands of a product.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    own: frozenset[str]


class PlanVerifier:
    """Follows marks through a forward pass of a copy that belongs to the verifier."""

    def __init__(self, model: nn.Module) -> None:
        take_proof_off_(model)
        self._model = model
        self._values = Values()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            self._values.add_parameter(parameter, name)
        self._layers = [_describe_layer(site, names) for site in sites_of(model).values()]
        self._known: dict[str, list[_PlannedLayer]] = {}
        for layer in self._layers:
            for name in layer.own:
                self._known.setdefault(name, []).append(layer)
        self._rows: dict[Key, list[_PlannedLayer]] = {}
        self._quantized: Counter[str] = Counter()
        self._in_float: Counter[str] = Counter()
        sums = {name: operands_of(call) for name, call in additions_of(model).items()}
        self._sums = {name: (_mark_of(left), _mark_of(right)) for name, (left, right) in sums.items()}
        self._halves: Counter[str] = Counter()
        for module in model.modules():
            if isinstance(module, WeightQuantizer | InputQuantizer):
                vars(module)["forward"] = partial(self._mark, module)

    def watch(self, context: AbstractContextManager[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Proof:
        """Run the copy."""
        for tensor in tensors_in((args, kwargs)):
            self._values.add_input(tensor, "")
        with torch.no_grad(), context, Operations(self._note):
            self._model(*args, **kwargs)
        self._in_float.update(layer.name for layers in self._rows.values() for layer in layers)
        self._in_float.update({name: count for name, count in self._halves.items() if not self._quantized[name]})
        names = (*(layer.name for layer in self._layers), *self._sums)
        return Proof({name: self._quantized[name] for name in names}, dict(self._in_float))

    def _mark(self, quantizer: nn.Module, v: Tensor, **_: Any) -> Tensor:
        if not v.is_floating_point():
            return v
        mark = _mark_of(quantizer)
        waiting = self._rows.pop(self._values.key(v), [])  # rows of a table, which are quantized once looked up
        as_planned = [layer.name for layer in waiting if any(mark in pair for pair in layer.pairs)]
        self._quantized.update(as_planned)
        self._in_float.update([] if as_planned else [layer.name for layer in waiting])
        marked = v.clone()
        self._values.add_parameter(marked, mark)
        return marked

    def _note(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        inputs, outputs = tensors_in((arguments, options)), tensors_in(output)
        products = find_products(operation, arguments, output)
        for product in products:
            self._judge(product, outputs)
        is_sum = operation.overloadpacket in _SUMS and self._judge_sum(*inputs)
        self._values.made(outputs, inputs, "", layer=is_sum or any(map(self._is_layer, products)))
        self._values.wrote(written_tensors(operation, arguments), inputs, "")

    def _is_layer(self, product: Product) -> bool:
        """Tell a layer from a look-up, and from a weight that is computed: a product of parameters, none quantized."""
        operands = (product.first, product.second)
        marked = any(name.startswith(_MARK) for operand in operands for name in self._values.sources(operand))
        return product.kind != "embedding" and (marked or any(map(self._values.is_activation, operands)))

    def _judge(self, product: Product, outputs: list[Tensor]) -> None:
        """Check whether a multiplication is a layer's, and as planned."""
        if product.by_data and not self._values.is_activation(product.first):
            return
        first, second = self._values.sources(product.first), self._values.sources(product.second)
        for layer in dict.fromkeys(layer for name in first | second for layer in self._known.get(name, ())):
            if product.kind == "embedding" and layer.own & second:
                self._judge_rows(layer, product, outputs)
            elif any(_is_pair(pair, first, second) for pair in layer.pairs):
                self._quantized[layer.name] += 1
            elif self._takes_part(layer, product, first, second):
                self._in_float[layer.name] += 1

    def _judge_sum(self, first: Tensor, second: Tensor | None = None) -> bool:
        """Check whether an addition is one for integer kernels, and whether both operands are quantized."""
        marks = [self._values.sources(operand) for operand in (first, second) if operand is not None]
        found = {
            name: {mark for mark in pair if any(mark in one for one in marks)} for name, pair in self._sums.items()
        }
        whole = [name for name, pair in self._sums.items() if found[name] == set(pair) and len(marks) == 2]
        self._quantized.update(whole)
        self._halves.update(name for name, some in found.items() if some and name not in whole)
        return bool(whole)

    def _judge_rows(self, layer: _PlannedLayer, product: Product, outputs: list[Tensor]) -> None:
        if any(weight in self._values.sources(product.second) for weight, _ in layer.pairs):
            self._quantized[layer.name] += 1
        else:
            self._rows.setdefault(self._values.key(outputs[0]), []).append(layer)

    def _takes_part(
        self, layer: _PlannedLayer, product: Product, first: frozenset[str], second: frozenset[str]
    ) -> bool:
        """Tell whether a layer's weight meets an activation here, or its activation meets another operand."""
        for operand, others, other in ((first, second, product.second), (second, first, product.first)):
            if operand & layer.own and (
                self._values.is_activation(other) or any(name.startswith(_MARK) for name in others)
            ):
                return True
        return False


def _describe_layer(site: Site, names: Mapping[int, str]) -> _PlannedLayer:
    both, call = quantizers_at(site), call_at(site)
    if site.kind == "product":
        operands = [_mark_of(quantizer) for quantizer in both.inputs]
        if isinstance(call, AttentionCall):
            query, key, _, weights, value = operands
            return _PlannedLayer(site.layer, ((query, key), (weights, value)), frozenset({query, key, weights, value}))
        return _PlannedLayer(site.layer, ((operands[0], operands[1]),), frozenset(operands[:2]))
    assert site.parameter is not None
    raw = frozenset(names[id(source)] for source in sources_of(site.module, split_name(site.parameter)[1]))
    inputs = _mark_of(both.inputs[0]) if both.inputs else ""
    if both.weight is None:  # only what it reads is quantized
        return _PlannedLayer(site.layer, tuple((name, inputs) for name in raw), raw)
    weight = _mark_of(both.weight)
    return _PlannedLayer(site.layer, ((weight, inputs),), raw | {weight})


def _is_pair(pair: tuple[str, str], first: frozenset[str], second: frozenset[str]) -> bool:
    """Tell whether two operands are a layer's, in either order; an input in float has no name."""
    one, other = pair
    return (one in first and (not other or other in second)) or (one in second and (not other or other in first))


def _mark_of(quantizer: nn.Module) -> str:
    return f"{_MARK}{id(quantizer)}"


# A quantized network is proven by its first run, in training and in inference.

PROVEN = "_bitplan_proven"
Quantizes = tuple[bool, bool]
"""True for weights that are quantized, and true for inputs that are."""


def prove_when_run_(root: nn.Module) -> None:
    """Prove a model with the arguments of its first run."""
    setattr(root, PROVEN, {})
    root.register_forward_pre_hook(_prove_first, with_kwargs=True)


def is_proven(root: nn.Module, plan: Plan) -> bool:
    """Tell whether the layers that a plan quantizes were proven already, at any bits."""
    proven: Mapping[str, Quantizes] = getattr(root, PROVEN, {})
    return bool(proven) and all(proven.get(layer) == own for layer, own in _quantizes(plan).items())


def allow_unreached_(model: nn.Module) -> None:
    """Only warn about layers that the first run of a quantized model does not reach."""
    root = unwrap(model)
    if take_proof_off_(root):
        root.register_forward_pre_hook(_prove_reached, with_kwargs=True)


# Hooks are found by their names when a model is unpickled.
@uncompiled
def _prove_first(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    plan: Plan = getattr(root, PLAN)
    inputs = [module for module in root.modules() if isinstance(module, InputQuantizer)]
    is_new = root.training and all(quantizer.range is None for quantizer in inputs)
    # What a trace saw is reached; a part that a task does not use was told by calibration, or is by nobody.
    _prove_once(root, args, kwargs, "raise" if is_new and plan.uses is None else "warn")


@uncompiled
def _prove_reached(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _prove_once(root, args, kwargs, "warn")


for _hook in (_prove_first, _prove_reached):
    setattr(_hook, PROVES, True)


def _prove_once(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], unreached: Unreached) -> None:
    """Prove a run in its mode, and in the other mode too: a network may multiply differently in training."""
    if any(is_fake(parameter) for parameter in root.parameters()):  # a shadow, or a capture: somebody else's business
        return
    take_proof_off_(root)
    try:
        proof = prove_run(root, args, kwargs, training=root.training)
    except Exception as error:
        root.register_forward_hook(partial(_tell_unproven, first_line(error)))
        return
    proof.check(unreached)
    try:
        other = prove_run(root, args, kwargs, training=not root.training)
    except Exception:  # in that mode it wants other arguments, or more than one sample
        other = Proof(proof.quantized, {})
    Proof(proof.quantized, other.in_float).check(unreached="warn")
    setattr(root, PROVEN, _quantizes(getattr(root, PLAN)))


def _tell_unproven(why: str, root: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
    """Warn once, after a run that succeeded: one that fails raises its own error."""
    for key, hook in list(root._forward_hooks.items()):
        if getattr(hook, "func", None) is _tell_unproven:
            del root._forward_hooks[key]
    _log.warning("it could not be proven that the plan is executed: %s", why)


def _quantizes(plan: Plan) -> dict[str, Quantizes]:
    precisions = {layer: plan.precisions[layer] for layer in quantized_layers(plan)}
    return {layer: (one.quantizes_weights, one.quantizes_inputs) for layer, one in precisions.items()}
