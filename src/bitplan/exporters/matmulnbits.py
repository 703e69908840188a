"""matmulnbits: ONNX Runtime's own product with weights of 2, 4 or 8 bits, for linear layers; activations stay float.

Stored is code + 2^(bits−1), the zero point that `MatMulNBits` assumes; one scale per block of inputs, all of a row's
equal to LSQ's step. What is no linear layer keeps its codes behind DequantizeLinear.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitplan.adapters.onnx import onnx
from bitplan.adapters.onnxruntime import Session
from bitplan.core.errors import InputError
from bitplan.core.precision import Precision
from bitplan.exporters.base import Execution, Exporter, ReadBack, Source
from bitplan.exporters.bits import pack, unpack
from bitplan.exporters.onnx_graph import Draft, Node, Weight, dialect_of, is_ours, reading_plan
from bitplan.exporters.onnx_running import Executed
from bitplan.exporters.onnx_weights import check_range, dequantize_weights_, storage, stored_codes

_log = logging.getLogger(__name__)
_NAME = "matmulnbits"
_OPSET = 21  # runtimes that have the operator know it
_WIDTHS = (2, 4, 8)
_OTHER_WIDTHS = (4, 8, 16)  # of the codes behind DequantizeLinear, as far as this opset stores them
_FASTEST = {2: 128, 4: 256, 8: 256}  # bits → inputs per block, measured on AVX-512; 2 bits in 256 are very slow
BLOCKS = ".blocks"
_TURNED = ".inputs_first"  # ends the name of a product whose weight the model has as (in, out)


@final
@dataclass(frozen=True)
class MatMulNBits(Exporter):
    """ONNX for transformers, weights only: smaller and faster in ONNX Runtime; `widen` leaves planned inputs float.

    `block_size` 0 takes the fastest for the bits of each layer: all blocks of a row share one step, so none loses.
    `accuracy_level` 4 lets the runtime round activations to 8 bits inside a block: faster, no longer our numbers.
    """

    block_size: int = 0
    accuracy_level: int = 0
    widen: bool = False
    needs_model: ClassVar[bool] = True
    suffix: ClassVar[str] = ".onnx"

    def __post_init__(self) -> None:
        if self.block_size and (self.block_size < 16 or self.block_size & (self.block_size - 1)):
            raise InputError(f"a block is 16, 32, 64, 128 … inputs, or 0 for the fastest, not {self.block_size}")
        if self.accuracy_level not in range(5):
            raise InputError(f"the accuracy level is 0 (the runtime's own) to 4 (8-bit), not {self.accuracy_level}")

    def write(self, source: Source, path: Path) -> None:
        """Capture the graph and put the operator in the place of every product with a quantized weight."""
        self._check_inputs(source)
        draft = Draft(source, _OPSET)
        draft.leave_inputs_float_()
        self._multiply_by_codes_(draft)
        dequantize_weights_(draft, _OTHER_WIDTHS)
        draft.save(source, path, exporter=_NAME)

    def _check_inputs(self, source: Source) -> None:
        """Refuse a plan that quantizes inputs, or say that they stay float."""
        planned = [name for name, precision in source.plan.precisions.items() if precision.quantizes_inputs]
        if not planned:
            return
        if not self.widen:
            more = f" and {len(planned) - 1} more" if len(planned) > 1 else ""
            raise InputError(
                f"matmulnbits keeps activations in float, but the plan quantizes the input of {planned[0]!r}{more}: "
                "choose w…a16, or give --widen (widen=True) to leave them float"
            )
        _log.warning("the inputs of %d layers stay float, where the plan quantizes them", len(planned))

    def read(self, path: Path) -> ReadBack:
        """The plan in the file, whose inputs are all float there, and the codes of both kinds of layers."""
        with reading_plan(path) as (proto, plan):
            codes = stored_codes(proto, plan, path)
            tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
            products = [node for node in proto.graph.node if node.op_type == "MatMulNBits"]
            for node in products:
                blocks = node.input[1]
                layer = blocks.removesuffix(BLOCKS)
                if layer in plan.precisions and layer not in codes:
                    codes[layer] = _codes_of(node, tensors[blocks])
                    check_range(codes[layer], layer, plan.precisions[layer], path)
        held = {layer: Precision.weights_only(planned.weight_bits) for layer, planned in plan.precisions.items()}
        in_order = {layer: codes[layer] for layer in plan.precisions if layer in codes}
        return ReadBack(held, in_order)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """An ONNX file that says so, or that says nothing and has the operator."""
        dialect = dialect_of(path)
        return dialect is not None and dialect.is_for(_NAME, otherwise="MatMulNBits" in dialect.operators)

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """By ONNX Runtime; its activations are float, so no difference can begin at a tie."""
        return Execution(Executed(Session(path)), float_inputs=True, runtime=Session)

    def _multiply_by_codes_(self, draft: Draft) -> None:
        """Put the operator in the place of MatMul and Gemm; a weight that several of them read is stored once."""
        markers, turned = _weights_by_value(draft)
        stored: dict[tuple[str, bool], tuple[str, str]] = {}  # layer, rows_first → the names of codes and scales

        def rewrite(node: Node) -> list[Node]:
            weight, rows_first = _factor(draft, node, markers, turned)
            if weight is None:
                return [node]
            key = (weight.layer, rows_first)
            if key not in stored:
                stored[key] = self._store(draft, weight, rows_first)
            inputs = [node.input[0], *stored[key]]
            if len(node.input) > 2 and node.input[2]:  # a bias; zero points and an order of groups come before it
                inputs += ["", "", node.input[2]]
            name = node.name if rows_first else f"{node.name}{_TURNED}"
            about = self._attributes(weight, rows_first)
            return [draft.node("MatMulNBits", inputs, node.output[0], name, domain="com.microsoft", **about)]

        draft.rebuild(rewrite)

    def _block(self, weight: Weight, inputs: int) -> int:
        """The block size that was asked for, or the fastest: no larger than the inputs fill, or padding would count."""
        if self.block_size:
            return self.block_size
        largest = _FASTEST[storage(weight.bits, _WIDTHS, weight.layer)]
        return next((size for size in (256, 128, 64) if size <= largest and inputs % size == 0), 32)

    def _attributes(self, weight: Weight, rows_first: bool) -> dict[str, int]:
        """The operator's attributes: N outputs, K inputs."""
        outputs, inputs = weight.codes.shape if rows_first else weight.codes.t().shape
        return {
            "N": outputs,
            "K": inputs,
            "bits": storage(weight.bits, _WIDTHS, weight.layer),
            "block_size": self._block(weight, inputs),
            "accuracy_level": self.accuracy_level,
        }

    def _store(self, draft: Draft, weight: Weight, rows_first: bool) -> tuple[str, str]:
        """Codes (N, blocks, bytes) and scales (N, blocks); inputs that fill up the last block have code 0."""
        codes = weight.codes if rows_first else weight.codes.t()
        steps = weight.steps if rows_first or weight.steps.dim() < 2 else weight.steps.t()
        rows, inputs = codes.shape
        block = self._block(weight, inputs)
        blocks = -(-inputs // block)
        bits = storage(weight.bits, _WIDTHS, weight.layer)
        filled = F.pad(codes.contiguous(), (0, blocks * block - inputs))
        shape = (rows, blocks, block * bits // 8)
        name = draft.raw(weight.layer + BLOCKS, "UINT8", shape, pack(filled, bits).numpy().tobytes())
        scales = np.broadcast_to(steps.reshape(-1, 1).numpy(), (rows, blocks))
        return name, draft.floats(f"{weight.layer}.step", scales)


def _weights_by_value(draft: Draft) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """The weights by the values that hold them, as they are stored and as transposed matrices."""
    markers = [node for node in draft.graph.node if is_ours(node, "Weight")]
    stored = {node.output[0]: draft.weights[draft.attributes(node)["layer"]] for node in markers}
    turned: dict[str, Weight] = {}
    for node in draft.graph.node:
        if node.op_type != "Transpose" or node.input[0] not in stored:
            continue
        if list(draft.attributes(node)["perm"]) == [1, 0]:
            turned[node.output[0]] = stored[node.input[0]]
    return stored, turned


def _factor(
    draft: Draft, node: Node, markers: dict[str, Weight], turned: dict[str, Weight]
) -> tuple[Weight | None, bool]:
    """The weight that a node multiplies by, and whether its rows are outputs; None where the operator cannot do it."""
    if node.op_type == "MatMul":
        if node.input[1] in turned:
            return turned[node.input[1]], True
        return _matrix(markers.get(node.input[1])), False
    if node.op_type != "Gemm":
        return None, False
    about = draft.attributes(node)
    plain = about.get("alpha", 1.0) == 1.0 and about.get("beta", 1.0) == 1.0 and not about.get("transA", 0)
    if not plain:
        return None, False
    if node.input[1] in turned and not about.get("transB", 0):
        return turned[node.input[1]], True
    return _matrix(markers.get(node.input[1])), bool(about.get("transB", 0))


def _matrix(weight: Weight | None) -> Weight | None:
    return weight if weight is not None and weight.codes.dim() == 2 else None


def _codes_of(node: Node, tensor: Any) -> Tensor:
    """The codes behind a product, in the model's own layout."""
    about = {attribute.name: attribute.i for attribute in node.attribute}
    rows, blocks, _ = tensor.dims
    raw = torch.frombuffer(bytearray(onnx().numpy_helper.to_array(tensor).tobytes()), dtype=torch.uint8)
    filled = unpack(raw, about["bits"], rows * blocks * about["block_size"]).view(rows, -1)  # (N, blocks · block_size)
    codes = filled[:, : about["K"]]  # (out, in)
    return codes.t().contiguous() if node.name.endswith(_TURNED) else codes.contiguous()
