"""What a file of QuantizeLinear and DequantizeLinear says, in either form: precisions and codes, checked."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bitplan.adapters.onnx import onnx
from bitplan.core.codes import code_bits
from bitplan.core.errors import FileError
from bitplan.core.naming import INPUT_QUANTIZER, layer_of_quantizer
from bitplan.core.records import Plan
from bitplan.exporters.base import ReadBack
from bitplan.exporters.onnx_graph import Draft, Node, is_ours, reading_plan, type_number, width_of
from bitplan.exporters.onnx_weights import storage, stored_codes, varying_axes

# --- What a file of QuantizeLinear and DequantizeLinear says, in either form: precisions and codes, checked.


def read_back(path: Path) -> ReadBack:
    """The plan in a file, after checking the graph against it, and the codes."""
    with reading_plan(path) as (proto, plan):
        codes = stored_codes(proto, plan, path)
        for quantizer, bits in _input_bits(proto).items():
            _check_bits(path, plan, quantizer, bits)
    return ReadBack(plan.precisions, codes)


def _check_bits(path: Path, plan: Plan, quantizer: str, bits: int) -> None:
    if not quantizer.endswith(f".{INPUT_QUANTIZER}"):  # one of a product's, whose scores have bits of their own
        return
    layer = layer_of_quantizer(quantizer)
    precision = plan.precisions.get(layer) if layer else None
    if precision is not None and bits != precision.act_bits:
        raise FileError(f"{path}: the input of {layer!r} has {bits} bits, the plan says {precision}")


def _input_bits(proto: Any) -> dict[str, int]:
    """The bits of each input quantizer by its path: of the range that it is clipped to, or of its type."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    nodes = {node.name: node for node in proto.graph.node}
    makers = {output: node for node in proto.graph.node for output in node.output}

    def number(name: str) -> float:
        return float(onnx().numpy_helper.to_array(tensors[name]))

    def width(node: Node) -> int:
        types = [attribute.i for attribute in node.attribute if attribute.name == "output_dtype"]
        return width_of(types[0] if types else tensors[node.input[2]].data_type)

    bits: dict[str, int] = {}
    for node in proto.graph.node:
        if node.op_type == "Mul" and node.name.endswith(DEQUANTIZE):  # of codes that are floats
            path = node.name.removesuffix(DEQUANTIZE)
            _, least, most = nodes[f"{path}{CLIP}"].input
            bits[path] = code_bits(0, round(number(most) - number(least)))
        if node.op_type != "QuantizeLinear" or not node.name.endswith(QUANTIZE):
            continue
        path = node.name.removesuffix(QUANTIZE)
        clip = nodes.get(f"{path}{CLIP}")
        if clip is None:
            bits[path] = width(node)
        elif clip.op_type == "Clip":  # of codes
            _, least, most = map(str, clip.input)
            bits[path] = code_bits(0, round(number(most) - number(least)))
        else:  # the second of Max and Min, which clip values
            raised, most = clip.input
            least, step = makers[raised].input[1], number(node.input[1])
            bits[path] = code_bits(0, round(number(most) / step - number(least) / step))
    return bits


# --- Which quantized layers a runtime multiplies in floats, and why: said as the file is written, by their names.

_log = logging.getLogger(__name__)
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_NAMED = 3  # layers per line
_BIAS = "a bias is no multiple of both steps (quantize(…, integer=True) makes it one; OpenVINO takes any)"


def name_float_products(draft: Draft, runtime: str, *, lacking: Collection[str], between: Collection[str] = ()) -> None:
    """Say which layers the runtime multiplies in floats, one line per reason.

    `lacking` are the operators that it has no integer kernel for, `between` layers whose bias it would round.
    """
    reasons: dict[str, list[str]] = {}
    for layer, why in [*((layer, _BIAS) for layer in between), *_others(draft, lacking)]:
        reasons.setdefault(why, []).append(layer)
    for why, layers in reasons.items():
        more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
        _log.warning("%s multiplies %s%s in floats: %s", runtime, ", ".join(layers[:_NAMED]), more, why)


def _others(draft: Draft, lacking: Collection[str]) -> Iterator[tuple[str, str]]:
    makers = draft.makers()
    for node in draft.graph.node:
        if node.op_type not in _PRODUCTS:
            continue
        layer = _layer_of(draft, node, makers)
        if layer is None:
            continue
        weight, bits = draft.weights[layer], _bits_of_input(draft, _maker(node.input[0], makers))
        if node.op_type in lacking:
            yield layer, f"it has no integer kernel for {node.op_type}"
        elif bits is None:
            yield layer, "the input is not quantized"
        elif bits > 8 or weight.bits > 8:
            yield layer, "integer kernels take 8 bits"
        elif len(varying_axes(weight)) > 1:
            yield layer, "the steps vary along two axes"


def _layer_of(draft: Draft, node: Node, makers: dict[str, Node]) -> str | None:
    """The layer whose weight a node multiplies by."""
    maker = _maker(node.input[1], makers)
    return draft.attributes(maker)["layer"] if maker is not None and is_ours(maker, "Weight") else None


def _maker(value: str, makers: dict[str, Node]) -> Node | None:
    """What makes a value, as it is or transposed."""
    maker = makers.get(value)
    return makers.get(maker.input[0]) if maker is not None and maker.op_type == "Transpose" else maker


def _bits_of_input(draft: Draft, maker: Node | None) -> int | None:
    if maker is None or not is_ours(maker, "Quantize"):
        return None
    about = draft.attributes(maker)
    return code_bits(about["low"], about["high"])


# --- The form of an ONNX file that integer kernels execute: packed weights cast to bytes, activations quantized to
# bytes.

_MIDDLE = 128


def quantize_in_bytes_(draft: Draft, widths: tuple[int, ...], *, unsigned: bool) -> None:
    """Make bytes of every quantized activation of at most 8 bits.

    `unsigned` writes signed codes as UINT8 around a zero point of 128: ONNX Runtime's fast kernels take those only,
    OpenVINO's take INT8 and for products of two activations nothing else.
    """

    def rewrite(node: Node, about: dict[str, Any]) -> list[Node]:
        if code_bits(about["low"], about["high"]) > 8:
            return quantized_in_pairs(draft, node, about, widths)
        return _in_bytes(draft, node, about, unsigned=unsigned)

    draft.replace("Quantize", rewrite)


def _in_bytes(draft: Draft, node: Node, about: Mapping[str, Any], *, unsigned: bool) -> list[Node]:
    low, high = about["low"], about["high"]
    path = draft.fresh(about["path"])  # a layer may run twice
    middle = _MIDDLE if low < 0 and unsigned else 0
    kind = np.int8 if low < 0 and not unsigned else np.uint8
    scale, zero = draft.floats(f"{path}.step", about["scale"]), draft.constant(f"{path}.zero", kind(middle))
    codes = draft.fresh(f"{path}.codes")
    nodes = [draft.node("QuantizeLinear", (node.input[0], scale, zero), codes, f"{path}{QUANTIZE}")]
    if code_bits(low, high) < 8:
        least, most = (draft.constant(f"{path}.{end}", kind(at + middle)) for end, at in (("low", low), ("high", high)))
        clipped = draft.fresh(f"{path}.clipped")
        nodes.append(draft.node("Clip", (codes, least, most), clipped, f"{path}{CLIP}"))
        codes = clipped
    return [*nodes, draft.node("DequantizeLinear", (codes, scale, zero), node.output[0], f"{path}{DEQUANTIZE}")]


def clip_codes_(draft: Draft, *, idle_only: bool = False) -> None:
    """Clip codes in the place of values where the model clips (a ReLU6) just before it quantizes.

    code(clip(v, a, b)) = clip(code(v), code(a), code(b)), for codes rise with values; see `pool_codes_` for the reason.
    `idle_only` takes out no more than Clips that no code notices.
    """
    limits: dict[str, tuple[Any, Any]] = {}  # QuantizeLinear by name → the lowest and the highest code
    for clip in [node for node in draft.graph.node if node.op_type == "Clip"]:
        readers, ends = draft.readers(clip.output[0]), _ends(draft, clip)
        if ends is None or not readers or draft.is_output(clip.output[0]) or not all(map(_gives_bytes, readers)):
            continue
        found = {node.name: (_code_of(draft, node, ends[0]), _code_of(draft, node, ends[1])) for node in readers}
        noticed = {name: codes for name, codes in found.items() if not _is_whole_range(*codes)}
        if noticed and idle_only:
            continue
        limits |= noticed
        for quantize in readers:
            quantize.input[0] = clip.input[0]

    def rewrite(node: Node) -> list[Node]:
        if node.name not in limits:
            return [node]
        path, codes = node.name.removesuffix(QUANTIZE), node.output[0]
        ends = [
            draft.constant(f"{path}.{end}", at) for end, at in zip(("least", "most"), limits[node.name], strict=True)
        ]
        node.output[0] = draft.fresh(f"{codes}.unlimited")
        return [node, draft.node("Clip", (node.output[0], *ends), codes, f"{node.name}.limit")]

    draft.rebuild(rewrite)


def _gives_bytes(node: Node) -> bool:
    return bool(node.op_type == "QuantizeLinear" and node.name.endswith(QUANTIZE) and len(node.input) == 3)


def _is_whole_range(least: Any, most: Any) -> bool:
    bounds = np.iinfo(least.dtype)
    return bool(least == bounds.min and most == bounds.max)


def _ends(draft: Draft, clip: Node) -> tuple[float, float] | None:
    """Between what a Clip keeps values; None where that is computed."""
    ends = [-np.inf, np.inf]
    for place, name in enumerate(clip.input[1:]):
        if name:
            found = draft.array(name)
            if found is None:
                return None
            ends[place] = float(found)
    return ends[0], ends[1]


def _code_of(draft: Draft, quantize: Node, value: float) -> Any:
    """The code that a QuantizeLinear gives a number, in its type."""
    step, zero = draft.array(quantize.input[1]), draft.array(quantize.input[2])
    assert step is not None
    assert zero is not None
    bounds = np.iinfo(zero.dtype)
    return zero.dtype.type(np.clip(np.rint(np.float32(value) / step) + int(zero), bounds.min, bounds.max))


def pool_codes_(draft: Draft) -> None:
    """Quantize before a MaxPool, not after it, and pool codes: the largest value has the largest code.

    ONNX Runtime computes a convolution in integers only where a quantizer follows it.
    """
    pools: dict[str, Node] = {}  # the DequantizeLinear that each is moved to, by name
    for pool in [node for node in draft.graph.node if node.op_type == "MaxPool" and len(node.output) == 1]:
        readers = draft.readers(pool.output[0])
        if len(readers) != 1 or not _gives_bytes(readers[0]) or draft.is_output(pool.output[0]):
            continue
        quantize = readers[0]
        last = _last_codes(draft, quantize)
        dequantize = draft.readers(last)[0]
        quantize.input[0] = pool.input[0]
        pool.input[0], pool.output[0] = last, draft.fresh(f"{last}.pooled")
        dequantize.input[0] = pool.output[0]
        pools[dequantize.name] = pool

    moved = {pool.name for pool in pools.values()}
    kept = {name: _copy(pool) for name, pool in pools.items()}
    draft.rebuild(lambda node: [] if node.name in moved else [kept[node.name], node] if node.name in kept else [node])


def _copy(node: Node) -> Node:
    copied = type(node)()
    copied.CopyFrom(node)
    return copied


def _last_codes(draft: Draft, quantize: Node) -> str:
    """The value that holds an activation's codes after all clipping."""
    codes = quantize.output[0]
    while (reader := draft.readers(codes)[0]).op_type == "Clip":
        codes = reader.output[0]
    return str(codes)


# --- The form of an ONNX file that keeps the narrow types: each activation in the integer type that its bits name.

QUANTIZE, CLIP, DEQUANTIZE = ".quantize", ".clip", ".dequantize"
"""End the names of an input quantizer's nodes, which begin with its path."""


def quantize_in_pairs_(draft: Draft, widths: tuple[int, ...]) -> None:
    """Put QuantizeLinear and DequantizeLinear in the place of every input quantizer."""
    beside = _beside_bytes(draft)
    wider = tuple(width for width in widths if width > 2)

    def rewrite(node: Node, about: dict[str, Any]) -> list[Node]:
        return quantized_in_pairs(draft, node, about, wider if node.output[0] in beside else widths)

    draft.replace("Quantize", rewrite)


def _beside_bytes(draft: Draft) -> set[str]:
    """What is multiplied by a matrix of bytes: of 2 bits ONNX Runtime 1.31 then makes an operation that it lacks."""
    types = {tensor.name: tensor.data_type for tensor in draft.graph.initializer}
    makers = draft.makers()
    found = set()
    for node in draft.graph.node:
        weight = makers.get(node.input[1]) if node.op_type == "MatMul" else None
        if weight is not None and weight.op_type == "Transpose":
            weight = makers.get(weight.input[0])
        if (
            weight is not None
            and weight.op_type == "DequantizeLinear"
            and types[weight.input[0]] == type_number("INT8")
        ):
            found.add(node.input[0])
    return found


def quantized_in_pairs(draft: Draft, node: Node, about: Mapping[str, Any], widths: tuple[int, ...]) -> list[Node]:
    """QuantizeLinear and DequantizeLinear in the place of an input quantizer, clipped first where the type is wider."""
    low, high, step = about["low"], about["high"], torch.tensor(about["scale"])
    bits = code_bits(low, high)
    width = storage(bits, widths, about["path"])
    path = draft.fresh(about["path"])  # a layer may run twice
    value = node.input[0]
    scale = draft.floats(f"{path}.step", step)
    clips: list[Node] = []
    if width != bits:
        clips = _clipped(draft, value, step * low, step * high, path)
        value = clips[-1].output[0]
    signed = low < 0
    number = type_number(f"INT{width}" if signed else f"UINT{width}")
    codes = draft.fresh(f"{path}.codes")
    return [
        *clips,
        draft.node("QuantizeLinear", (value, scale), codes, f"{path}{QUANTIZE}", output_dtype=number),
        draft.node("DequantizeLinear", (codes, scale), node.output[0], f"{path}{DEQUANTIZE}"),
    ]


def _clipped(draft: Draft, value: str, low: Tensor, high: Tensor, path: str) -> list[Node]:
    """Max and Min that keep a value within the range of a quantizer."""
    least, most = draft.floats(f"{path}.low", low), draft.floats(f"{path}.high", high)
    raised, clipped = draft.fresh(f"{path}.raised"), draft.fresh(f"{path}.clipped")
    return [
        draft.node("Max", (value, least), raised, f"{path}.raise"),
        draft.node("Min", (raised, most), clipped, f"{path}{CLIP}"),
    ]


def open_clips_(draft: Draft) -> None:
    """Write the model's own Clip (a ReLU6) as Max and Min where it comes before a narrow type."""
    quantizes = [(node, draft.attributes(node)) for node in draft.graph.node if node.op_type == "QuantizeLinear"]
    typed = [(node.input[0], about["output_dtype"]) for node, about in quantizes if "output_dtype" in about]
    narrow = {value for value, number in typed if width_of(number) != 8}

    def rewrite(node: Node) -> list[Node]:
        if node.op_type != "Clip" or node.output[0] not in narrow:
            return [node]
        value, *bounds = node.input
        given = [(kind, bound) for kind, bound in zip(("Max", "Min"), bounds, strict=False) if bound]  # "": no bound
        nodes = []
        for place, (kind, bound) in enumerate(given):
            is_last = place == len(given) - 1
            output = node.output[0] if is_last else draft.fresh(f"{node.name}.{kind}")
            nodes.append(draft.node(kind, (value, bound), output, f"{node.name}.{kind}"))
            value = output
        return nodes

    draft.rebuild(rewrite)
