"""matmulnbits: ONNX Runtime's own product with weights of 2, 4 or 8 bits, for linear layers; activations stay float.

Stored is code + 2^(bits−1), the zero point that `MatMulNBits` assumes where there is none; one scale per block of
inputs: all of a row's equal to LSQ's step, or those of groups. A table of 8-bit codes in groups gives out rows of its
blocks, so that a head that is tied to it shares them. What else is no linear layer keeps its codes behind
DequantizeLinear.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
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
from bitplan.core.precision import LEFT_ALONE_BITS, Precision
from bitplan.costs.files import FLOAT_BYTES, GroupedForm
from bitplan.exporters.base import Execution, Exporter, ReadBack, Source
from bitplan.exporters.bit_packing import pack, unpack
from bitplan.exporters.onnx_graph import Draft, Node, Weight, exporter_in, is_ours, reading_plan, type_number
from bitplan.exporters.onnx_running import RunnableGraph
from bitplan.exporters.onnx_weights import check_range, dequantize_weights_, read_stored_codes, storage_width

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
class MatMulForm(GroupedForm):
    """Blocks of 16, 32, 64 … inputs, the last one padded; float32 scales, packed zero points."""

    name: ClassVar[str] = "matmulnbits"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 16 or self.size & (self.size - 1):
            raise InputError(f"{self.name}: a block is 16, 32, 64, 128 … inputs, not {self.size}")

    def place(self, row: int, bits: int) -> int:
        """Return 2, 4 or 8 bits."""
        return next((wide for wide in _WIDTHS if wide >= bits), LEFT_ALONE_BITS)

    def taken(self, rows: int, row: int, bits: int) -> int:
        """Return the bytes of blocks, scales and zero points."""
        wide, groups = self.place(row, bits), self.groups(row)
        zeros = rows * -(-groups * wide // 8) if self.zeros else 0
        return rows * groups * (self.size * wide // 8 + FLOAT_BYTES) + zeros


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
    form: ClassVar[type[MatMulForm]] = MatMulForm
    needs_model: ClassVar[bool] = True
    suffix: ClassVar[str] = ".onnx"

    def __post_init__(self) -> None:
        if self.block_size and (self.block_size < 16 or self.block_size & (self.block_size - 1)):
            raise InputError(f"a block is 16, 32, 64, 128 … inputs, or 0 for the fastest, not {self.block_size}")
        if self.accuracy_level not in range(5):
            raise InputError(f"the accuracy level is 0 (the runtime's own) to 4 (8-bit), not {self.accuracy_level}")

    def write(self, source: Source, path: Path) -> None:
        """Capture the graph and replace every product with a quantized weight by the operator."""
        self._check_inputs(source)
        draft = Draft(source, _OPSET, groups=True)
        draft.leave_inputs_float_()
        self._check_blocks(draft)
        self._multiply_by_codes_(draft)
        dequantize_weights_(draft, _OTHER_WIDTHS)
        draft.save(source, path, exporter=_NAME)

    def _check_blocks(self, draft: Draft) -> None:
        """Raise for groups that the operator has no blocks for."""
        for weight in draft.weights.values():
            size = weight.size
            if size and (size < 16 or size & (size - 1) or self.block_size not in (0, size)):
                asked = f"blocks of {self.block_size}" if self.block_size else "blocks of 16, 32, 64, 128 …"
                raise InputError(f"layer {weight.layer!r} has groups of {size} inputs, and matmulnbits has {asked}")

    def _check_inputs(self, source: Source) -> None:
        """Raise if the plan quantizes inputs, or warn that they stay float."""
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
        """Return the plan in the file, whose inputs are all float, and the codes of both kinds of layers."""
        with reading_plan(path) as (proto, plan):
            codes = read_stored_codes(proto, plan, path)
            tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
            products = [node for node in proto.graph.node if node.op_type == "MatMulNBits"]
            for node in products:
                blocks = node.input[1]
                layer = blocks.removesuffix(BLOCKS)
                if layer in plan.precisions and layer not in codes:
                    codes[layer] = _codes_of(node, tensors[blocks])
            for layer in plan.precisions:  # a table that nothing multiplies by
                if layer not in codes and layer + BLOCKS in tensors:
                    codes[layer] = _codes_of_table(tensors, layer)
            for layer in codes:
                check_range(codes[layer], layer, plan.precisions[layer], path)
        held = {layer: Precision.weights_only(planned.weight_bits) for layer, planned in plan.precisions.items()}
        in_order = {layer: codes[layer] for layer in plan.precisions if layer in codes}
        return ReadBack(held, in_order)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Return True for an ONNX file that names this exporter."""
        return exporter_in(path) == _NAME

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """Run it by ONNX Runtime; its activations are float, so no difference can begin at a tie."""
        return Execution(RunnableGraph(Session(path)), float_inputs=True, runtime=Session)

    def _multiply_by_codes_(self, draft: Draft) -> None:
        """Replace MatMul and Gemm by the operator; a weight that several of them read is stored once."""
        markers, turned = _weights_by_value(draft)
        stored: dict[tuple[str, bool], list[str]] = {}  # layer, rows_first → the names of codes, scales, zero points

        def rewrite(node: Node) -> list[Node]:
            table = markers.get(node.input[0]) if node.op_type == "Gather" else None
            if table is not None and table.size and storage_width(table.bits, _WIDTHS, table.layer) == 8:
                if (table.layer, True) not in stored:
                    stored[table.layer, True] = self._store(draft, table, rows_first=True)
                return _look_up(draft, node, table, stored[table.layer, True])
            weight, rows_first = _factor(draft, node, markers, turned)
            if weight is None:
                return [node]
            key = (weight.layer, rows_first)
            if key not in stored:
                stored[key] = self._store(draft, weight, rows_first)
            inputs = [node.input[0], *stored[key]]
            if len(node.input) > 2 and node.input[2]:  # a bias; zero points and an order of groups come before it
                inputs += [""] * (5 - len(inputs)) + [node.input[2]]
            name = node.name if rows_first else f"{node.name}{_TURNED}"
            about = self._attributes(weight, rows_first)
            return [draft.node("MatMulNBits", inputs, node.output[0], name, domain="com.microsoft", **about)]

        draft.rebuild(rewrite)

    def _block(self, weight: Weight, inputs: int) -> int:
        """Return the block size that the user asked for, or the fastest that the inputs fill: padding costs time."""
        if weight.size or self.block_size:
            return weight.size or self.block_size
        largest = _FASTEST[storage_width(weight.bits, _WIDTHS, weight.layer)]
        return next((size for size in (256, 128, 64) if size <= largest and inputs % size == 0), 32)

    def _attributes(self, weight: Weight, rows_first: bool) -> dict[str, int]:
        """Return the operator's attributes: N outputs, K inputs."""
        outputs, inputs = weight.codes.shape if rows_first else weight.codes.t().shape
        return {
            "N": outputs,
            "K": inputs,
            "bits": storage_width(weight.bits, _WIDTHS, weight.layer),
            "block_size": self._block(weight, inputs),
            "accuracy_level": self.accuracy_level,
        }

    def _store(self, draft: Draft, weight: Weight, rows_first: bool) -> list[str]:
        """Store codes (N, blocks, bytes), scales (N, blocks), packed zero points; code 0 pads the last block."""
        codes = weight.codes if rows_first else weight.codes.t()
        steps = weight.steps if rows_first or weight.size or weight.steps.dim() < 2 else weight.steps.t()
        rows, inputs = codes.shape
        block = self._block(weight, inputs)
        blocks = -(-inputs // block)
        bits = storage_width(weight.bits, _WIDTHS, weight.layer)
        filled = F.pad(codes.contiguous(), (0, blocks * block - inputs))
        shape = (rows, blocks, block * bits // 8)
        name = draft.raw(weight.layer + BLOCKS, "UINT8", shape, pack(filled, bits).numpy().tobytes())
        if not weight.size:
            scales = np.broadcast_to(steps.reshape(-1, 1).numpy(), (rows, blocks))
            return [name, draft.floats(f"{weight.layer}.step", scales)]
        names = [name, draft.floats(f"{weight.layer}.step", weight.steps)]
        if weight.zeros is not None:
            each = -(-blocks * bits // 8)
            wide = F.pad(weight.zeros.to(codes.dtype), (0, each * 8 // bits - blocks))
            packed = pack(wide, bits).numpy().tobytes()
            names.append(draft.raw(f"{weight.layer}.zero", "UINT8", (rows, each), packed))
        return names


def _look_up(draft: Draft, node: Node, table: Weight, stored: list[str]) -> list[Node]:
    """Rows of a table of bytes (words, blocks, size), dequantized as they are looked up."""
    name, ids, nodes = table.layer, node.input[1], []

    def add_node(kind: str, inputs: list[str], suffix: str, **about: Any) -> str:
        output = draft.fresh(f"{name}.{suffix}")
        nodes.append(draft.node(kind, inputs, output, f"{name}.{suffix}", **about))
        return output

    def gather_rows(tensor: str, suffix: str, *, as_floats: bool) -> str:
        rows = add_node("Gather", [tensor, ids], f"{suffix}_rows", axis=0)
        return add_node("Cast", [rows], f"{suffix}_floats", to=type_number("FLOAT")) if as_floats else rows

    last = draft.constant(f"{name}.last_axis", np.array([-1], np.int64))
    codes = gather_rows(stored[0], "codes", as_floats=True)
    if len(stored) > 2:
        zero = add_node("Unsqueeze", [gather_rows(stored[2], "zeros", as_floats=True), last], "zero")
    else:
        zero = draft.floats(f"{name}.middle", 128.0)
    steps = add_node("Unsqueeze", [gather_rows(stored[1], "steps", as_floats=False), last], "step_rows")
    values = add_node("Mul", [add_node("Sub", [codes, zero], "multiples"), steps], "values")
    shape = draft.constant(f"{name}.row", np.array([0] * (draft.rank(ids) or 2) + [-1], np.int64))
    whole = add_node("Reshape", [values, shape], "filled")
    width, padded = table.codes.shape[1], table.steps.shape[1] * table.size
    if width == padded:
        nodes[-1].output[0] = node.output[0]
        return nodes
    ends = [draft.constant(f"{name}.{called}", np.array([at], np.int64)) for called, at in (("from", 0), ("to", width))]
    nodes.append(draft.node("Slice", [whole, *ends, last], node.output[0], f"{name}.slice"))
    return nodes


def _weights_by_value(draft: Draft) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """Return the weights by the values that hold them, as they are stored and as transposed matrices."""
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
    """Return the weight that a node multiplies by, or None if the operator cannot, and True if its rows are outputs."""
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


def _codes_of_table(tensors: Mapping[str, Any], layer: str) -> Tensor:
    """Return the codes of a table of bytes whose blocks fill its rows."""
    whole = torch.from_numpy(onnx().numpy_helper.to_array(tensors[layer + BLOCKS]).astype(np.int16)).flatten(1) - 128
    return whole.to(torch.int8)


def _codes_of(node: Node, tensor: Any) -> Tensor:
    """Return the codes behind a product, in the model's own layout."""
    about = {attribute.name: attribute.i for attribute in node.attribute}
    rows, blocks, _ = tensor.dims
    raw = torch.frombuffer(bytearray(onnx().numpy_helper.to_array(tensor).tobytes()), dtype=torch.uint8)
    filled = unpack(raw, about["bits"], rows * blocks * about["block_size"]).view(rows, -1)  # (N, blocks · block_size)
    codes = filled[:, : about["K"]]  # (out, in)
    return codes.t().contiguous() if node.name.endswith(_TURNED) else codes.contiguous()
