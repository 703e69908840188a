"""bitplan: how many bits each layer of a neural network should get, under a budget.

    model ─trace→ Graph ─┬─estimate→ Gains ─┬─select→ Plan ─quantize→ model′ ─finetune_→ model″ ─evaluate→ score
                         └─price────→ Costs ┘

Names are imported when first used, so `import bitplan` is quick and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitplan.core.budget import Budget as Budget
    from bitplan.core.errors import BitplanError as BitplanError
    from bitplan.core.errors import InputError as InputError
    from bitplan.core.malloc_tuning import keep_freed_memory as keep_freed_memory
    from bitplan.core.precision import Precision as Precision
    from bitplan.core.records import Costs as Costs
    from bitplan.core.records import Gains as Gains
    from bitplan.core.records import Graph as Graph
    from bitplan.core.records import Group as Group
    from bitplan.core.records import Layer as Layer
    from bitplan.core.records import Limit as Limit
    from bitplan.core.records import Link as Link
    from bitplan.core.records import Plan as Plan
    from bitplan.core.rules import Rules as Rules
    from bitplan.core.studies import Study as Study
    from bitplan.core.trials import Recipe as Recipe
    from bitplan.core.trials import Result as Result
    from bitplan.core.trials import Trial as Trial
    from bitplan.core.verdicts import Verdict as Verdict
    from bitplan.costs.base import price as price
    from bitplan.exporters.base import Exporter as Exporter
    from bitplan.exporters.base import export as export
    from bitplan.exporters.packed import load_packed as load_packed
    from bitplan.exporters.verify import measure_speed as measure_speed
    from bitplan.exporters.verify import verify as verify
    from bitplan.flow import choose as choose
    from bitplan.gains.base import Gain as Gain
    from bitplan.gains.base import estimate as estimate
    from bitplan.graph.names import Names as Names
    from bitplan.graph.trace import trace as trace
    from bitplan.models.file_tensors import file_cost as file_cost
    from bitplan.models.pretrained import load_pretrained as load_pretrained
    from bitplan.models.zoo import load_model as load_model
    from bitplan.quant.calibrate import calibrate_ as calibrate_
    from bitplan.quant.checkpoint import load_checkpoint as load_checkpoint
    from bitplan.quant.checkpoint import load_weights_ as load_weights_
    from bitplan.quant.checkpoint import save_checkpoint as save_checkpoint
    from bitplan.quant.convert import integer_weights as integer_weights
    from bitplan.quant.convert import plan_of as plan_of
    from bitplan.quant.convert import quantize as quantize
    from bitplan.quant.layers import LayerType as LayerType
    from bitplan.quant.methods import Quantizer as Quantizer
    from bitplan.quant.parameters import parameter_groups as parameter_groups
    from bitplan.quant.proof import Proof as Proof
    from bitplan.quant.proof import prove as prove
    from bitplan.quant.ptq import compensate_ as compensate_
    from bitplan.reports.document import report as report
    from bitplan.reports.figures import write_figures as write_figures
    from bitplan.selection.base import select as select
    from bitplan.selection.confidence import Confidence as Confidence
    from bitplan.selection.confidence import confidence as confidence
    from bitplan.selection.frontier import Frontier as Frontier
    from bitplan.selection.frontier import select_all as select_all
    from bitplan.stats.compare import Cell as Cell
    from bitplan.stats.compare import Comparison as Comparison
    from bitplan.stats.compare import compare as compare
    from bitplan.stats.ranksum import rank_correlation as rank_correlation
    from bitplan.stats.windows import Paired as Paired
    from bitplan.stats.windows import paired as paired
    from bitplan.store.files import load as load
    from bitplan.store.files import save as save
    from bitplan.store.run_folder import RunFolder as RunFolder
    from bitplan.study.spec import read_study as read_study
    from bitplan.study.sweep import sweep as sweep
    from bitplan.tasks.base import Task as Task
    from bitplan.tasks.base import load_task as load_task
    from bitplan.tasks.loaded import task as task
    from bitplan.tune.log import TrainLog as TrainLog
    from bitplan.tune.loop import evaluate as evaluate
    from bitplan.tune.loop import finetune_ as finetune_
    from bitplan.weights.opened import open_checkpoint as open_checkpoint

__version__ = "0.1.0"

_HOMES = {
    "BitplanError": "core.errors",
    "Budget": "core.budget",
    "Cell": "stats.compare",
    "Comparison": "stats.compare",
    "Confidence": "selection.confidence",
    "Costs": "core.records",
    "Exporter": "exporters.base",
    "Frontier": "selection.frontier",
    "Gain": "gains.base",
    "Gains": "core.records",
    "Graph": "core.records",
    "Group": "core.records",
    "InputError": "core.errors",
    "Layer": "core.records",
    "LayerType": "quant.layers",
    "Quantizer": "quant.methods",
    "Limit": "core.records",
    "Link": "core.records",
    "Names": "graph.names",
    "Paired": "stats.windows",
    "Plan": "core.records",
    "Precision": "core.precision",
    "Proof": "quant.proof",
    "Recipe": "core.trials",
    "Result": "core.trials",
    "Rules": "core.rules",
    "RunFolder": "store.run_folder",
    "Study": "core.studies",
    "Task": "tasks.base",
    "TrainLog": "tune.log",
    "Trial": "core.trials",
    "Verdict": "core.verdicts",
    "calibrate_": "quant.calibrate",
    "choose": "flow",
    "compensate_": "quant.ptq",
    "compare": "stats.compare",
    "confidence": "selection.confidence",
    "estimate": "gains.base",
    "evaluate": "tune.loop",
    "export": "exporters.base",
    "file_cost": "models.file_tensors",
    "finetune_": "tune.loop",
    "integer_weights": "quant.convert",
    "keep_freed_memory": "core.malloc_tuning",
    "load": "store.files",
    "load_checkpoint": "quant.checkpoint",
    "load_model": "models.zoo",
    "load_packed": "exporters.packed",
    "load_pretrained": "models.pretrained",
    "load_task": "tasks.base",
    "load_weights_": "quant.checkpoint",
    "open_checkpoint": "weights.opened",
    "paired": "stats.windows",
    "parameter_groups": "quant.parameters",
    "plan_of": "quant.convert",
    "price": "costs.base",
    "prove": "quant.proof",
    "quantize": "quant.convert",
    "rank_correlation": "stats.ranksum",
    "read_study": "study.spec",
    "report": "reports.document",
    "save": "store.files",
    "save_checkpoint": "quant.checkpoint",
    "select": "selection.base",
    "select_all": "selection.frontier",
    "measure_speed": "exporters.verify",
    "sweep": "study.sweep",
    "task": "tasks.loaded",
    "trace": "graph.trace",
    "verify": "exporters.verify",
    "write_figures": "reports.figures",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bitplan' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"bitplan.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
