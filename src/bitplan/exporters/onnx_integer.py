"""The form of an ONNX file that integer kernels execute: packed weights cast to bytes, activations quantized to bytes.

No runtime multiplies integers of 2 or 4 bits, all multiply bytes. A weight is stored as INT2 or INT4 and cast to INT8,
once, as the file is loaded; the codes of an activation are bytes, clipped to the range of their bits. Codes and values
stay those of the model. Activations of more than 8 bits have no kernel and keep the other form (`onnx_pairs.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitplan.core.codes import code_bits
from bitplan.exporters.onnx_graph import Draft, Node
from bitplan.exporters.onnx_pairs import CLIP, DEQUANTIZE, QUANTIZE, quantized_in_pairs

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
