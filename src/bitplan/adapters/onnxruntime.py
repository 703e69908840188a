"""ONNX Runtime: run an ONNX file on the CPU."""

from __future__ import annotations

import bisect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bitplan.adapters.foreign import require
from bitplan.adapters.onnx import by_name, content_of
from bitplan.core.errors import FileError, InputError
from bitplan.core.parsing import first_line

_FUSED = "fused "  # what it puts before the name of a Gemm that an activation was joined to
_KERNEL = "_kernel_time"


class Session:
    """A model that ONNX Runtime executes: arrays by input name → arrays in the order of its outputs."""

    name = "ONNX Runtime"

    def __init__(
        self,
        model: bytes | Path,
        *,
        threads: int | None = None,
        optimize: bool = True,
        profile: Path | None = None,
    ) -> None:
        require("onnxruntime", "export", "running ONNX")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors only
        if threads is not None:
            options.intra_op_num_threads = threads
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, str(profile)
        levels = onnxruntime.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimize else levels.ORT_DISABLE_ALL
        name = "this graph" if isinstance(model, bytes) else str(model)
        try:
            self._session = onnxruntime.InferenceSession(content_of(model), options, providers=["CPUExecutionProvider"])
        except InputError:
            raise
        except Exception as error:  # its own kinds, which share no base
            raise FileError(f"ONNX Runtime cannot run {name} ({first_line(error, 200)})") from None
        self.inputs: list[str] = [value.name for value in self._session.get_inputs()]
        self.outputs: list[str] = [value.name for value in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, np.ndarray] | Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return all outputs."""
        named = by_name(inputs, self.inputs)
        try:
            outputs: list[np.ndarray] = self._session.run(None, named)
        except Exception as error:  # of shapes or types that the graph does not take
            line = " ".join(str(error).split())[:200]
            raise InputError(f"ONNX Runtime cannot run the graph on these inputs ({line})") from None
        return outputs

    def profiled(self) -> list[list[tuple[str, float]]]:
        """Return, for each run so far, its nodes in order with their seconds; needs `profile`.

        These are the runtime's nodes: their names begin like the file's nodes, or like their outputs.
        """
        path = Path(self._session.end_profiling())
        events = json.loads(path.read_text())
        path.unlink()
        starts = sorted(event["ts"] for event in events if event["name"] == "model_run")
        runs: list[list[tuple[str, float]]] = [[] for _ in starts]
        for event in sorted(events, key=lambda event: int(event.get("ts", 0))):
            if event.get("cat") == "Node" and event["name"].endswith(_KERNEL):
                place = bisect.bisect_right(starts, event["ts"]) - 1
                name = event["name"].removesuffix(_KERNEL).removeprefix(_FUSED)
                runs[place].append((name, event["dur"] / 1e6))
        return runs
