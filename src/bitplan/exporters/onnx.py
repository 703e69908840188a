"""onnx: QuantizeLinear and DequantizeLinear around every quantized tensor, the weights stored as packed integers.

Two forms hold the same codes: one that ONNX Runtime's integer kernels execute, and one whose activations have the
narrow types themselves, which runtimes compute in floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, final, get_args

from torch import nn

from bitplan.adapters.onnxruntime import Session
from bitplan.core.errors import InputError
from bitplan.exporters.base import Execution, Exporter, ReadBack, Source
from bitplan.exporters.divergence import ActivationComparison
from bitplan.exporters.onnx_forms import (
    clip_codes_,
    name_float_products,
    open_clips_,
    pool_codes_,
    quantize_in_bytes_,
    quantize_in_pairs_,
    read_back,
)
from bitplan.exporters.onnx_graph import Draft, exporter_in
from bitplan.exporters.onnx_passes import (
    fold_norms_,
    keep_float_weights_,
    multiply_points_,
    part_biases_,
    place_biases_,
)
from bitplan.exporters.onnx_running import RunnableGraph
from bitplan.exporters.onnx_weights import dequantize_weights_, give_zero_points_, look_up_codes_

_NAME = "onnx"
_WIDTHS = {25: (2, 4, 8, 16), 21: (4, 8, 16)}  # opset → the integers it can store
Kernels = Literal["integer", "float"]


@final
@dataclass(frozen=True)
class Onnx(Exporter):
    """ONNX with integer weights and activations, for integer kernels; `opset` 21 stores 2 bits in 4.

    `kernels="float"` keeps activations in types of their own bits, which are computed in floats. `fold` takes batch
    norms into the steps of the convolutions before them.
    """

    kernels: Kernels = "integer"
    opset: int = 25
    fold: bool = True
    needs_model: ClassVar[bool] = True
    suffix: ClassVar[str] = ".onnx"

    def __post_init__(self) -> None:
        if self.opset not in _WIDTHS:
            raise InputError(f"the opset is 25 (2-bit integers) or 21 (for older runtimes), not {self.opset}")
        if self.kernels not in get_args(Kernels):
            raise InputError(f"the kernels are {' or '.join(get_args(Kernels))}, not {self.kernels!r}")

    def write(self, source: Source, path: Path) -> None:
        """Capture the graph, rewrite it with ONNX's operators, check and write."""
        draft = Draft(source, self.opset)
        if self.fold:
            fold_norms_(draft)
        rewrite_ = _rewrite_for_integers_ if self.kernels == "integer" else _rewrite_for_floats_
        rewrite_(draft, _WIDTHS[self.opset])
        draft.save(source, path, exporter=_NAME)

    def read(self, path: Path) -> ReadBack:
        """Return the plan in the file, after checking the graph against it, and the codes."""
        return read_back(path)

    @classmethod
    def recognizes(cls, path: Path) -> bool:
        """Return True for an ONNX file that names this exporter, or none."""
        return exporter_in(path) in (_NAME, "")

    def opened(self, path: Path, model: nn.Module) -> Execution:
        """Run it by ONNX Runtime and compare every quantized activation."""
        return Execution(RunnableGraph(Session(path)), ties=ActivationComparison(path, model, Session), runtime=Session)


def _rewrite_for_integers_(draft: Draft, widths: tuple[int, ...]) -> None:
    """Rewrite a captured graph so that integer kernels execute it."""
    multiply_points_(draft)
    between = place_biases_(draft)
    name_float_products(draft, "ONNX Runtime", lacking=("ConvTranspose",), between=between)
    dequantize_weights_(draft, widths, cast=True)
    give_zero_points_(draft)
    quantize_in_bytes_(draft, widths, unsigned=True)
    clip_codes_(draft)
    pool_codes_(draft)
    look_up_codes_(draft)
    open_clips_(draft)
    keep_float_weights_(draft)


def _rewrite_for_floats_(draft: Draft, widths: tuple[int, ...]) -> None:
    """Rewrite a captured graph so that activations have types of their own bits."""
    part_biases_(draft)
    dequantize_weights_(draft, widths)
    quantize_in_pairs_(draft, widths)
    look_up_codes_(draft)
    open_clips_(draft)
    keep_float_weights_(draft)
