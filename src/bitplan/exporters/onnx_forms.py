"""The two forms of quantized activations in ONNX: bytes for integer kernels, and types of their own bits.

Both are QuantizeLinear and DequantizeLinear. This file writes them, reads them back, and warns about layers that a
runtime multiplies in floats.
"""

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
from bitplan.exporters.onnx_weights import read_stored_codes, storage_width, varying_axes


def read_back(path: Path) -> ReadBack:
    """Return the plan in a file, after checking the graph against it, and the codes."""
    with reading_plan(path) as (proto, plan):
        codes = read_stored_codes(proto, plan, path)
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
    """Return the bits of each input quantizer by its path: those of its clipped range, or of its type."""
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


_log = logging.getLogger(__name__)
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_NAMED = 3  # layers per line
_BIAS = "a bias is no multiple of both steps (quantize(…, integer=True) makes it one; OpenVINO takes any)"


def name_float_products(draft: Draft, runtime: str, *, lacking: Collection[str], between: Collection[str] = ()) -> None:
    """Warn about the layers that the runtime multiplies in floats, one line per reason.

    `lacking` are the operators without an integer kernel, `between` the layers whose bias it would round.
    """
    reasons: dict[str, list[str]] = {}
    for layer, why in [*((layer, _BIAS) for layer in between), *_float_products(draft, lacking)]:
        reasons.setdefault(why, []).append(layer)
    for why, layers in reasons.items():
        more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
        _log.warning("%s multiplies %s%s in floats: %s", runtime, ", ".join(layers[:_NAMED]), more, why)


def _float_products(draft: Draft, lacking: Collection[str]) -> Iterator[tuple[str, str]]:
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
    """Return the layer whose weight a node multiplies by, or None."""
    maker = _maker(node.input[1], makers)
    return draft.attributes(maker)["layer"] if maker is not None and is_ours(maker, "Weight") else None


def _maker(value: str, makers: dict[str, Node]) -> Node | None:
    """Return the node that makes a value, before a transposition."""
    maker = makers.get(value)
    return makers.get(maker.input[0]) if maker is not None and maker.op_type == "Transpose" else maker


def _bits_of_input(draft: Draft, maker: Node | None) -> int | None:
    if maker is None or not is_ours(maker, "Quantize"):
        return None
    about = draft.attributes(maker)
    return code_bits(about["low"], about["high"])


_MIDDLE = 128


def quantize_in_bytes_(draft: Draft, widths: tuple[int, ...], *, unsigned: bool) -> None:
    """Quantize every activation of at most 8 bits to bytes.

    `unsigned` writes signed codes as UINT8 around a zero point of 128, which ONNX Runtime's fast kernels need.
    OpenVINO's take INT8, and for products of two activations nothing else.
    """

    def rewrite(node: Node, about: dict[str, Any]) -> list[Node]:
        if code_bits(about["low"], about["high"]) > 8:
            return _quantize_to_narrow(draft, node, about, widths)
        return _quantize_to_bytes(draft, node, about, unsigned=unsigned)

    draft.replace("Quantize", rewrite)


def _quantize_to_bytes(draft: Draft, node: Node, about: Mapping[str, Any], *, unsigned: bool) -> list[Node]:
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
    """Move a Clip (a ReLU6) that stands before a quantizer behind it: clip codes, not values.

    code(clip(v, a, b)) = clip(code(v), code(a), code(b)), because codes rise with values. `pool_codes_` says why.
    `idle_only` only removes Clips that change no code.
    """
    limits: dict[str, tuple[Any, Any]] = {}  # QuantizeLinear by name → the lowest and the highest code
    for clip in [node for node in draft.graph.node if node.op_type == "Clip"]:
        readers, ends = draft.readers(clip.output[0]), _ends(draft, clip)
        if ends is None or not readers or draft.is_output(clip.output[0]) or not all(map(_gives_bytes, readers)):
            continue
        clipped = {node.name: (_code_of(draft, node, ends[0]), _code_of(draft, node, ends[1])) for node in readers}
        effective = {name: codes for name, codes in clipped.items() if not _is_whole_range(*codes)}
        if effective and idle_only:
            continue
        limits |= effective
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
    """Return the bounds of a Clip, or None if they are computed."""
    ends = [-np.inf, np.inf]
    for place, name in enumerate(clip.input[1:]):
        if name:
            bound = draft.array(name)
            if bound is None:
                return None
            ends[place] = float(bound)
    return ends[0], ends[1]


def _code_of(draft: Draft, quantize: Node, value: float) -> Any:
    """Return the code that a QuantizeLinear gives a number, in its type."""
    step, zero = draft.array(quantize.input[1]), draft.array(quantize.input[2])
    assert step is not None
    assert zero is not None
    bounds = np.iinfo(zero.dtype)
    return zero.dtype.type(np.clip(np.rint(np.float32(value) / step) + int(zero), bounds.min, bounds.max))


def pool_codes_(draft: Draft) -> None:
    """Quantize before a MaxPool, not after it: the largest value has the largest code.

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
    """Return the value that holds an activation's codes after all clipping."""
    codes = quantize.output[0]
    while (reader := draft.readers(codes)[0]).op_type == "Clip":
        codes = reader.output[0]
    return str(codes)


QUANTIZE, CLIP, DEQUANTIZE = ".quantize", ".clip", ".dequantize"
"""End the names of an input quantizer's nodes, which begin with its path."""


def quantize_in_pairs_(draft: Draft, widths: tuple[int, ...]) -> None:
    """Replace every input quantizer by QuantizeLinear and DequantizeLinear."""
    beside = _multiplied_by_bytes(draft)
    wider = tuple(width for width in widths if width > 2)

    def rewrite(node: Node, about: dict[str, Any]) -> list[Node]:
        return _quantize_to_narrow(draft, node, about, wider if node.output[0] in beside else widths)

    draft.replace("Quantize", rewrite)


def _multiplied_by_bytes(draft: Draft) -> set[str]:
    """Return the values that are multiplied by a matrix of bytes: ONNX Runtime 1.31 cannot run these at 2 bits."""
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


def _quantize_to_narrow(draft: Draft, node: Node, about: Mapping[str, Any], widths: tuple[int, ...]) -> list[Node]:
    """Return QuantizeLinear and DequantizeLinear for an input quantizer, after a clip if the type is wider."""
    low, high, step = about["low"], about["high"], torch.tensor(about["scale"])
    bits = code_bits(low, high)
    width = storage_width(bits, widths, about["path"])
    path = draft.fresh(about["path"])  # a layer may run twice
    value = node.input[0]
    scale = draft.floats(f"{path}.step", step)
    clips: list[Node] = []
    if width != bits:
        clips = _clip(draft, value, step * low, step * high, path)
        value = clips[-1].output[0]
    signed = low < 0
    number = type_number(f"INT{width}" if signed else f"UINT{width}")
    codes = draft.fresh(f"{path}.codes")
    return [
        *clips,
        draft.node("QuantizeLinear", (value, scale), codes, f"{path}{QUANTIZE}", output_dtype=number),
        draft.node("DequantizeLinear", (codes, scale), node.output[0], f"{path}{DEQUANTIZE}"),
    ]


def _clip(draft: Draft, value: str, low: Tensor, high: Tensor, path: str) -> list[Node]:
    """Return Max and Min that keep a value within the range of a quantizer."""
    least, most = draft.floats(f"{path}.low", low), draft.floats(f"{path}.high", high)
    raised, clipped = draft.fresh(f"{path}.raised"), draft.fresh(f"{path}.clipped")
    return [
        draft.node("Max", (value, least), raised, f"{path}.raise"),
        draft.node("Min", (raised, most), clipped, f"{path}{CLIP}"),
    ]


def open_clips_(draft: Draft) -> None:
    """Write the model's own Clip (a ReLU6) before a narrow type as Max and Min."""
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
