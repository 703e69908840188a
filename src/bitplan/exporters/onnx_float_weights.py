"""Keep float weights float in ONNX Runtime, which rounds those of layers with quantized inputs to 8 bits as it loads.

Its optimizer (WeightBiasQuantization) takes any Conv, ConvTranspose or Gemm that reads a DequantizeLinear. What reads
something else is left alone, also where that changes no value.
"""

from __future__ import annotations

import numpy as np

from bitplan.exporters.onnx_graph import Draft, Node

_TAKEN = ("Conv", "ConvTranspose", "Gemm")


def keep_float_weights_(draft: Draft) -> None:
    """Put the larger of an input and the lowest number there is, which is the input, before float weights."""
    makers = draft.makers()

    def rewrite(node: Node) -> list[Node]:
        maker = makers.get(node.input[0])
        if node.op_type not in _TAKEN or maker is None or maker.op_type != "DequantizeLinear":
            return [node]
        weight = draft.array(node.input[1])
        if weight is None or weight.dtype != np.float32:
            return [node]
        lowest = draft.floats("lowest", np.finfo(np.float32).min)
        read, node.input[0] = node.input[0], draft.fresh(f"{node.name}.inputs")
        return [draft.node("Max", (read, lowest), node.input[0], f"{node.name}.unchanged"), node]

    draft.rebuild(rewrite)
