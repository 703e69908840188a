"""model + Plan → quantized model; the plan that a model follows, and its integer weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Unpack

from torch import Tensor, nn

from bitplan.adapters.torch import device_of
from bitplan.core.errors import InputError
from bitplan.core.naming import (
    ATTENTION,
    CALL_QUANTIZERS,
    INPUT_QUANTIZER,
    OWN_WEIGHT,
    WEIGHT_QUANTIZER,
    function_of,
    layer_of,
    split_name,
)
from bitplan.core.parsing import first_line
from bitplan.core.precision import Precision
from bitplan.core.records import Integers, Plan
from bitplan.core.registry import ROUNDINGS
from bitplan.quant.call_interception import BORROWED, CallOwner, calls_of, exclude_inner_modules_, intercept_calls_
from bitplan.quant.calls import AttentionCall, ProductCall, WeightedCall
from bitplan.quant.finite import check_finite, check_values
from bitplan.quant.integer import NormLayer, additions_of, install_integers_, operands_of, release_norm_
from bitplan.quant.integer_places import find_integers
from bitplan.quant.layers import Adopted, adopt_, quantized_as, release_
from bitplan.quant.methods import (
    OptionChanges,
    QuantizeOptions,
    QuantizerFactory,
    check_bits,
    check_integers,
    read_method,
)
from bitplan.quant.proof import is_proven, prove, prove_when_run_, take_proof_off_
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, save_once_, why_not_uniform
from bitplan.quant.sites import (
    INTEGER,
    NONE,
    OPTIONS,
    PLAN,
    Place,
    Quantizers,
    Site,
    call_at,
    find_sites,
    quantized_layers,
    quantizers_at,
    sites_of,
)
from bitplan.quant.sites import is_quantized as is_quantized
from bitplan.quant.sites import unwrap as unwrap

BYTE = 8
Forward = Callable[[nn.Module, Any], Any]
"""A function that runs a model on a batch."""
_log = logging.getLogger(__name__)
_SOFTMAX_BITS = 8
_PRODUCT_INPUTS = ("left", "right")
_ATTENTION_INPUTS = ("query", "key", "scores", "weights", "value")
_SHORTCUTS = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
_ADDED = {WEIGHT_QUANTIZER, INPUT_QUANTIZER, CALL_QUANTIZERS}


def quantize(
    model: nn.Module,
    plan: Plan,
    *,
    example: Any = None,
    finish: str = "round",
    batches: Iterable[Any] | None = None,
    forward: Forward | None = None,
    **options: Unpack[OptionChanges],
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
    2^(b1−b2) if its precision changes. 16 bits leave a tensor in float. Input scales are set by `calibrate_`, or
    else by the first training batch.

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
    "tune" trains them for a short while after that
    (`bitplan.plugins.ptq.blockwise_tuning.tune_`), and "round" rounds each weight by itself. Weights of
    4, 3 and 2 bits want `method="groups"`.
    """
    check_finish(finish, batches)
    quantized = deep_copy(model)
    quantize_(quantized, plan, example=example, **options)
    if batches is not None:
        from bitplan.quant.ptq import finish_

        finish_(quantized, batches, finish, forward=forward)
    return quantized


def check_finish(finish: str, batches: object) -> None:
    """Raise an error if a finish is unknown, or needs data and has none."""
    if finish != "round":
        ROUNDINGS.get(finish)
    if finish != "round" and batches is None:
        raise InputError(
            f"finish {finish} looks at what layers read: give batches=… (on the command line --task or --data)"
        )


def quantize_(model: nn.Module, plan: Plan, *, example: Any = None, **options: Unpack[OptionChanges]) -> None:
    """Quantize a model in place, as `quantize` quantizes a copy; a model for which this fails must be built again."""
    if is_quantized(model) and not hasattr(model, PLAN):
        raise InputError("a part of this model is quantized already: quantize that part, not what wraps it")
    check_finite(model)
    before: QuantizeOptions = getattr(model, OPTIONS, QuantizeOptions())
    changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    chosen = replace(before, **changes)
    method = read_method(chosen.method)
    check_bits(method, plan)
    if chosen.integer:
        check_integers(method)
        if plan.integers is None:
            plan = plan.model_copy(update={"integers": _find_integers(model, example)})
        plan = _with_inputs_in_bytes(plan)
    _install_(model, plan, chosen)
    setattr(model, PLAN, plan)
    setattr(model, OPTIONS, chosen)
    vars(model).pop(INTEGER, None)
    take_proof_off_(model)
    if example is not None:
        prove(model, example).check()
    if not is_proven(model, plan):
        prove_when_run_(model)


def _with_inputs_in_bytes(plan: Plan) -> Plan:
    """Return the plan with 8 bits for the float inputs of layers that read the output of an integer kernel.

    ONNX Runtime's integer convolutions return integers; a convolution that had to return floats would run in floats.
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


def _find_integers(model: nn.Module, example: Any) -> Integers:
    """Find the additions and norms that the plan does not name: in an earlier plan of the model, or by an example."""
    earlier: Plan | None = getattr(model, PLAN, None)
    if earlier is not None and earlier.integers is not None:
        return earlier.integers
    if example is None:
        raise InputError(
            "integer=True needs to know where the network adds activations, which this plan does not say: give an "
            "example of its input, example=… (--input), or make the plan from trace(model, example)"
        )
    with without_quantizers(model):
        return find_integers(model, example)


def deep_copy(model: nn.Module) -> nn.Module:
    """Return a copy that shares nothing with the model."""
    try:
        return copy.deepcopy(model)
    except RuntimeError as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied ({first_line(error, 60)}): if it has run with a "
            "weight that it computes, run it once more under torch.no_grad()"
        ) from error


def plan_of(model: nn.Module) -> Plan:
    """Return the plan that a quantized model follows, also through wrappers (DDP, averages, compiled)."""
    plan: Plan = getattr(unwrap(model), PLAN)
    return plan


def options_of(model: nn.Module) -> QuantizeOptions:
    """Return the options with which a model was quantized."""
    options: QuantizeOptions = getattr(unwrap(model), OPTIONS)
    return options


def quantizers_of(model: nn.Module) -> dict[str, Quantizers]:
    """Return the quantizers of every layer of the plan; linked layers have the same input quantizer."""
    return {layer: quantizers_at(site) for layer, site in sites_of(model).items()}


def integer_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the integer values of every quantized weight, exactly those that the network multiplies by its scales.

    int8 up to 8 bits, int16 above. Layers whose weights stay in float are left out.
    """
    return {layer: quantizer.codes(weight) for layer, quantizer, weight in _weights(model)}


def weight_steps(model: nn.Module, *, but: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the positive scales of `integer_weights`: scalars, or of a shape that broadcasts against the values.

    Layers in `but` are left out. Raise an error that names the layer if its levels are not multiples of a scale.
    """
    for layer, quantizer, _ in _weights(model):
        if layer in but:
            continue
        why = why_not_uniform(quantizer)
        if why:
            method = options_of(model).method
            raise InputError(
                f"the weights of layer {layer!r} are no multiples of a scale, by which other programs know them: {why} "
                f"({method}); quantize with another method, or keep a checkpoint (save_checkpoint)"
            )
    return {layer: quantizer.steps_for(weight) for layer, quantizer, weight in _weights(model) if layer not in but}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of `integer_weights` before they are quantized."""
    return {layer: weight for layer, _, weight in _weights(model)}


@contextmanager
def without_quantizers(model: nn.Module) -> Iterator[nn.Module]:
    """Switch every quantizer of a model off until the block ends."""
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


# Put quantizers at the sites of a plan, and take them away again.


def _install_(model: nn.Module, plan: Plan, options: QuantizeOptions) -> None:
    """Quantize every layer of the plan in place; quantizers of an earlier plan are replaced and give theirs on."""
    kept: dict[str, Quantizers] = {}
    if hasattr(model, PLAN):
        kept = _strip_(model)
    else:
        save_once_(model)
    sites = find_sites(model, quantized_layers(plan), plan.uses)
    factory = QuantizerFactory(options, kept, device_of(model))
    _install_layers_(sites, plan, factory)
    if options.integer:
        assert plan.integers is not None
        install_integers_(model, plan.integers, sites, factory)
    without_softmax = {id(site.owner) for site in sites.values() if not site.softmax}
    for owner in [module for module in model.modules() if isinstance(module, CallOwner)]:
        _finish_products_(owner, factory, softmax=id(owner) not in without_softmax)
    _close_shortcuts_(model)
    for module in model.modules():
        for added in _ADDED & module._modules.keys():
            module.get_submodule(added).train(module.training)


def _install_layers_(sites: Mapping[str, Site], plan: Plan, factory: QuantizerFactory) -> None:
    """Give every layer its quantizers; linked layers share that of their input."""
    leaders = {name: link[0] for link in plan.links for name in link}
    shared: dict[str, nn.Module] = {}
    for layer, site in sites.items():
        precision = plan.precisions[layer]
        if site.kind == "product":
            _install_product_(site, precision, factory)
            continue
        leader = leaders.get(layer, layer)
        if leader not in shared:
            members = [name for name in plan.precisions if leaders.get(name, name) == leader]
            shared[leader] = factory.inputs(leader, precision.act_bits, members)
        _install_weighted_(site, precision, shared[leader], factory)


def _strip_(model: nn.Module) -> dict[str, Quantizers]:
    """Undo a quantization in place, and return the quantizers that each layer had."""
    kept = quantizers_of(model)
    kept |= {name: Quantizers(None, operands_of(call)) for name, call in additions_of(model).items()}
    for norm in [module for module in model.modules() if isinstance(module, NormLayer)]:
        release_norm_(norm)
    for module in list(model.modules()):
        if isinstance(module, Adopted):
            release_(module)
            for name in (WEIGHT_QUANTIZER, INPUT_QUANTIZER, BORROWED):
                module._modules.pop(name, None)
                vars(module).pop(name, None)
        module._modules.pop(CALL_QUANTIZERS, None)  # also beside a weight that only others use
    return kept


def _install_weighted_(site: Site, precision: Precision, inputs: nn.Module, factory: QuantizerFactory) -> None:
    assert site.parameter is not None
    weight = factory.weight(site, precision.weight_bits)
    if not any(place.reads for place in site.places):
        inputs = nn.Identity()
    if isinstance(weight, nn.Identity) and isinstance(inputs, nn.Identity):
        return
    call = WeightedCall(weight, inputs, site.module, split_name(site.parameter)[1], computed=site.computed)
    if site.kind == "call":
        calls_of(site.owner)[site.key] = call
    for place in site.places:
        if place.own:
            _adopt_with_(place, weight, inputs, registered=site.kind == "module" and place.module is site.owner)
        else:
            _let_call_(place.module, call)


def _adopt_with_(place: Place, weight: nn.Module, inputs: nn.Module, *, registered: bool) -> None:
    """Let a module's counterpart run with these quantizers; a module with several weights comes here for each.

    Those that another module has registered, to whose weight its own is tied, are only referred to.
    """
    module, layer_type = place.module, quantized_as(place.module, place.own)
    assert layer_type is not None
    assert layer_type.quantized is not None
    if not isinstance(module, layer_type.quantized):
        adopt_(module, layer_type.quantized)
        parameters = [name for name, _ in module.named_parameters(recurse=False) if layer_type.holds(name)]
        for name in parameters:  # until their turn comes, and where the plan leaves them alone, nothing is done to them
            if name != OWN_WEIGHT:
                calls_of(module)[layer_of(name)] = WeightedCall(nn.Identity(), nn.Identity(), module, name)
    if place.own != OWN_WEIGHT:
        calls_of(module)[layer_of(place.own)] = WeightedCall(weight, inputs, module, place.own)
    elif registered:
        module.weight_quantizer, module.input_quantizer = weight, inputs
    else:
        vars(module).update({WEIGHT_QUANTIZER: weight, INPUT_QUANTIZER: inputs})


def _let_call_(module: nn.Module, call: WeightedCall) -> None:
    """Let a module quantize this call, which may be kept by another."""
    calls = intercept_calls_(module)
    if call not in calls.values():
        vars(module).setdefault(BORROWED, []).append(call)


def _install_product_(site: Site, precision: Precision, factory: QuantizerFactory) -> None:
    if not precision.quantizes_inputs:
        return
    is_attention = function_of(site.key) == ATTENTION
    kept = factory.kept.get(site.layer, NONE).inputs
    made: dict[str, InputQuantizer] = {}
    for place, name in enumerate(_ATTENTION_INPUTS if is_attention else _PRODUCT_INPUTS):
        before = kept[place] if place < len(kept) else None
        is_scores = name == "scores"  # what the softmax reads, masks among it
        bits = _SOFTMAX_BITS if is_scores else precision.act_bits
        made[name] = factory.activation(site.layer, bits, before, masked=is_scores)
    call = AttentionCall(made) if is_attention else ProductCall(made["left"], made["right"])
    intercept_calls_(site.owner)[site.key] = call


def _finish_products_(owner: CallOwner, factory: QuantizerFactory, *, softmax: bool) -> None:
    """Add the quantizer of a softmax between two products, and set the modules inside apart."""
    products = [site for site in owner.call_quantizers.values() if isinstance(site, ProductCall)]
    if len(products) > 1 and softmax:
        layer = products[0].left.name
        kept = factory.kept.get(layer, NONE).inputs  # left, right, and perhaps that of a softmax
        before = kept[2] if len(kept) > 2 else None
        products[0].softmax = factory.activation(layer, _SOFTMAX_BITS, before, masked=True)
    exclude_inner_modules_(owner)


def _close_shortcuts_(model: nn.Module) -> None:
    """Make torch's encoder layers call their parts in inference too, where a fused routine bypasses them."""
    for module in list(model.modules()):
        if isinstance(module, _SHORTCUTS) and any(isinstance(part, Adopted) for part in module.modules()):
            intercept_calls_(module)
