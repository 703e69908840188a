"""model + Plan → quantized model, and back: which plan a model follows, and its integer weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Unpack, get_args

from torch import Tensor, nn

from bitplan.core.errors import InputError, UnknownName
from bitplan.core.naming import CALL_QUANTIZERS, INPUT_QUANTIZER, OWN_WEIGHT, WEIGHT_QUANTIZER
from bitplan.core.parsing import first_line
from bitplan.core.precision import Precision
from bitplan.core.records import Integers, Plan
from bitplan.quant.calls import WeightedCall
from bitplan.quant.finite import check_finite, check_values
from bitplan.quant.install import call_at, install_, quantizers_at, strip_
from bitplan.quant.integer_places import find_integers
from bitplan.quant.methods import Options, Quantizers, Told, check_bits, check_integers, read_method
from bitplan.quant.proof import is_proven, prove, prove_when_run_, take_proof_off_
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, save_once_, why_no_multiples
from bitplan.quant.sites import INTEGER, OPTIONS, PLAN, find_sites, quantized_layers, sites_of
from bitplan.quant.sites import is_quantized as is_quantized
from bitplan.quant.sites import root_of as root_of

BYTE = 8
Forward = Callable[[nn.Module, Any], Any]
"""How a model is run on a batch."""
Finish = Literal["round", "compensate", "tune"]
"""How weights become codes where nobody trains them."""
_log = logging.getLogger(__name__)
_ADDED = {WEIGHT_QUANTIZER, INPUT_QUANTIZER, CALL_QUANTIZERS}


def quantize(
    model: nn.Module,
    plan: Plan,
    *,
    example: Any = None,
    finish: Finish = "round",
    batches: Iterable[Any] | None = None,
    forward: Forward | None = None,
    **options: Unpack[Told],
) -> nn.Module:
    """Return a quantized copy of a model; the given model stays as it was.

    ```python
    graph = bitplan.trace(model, example)
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"), batches=batches)
    ```

    If the plan was made from a trace of the model, every layer of it runs quantized. A plan from a file of weights or a
    text must be proven: with `example`, an input as `trace` takes it, right here, else by the first run. The error
    names the layers that would run in float (`quant/proof.py`).

    If the model is quantized already, its weights, learned scales and options are kept. A scale is multiplied by
    2^(b1−b2) if its precision changes. 16 bits leave a tensor in float. Input scales are set by `calibrate_`, or else by
    the first training batch.

    Options:

    - `per_channel` (False): one scale per output channel of a weight instead of one per weight.
    - `method` ("lsq", which learns scales): `bitplan list quantizers` shows all; "pact:decay=0.0002" sets its options.
    - `percentile` (99.9): the percentile of magnitudes at which faq and PACT begin.
    - `features` ("sample" or "batch"): what N in the gradient scale of an input scale counts.
    - `integer` (False): make a network that integer kernels compute exactly. Biases and the shifts of batch norms are
      rounded to the grid of products. Residual additions, and float layers that read an integer convolution, get
      8 bits (docs/decisions/integer-training.md).

    For a network that will not be trained, `batches` set the input scales at once; `calibrate_` explains them and
    `forward`. `finish="compensate"` then rounds weights so that errors in a layer's outputs cancel (`compensate_`).
    "tune" trains them for a short while after that (`tune_`), and "round" rounds each weight by itself. Weights of
    4, 3 and 2 bits want `method="groups"`.
    """
    check_finish(finish, batches)
    quantized = copied(model)
    quantize_(quantized, plan, example=example, **options)
    if batches is not None:
        from bitplan.quant.ptq import finish_

        finish_(quantized, batches, finish, forward=forward)
    return quantized


def check_finish(finish: str, batches: object) -> None:
    """Refuse a finish that there is not, and one that needs data where there is none."""
    if finish not in get_args(Finish):
        raise UnknownName("finish", finish, get_args(Finish))
    if finish != "round" and batches is None:
        raise InputError(
            f"finish {finish} looks at what layers read: give batches=… (on the command line --task or --data)"
        )


def quantize_(model: nn.Module, plan: Plan, *, example: Any = None, **options: Unpack[Told]) -> None:
    """The same in place, for those who may not put another model in the place of theirs; one that fails is spoilt."""
    if is_quantized(model) and not hasattr(model, PLAN):
        raise InputError("a part of this model is quantized already: quantize that part, not what wraps it")
    check_finite(model)
    before: Options = getattr(model, OPTIONS, Options())
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    chosen = replace(before, **changes)
    method = read_method(chosen.method)
    check_bits(method, plan)
    if chosen.integer:
        check_integers(method)
    if chosen.integer and plan.integers is None:
        plan = plan.model_copy(update={"integers": _looked_for(model, example)})
    if chosen.integer:
        plan = with_inputs_in_bytes(plan)
    _install_(model, plan, chosen)
    setattr(model, PLAN, plan)
    setattr(model, OPTIONS, chosen)
    vars(model).pop(INTEGER, None)
    take_proof_off_(model)
    if example is not None:
        prove(model, example).check()
    if not is_proven(model, plan):
        prove_when_run_(model)


def with_inputs_in_bytes(plan: Plan) -> Plan:
    """A plan for integer kernels: layers that read what such a kernel makes read 8 bits, where they were to read more.

    ONNX Runtime's convolutions of integers give integers; one that was to give floats would be computed in floats.
    """
    assert plan.integers is not None
    fed = [
        layer
        for layer, source in plan.integers.feeds.items()
        if layer in plan.precisions and not plan.precisions[layer].quantizes_inputs
        if source in plan.precisions and _in_bytes(plan.precisions[source])
    ]
    if not fed:
        return plan
    shown = ", ".join(fed[:3]) + (" …" if len(fed) > 3 else "")
    _log.info("the inputs of %d layers have 8 bits, not floats, since integer kernels make them: %s", len(fed), shown)
    lowered = {layer: Precision(weight_bits=plan.precisions[layer].weight_bits, act_bits=BYTE) for layer in fed}
    return plan.model_copy(update={"precisions": plan.precisions | lowered})


def _in_bytes(precision: Precision) -> bool:
    return max(precision.weight_bits, precision.act_bits) <= BYTE


def _looked_for(model: nn.Module, example: Any) -> Integers:
    """What a plan does not tell of additions and norms: as an earlier plan of the model told it, or by an example."""
    earlier: Plan | None = getattr(model, PLAN, None)
    if earlier is not None and earlier.integers is not None:
        return earlier.integers
    if example is None:
        raise InputError(
            "integer=True needs to know where the network adds activations, which this plan does not say: give an "
            "example of its input, example=… (--input), or make the plan from trace(model, example)"
        )
    with unquantized(model):
        return find_integers(model, example)


def copied(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model."""
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied ({first_line(error, 60)}): if it has run with a "
            "weight that it computes, run it once more under torch.no_grad()"
        ) from error


def _install_(model: nn.Module, plan: Plan, options: Options) -> None:
    """Put quantizers in, in the place of those of an earlier plan; what is new is in the mode of what it is in."""
    kept: dict[str, Quantizers] = {}
    if hasattr(model, PLAN):
        kept = strip_(model, sites_of(model))
    else:
        save_once_(model)
    install_(model, plan, find_sites(model, quantized_layers(plan), plan.uses), options, kept)
    for module in model.modules():
        for added in _ADDED & module._modules.keys():
            module.get_submodule(added).train(module.training)


def plan_of(model: nn.Module) -> Plan:
    """The plan a quantized model follows, also through wrappers (DDP, averages, compiled)."""
    plan: Plan = getattr(root_of(model), PLAN)
    return plan


def options_of(model: nn.Module) -> Options:
    """How a quantized model was quantized, beside its plan."""
    options: Options = getattr(root_of(model), OPTIONS)
    return options


def quantizers_of(model: nn.Module) -> dict[str, Quantizers]:
    """The quantizers of every layer of the plan; linked layers name the same input quantizer."""
    return {layer: quantizers_at(site) for layer, site in sites_of(model).items()}


def integer_weights(model: nn.Module) -> dict[str, Tensor]:
    """The codes of every quantized weight, exactly those that the network multiplies by its steps.

    int8 up to 8 bits, int16 above; layers whose weights are left alone are not among them.
    """
    return {layer: quantizer.codes(weight) for layer, quantizer, weight in _weights(model)}


def weight_steps(model: nn.Module, *, but: Collection[str] = ()) -> dict[str, Tensor]:
    """The positive steps of `integer_weights`: scalars, or of a shape that broadcasts against the codes.

    Levels that are no multiples of a step are refused by the layer's name, unless it is among `but`.
    """
    for layer, quantizer, _ in _weights(model):
        if layer in but:
            continue
        why = why_no_multiples(quantizer)
        if why:
            method = options_of(model).method
            raise InputError(
                f"the weights of layer {layer!r} are no multiples of a step, by which other programs know them: {why} "
                f"({method}); quantize with another method, or keep a checkpoint (save_checkpoint)"
            )
    return {layer: quantizer.steps_for(weight) for layer, quantizer, weight in _weights(model) if layer not in but}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights of `integer_weights` before they are quantized."""
    return {layer: weight for layer, _, weight in _weights(model)}


@contextmanager
def unquantized(model: nn.Module) -> Iterator[nn.Module]:
    """The same model with every quantizer passing its tensor through untouched, until the block ends."""
    switched = [
        module for module in model.modules() if isinstance(module, (WeightQuantizer, InputQuantizer)) and module.enabled
    ]
    for quantizer in switched:
        quantizer.enabled = False
    try:
        yield model
    finally:
        for quantizer in switched:
            quantizer.enabled = True


def _weights(model: nn.Module) -> Iterator[tuple[str, WeightQuantizer, Tensor]]:
    for layer, site in sites_of(model).items():
        quantizer, call = quantizers_at(site).weight, call_at(site)
        weight = call.multiplied(layer) if isinstance(call, WeightedCall) else site.weight
        if quantizer is not None and weight is not None:
            if not isinstance(weight, nn.Parameter):  # it is computed
                check_values(f"{layer}.{OWN_WEIGHT}", weight)
            yield layer, quantizer, weight
