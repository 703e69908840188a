"""A callback of Lightning that quantizes a module by a plan, and keeps the plan in its checkpoints.

    lightning.Trainer(callbacks=[bitplan.plugins.trainers.lightning.Quantization("plan.json", part="network")])

It quantizes before `configure_optimizers` is asked, so `bitplan.parameter_groups(self, …)` there has the steps in a
group of their own, and calibrates before the first validation, unless a checkpoint brings steps. What a checkpoint
holds comes back by `ckpt_path`, or outside of a training by `restore_(module, "last.ckpt")`.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from bitplan.adapters import torchvision
from bitplan.adapters.foreign import require
from bitplan.core.errors import FileError, InputError
from bitplan.core.naming import join_names, layer_of_quantizer
from bitplan.core.parsing import name_file_in_errors
from bitplan.core.records import Plan
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import is_quantized, options_of, plan_of, quantize_
from bitplan.quant.methods import OptionChanges, check_options
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.sites import PLAN
from bitplan.store.files import load
from bitplan.weights.pickled import read_pickle

# --- Lightning: the base class of its callbacks.


def _callback_class() -> Any:
    """What callbacks of Lightning derive from; where it is not installed, what to install."""
    require("lightning", "lightning", "a callback of Lightning")
    if torchvision.is_installed():
        torchvision.torchvision()  # torchmetrics, which Lightning imports, imports it, and it may need help
    from lightning.pytorch import Callback

    return Callback


# --- A callback of Lightning that quantizes a module by a plan, and keeps the plan in its checkpoints.

KEY = "bitplan"
"""Where the plan is in a checkpoint of Lightning's."""
_GROUPS = "return torch.optim.AdamW(bitplan.parameter_groups(self, lr=…, step_lr=…)) from configure_optimizers"
_log = logging.getLogger(__name__)
_Callback: Any = _callback_class()


class Quantization(_Callback):
    """Quantizes the `part` of a module that a plan was made for; without one, the module itself.

    `batches` is how many of the training data's, or which, the steps of inputs are set from. They are run by
    `forward(module, batch)`, or else by the module's `training_step`, whose logging is left out. Options are those of
    `quantize`.
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        *,
        part: str = "",
        batches: int | Iterable[Any] = 4,
        forward: Callable[[Any, Any], Any] | None = None,
        **options: Unpack[OptionChanges],
    ) -> None:
        if not isinstance(plan, Plan | str | Path):
            raise InputError(f"Quantization takes a Plan or the path of one, not a {type(plan).__name__}")
        if isinstance(batches, int) and batches < 1:
            raise InputError(f"steps of inputs are set from at least one batch, not from {batches}")
        self.plan: Plan = plan if isinstance(plan, Plan) else load(plan, Plan)
        self.part, self.batches, self.forward, self.options = part, batches, forward, check_options(options)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Quantize, whatever is about to be done: fit, validate, test or predict."""
        _quantize_once_(_part_of(pl_module, self.part), self.plan, self.options)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Look at the optimizers, and calibrate what no checkpoint has brought steps for."""
        part = _part_of(pl_module, self.part)
        _check_optimizers(part, trainer.optimizers)
        quantizers = [module for module in part.modules() if isinstance(module, InputQuantizer)]
        if all(quantizer.range is None for quantizer in quantizers):
            self._calibrate_(trainer, pl_module, part)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the plan beside the weights, as plain text."""
        part = _part_of(pl_module, self.part)
        told = {"plan": plan_of(part).to_json(), "options": asdict(options_of(part)), "part": self.part}
        checkpoint[KEY] = told

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another plan, whose steps would mean something else."""
        plan, _, _ = _told_by(checkpoint, "the checkpoint")
        if plan.id != self.plan.id:
            raise InputError(
                f"the checkpoint was trained by the plan {plan.id}, this training is to follow {self.plan.id}: give "
                "Quantization the plan of the checkpoint, or start without ckpt_path"
            )

    def _calibrate_(self, trainer: Any, module: Any, part: nn.Module) -> None:
        if self.forward is None and not module.automatic_optimization:
            raise InputError(
                f"{type(module).__name__}.training_step optimizes by itself, so calibration cannot run it: give "
                "Quantization(…, forward=lambda module, batch: …) that only runs the network"
            )
        run = self.forward or _run_training_step
        context = trainer.precision_plugin.forward_context
        # Shuffled data draws random numbers, which the training is to find as if nobody had looked.
        with torch.random.fork_rng(devices=[]), _unlogged(module), context():
            calibrate_(part, self._batches(trainer), forward=lambda _, batch: run(module, batch))

    def _batches(self, trainer: Any) -> Iterator[Any]:
        """The batches to look at, on the device and in the type of the module."""
        batches = self.batches
        if isinstance(batches, int):
            trainer.fit_loop.setup_data()
            loader = trainer.train_dataloader
            if loader is None or isinstance(loader, Mapping | list | tuple):
                raise InputError(
                    "calibration takes its batches from one loader of training data, and there are several or none: "
                    "give Quantization(…, batches=[…]) the batches themselves"
                )
            batches = itertools.islice(loader, batches)
        for batch in batches:
            yield trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))


def restore_(module: nn.Module, checkpoint: str | Path | Mapping[str, Any]) -> None:
    """Make a float module what a checkpoint of Lightning's holds: quantized by its plan, with its weights and steps.

    A checkpoint is a path, or what Lightning gives `on_load_checkpoint`; with
    `bitplan.plugins.trainers.lightning.restore_(self,
    checkpoint)` there, `load_from_checkpoint` gives quantized modules.
    """
    where = "the checkpoint" if isinstance(checkpoint, Mapping) else checkpoint
    content = checkpoint if isinstance(checkpoint, Mapping) else read_pickle(Path(checkpoint))
    plan, options, part = _told_by(content, where)
    with name_file_in_errors(where):
        _quantize_once_(_part_of(module, part), plan, options)
    state = content.get("state_dict")
    lacking = module.state_dict().keys() - (state.keys() if isinstance(state, Mapping) else ())
    if lacking:
        raise FileError(f"{where} lacks {min(lacking)}, which {type(module).__name__} has: it is of another module")
    module.load_state_dict(state)  # type: ignore[arg-type]


def _quantize_once_(part: nn.Module, plan: Plan, options: OptionChanges) -> None:
    """Quantize in place what is not quantized by this plan already, as in a second `fit`."""
    if hasattr(part, PLAN) and plan_of(part).id == plan.id:
        return
    if is_quantized(part):
        raise InputError(
            "the module is quantized already, by another plan: give the callback a float one, or leave it out"
        )
    quantize_(part, plan, **options)
    part.register_load_state_dict_pre_hook(_refuse_float)


# It is found by its name when a model is unpickled.
def _refuse_float(part: nn.Module, state: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
    """Say of a float network's checkpoint what it is, before torch lists all that it lacks."""
    if not any(layer_of_quantizer(name) is not None for name in state if name.startswith(prefix)):
        raise InputError(
            "the checkpoint holds a float network: load it into the module first, with load_from_checkpoint(path), "
            "then fit with Quantization and without ckpt_path"
        )


def _told_by(checkpoint: Mapping[str, Any], where: str | Path) -> tuple[Plan, OptionChanges, str]:
    """The plan, the options and the part that a checkpoint names."""
    told = checkpoint.get(KEY) if isinstance(checkpoint, Mapping) else None
    if not isinstance(told, Mapping) or not isinstance(told.get("plan"), str):
        raise FileError(
            f"{where} has no plan: it was not saved in a training with bitplan.plugins.trainers.lightning.Quantization"
        )
    with name_file_in_errors(where):
        options = told.get("options")
        plan = Plan.from_json(told["plan"])
        return plan, check_options(options if isinstance(options, dict) else {}), str(told.get("part", ""))


def _part_of(module: nn.Module, part: str) -> nn.Module:
    try:
        return module.get_submodule(part)
    except AttributeError:
        names = ", ".join(name for name, _ in module.named_children()) or "none"
        raise InputError(f"{type(module).__name__} has no part {part!r}: its parts are {names}") from None


def _check_optimizers(part: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that leave learned steps out, and warn of those that let them decay."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    decays = {id(parameter): group.get("weight_decay", 0) for group in groups for parameter in group["params"]}
    steps = {
        join_names(path, name): (parameter, module.decay)
        for path, module in part.named_modules()
        if isinstance(module, WeightQuantizer | InputQuantizer)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    left_out = [name for name, (step, _) in steps.items() if id(step) not in decays]
    if groups and left_out:
        raise InputError(f"no optimizer has {left_out[0]} or {len(left_out) - 1} more of the learned steps: {_GROUPS}")
    decaying = [name for name, (step, own) in steps.items() if decays.get(id(step), 0) > own]
    if decaying:
        _log.warning("the optimizer lets %d learned steps decay: %s", len(decaying), _GROUPS)


def _run_training_step(module: Any, batch: Any) -> None:
    takes = inspect.signature(module.training_step).parameters
    module.training_step(batch, *([0] if len(takes) > 1 else []))


@contextmanager
def _unlogged(module: Any) -> Iterator[None]:
    """What the module logs is dropped until the block ends: outside of its loops Lightning refuses it."""
    names = ("log", "log_dict")
    for name in names:
        setattr(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name in names:
            delattr(module, name)
