"""The finish `tune`: a short training of weights and scales (LSQ) towards the outputs of the float network.

Block by block where blocks can be run alone, else the whole network at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitplan.adapters.torch import inference, is_half, widen_tensor
from bitplan.core.errors import InputError
from bitplan.core.progress import Progress
from bitplan.forward.batches import run_batch
from bitplan.quant.block_sequence import BlockSequence, find_block_sequences
from bitplan.quant.convert import Forward, deep_copy, quantizers_of, weights_of
from bitplan.quant.proof import Unreached, take_proof_off_
from bitplan.quant.ptq import FinishedParts, compensate_, weighted_layers
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer
from bitplan.quant.sites import sites_of, unwrap

STEPS = 200
"""Steps of training for each part, each on one batch."""
RATE = 0.02
"""By how much of its quantization step a weight moves in a step at first; it falls to 0. Steps move a quarter of it."""
_WHOLE = "network"
_MOST = 0.9  # of the quantized weights: a list of blocks with so many of them is tuned block by block
Outputs = Callable[[int], Tensor]
"""Returns the output of a part for the batch of this index."""


def tune_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    steps: int = STEPS,
    rate: float = RATE,
    unreached: Unreached = "raise",
    store: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Train the weights and steps of a quantized model for a short while towards the float one, which it still holds.

    First its weights are compensated (`compensate_`). Then each part is trained by Adam so that its outputs on these
    batches are nearest, in squares, to those of the float network there: blocks one after the other, each behind those
    that are done, where one list of blocks has nine tenths of the weights; else the whole network by its outputs.
    BatchNorm and dropout are as in inference. A part that is not nearer afterwards is left as it was. Returned is which
    part of the squared error is left, by block or for the network. `store` is a folder that keeps what is finished.
    """
    kept = list(batches)
    if not kept:
        raise InputError("tuning got no batches: give some, as for calibrate_")
    if steps < 1 or not rate > 0:
        raise InputError(f"tuning needs at least one step and a rate above 0, not {steps} and {rate}")
    run = forward or run_batch
    weighted_layers(model)  # refused before anything long begins
    finished = None if store is None else FinishedParts(Path(store) / "tuned", model, kept, f"tune {steps} {rate!r}")
    teacher = _as_float(model)
    layers = None if store is None else Path(store) / "compensated"
    compensate_(model, kept, forward=run, unreached=unreached, store=layers, progress=progress)
    left: dict[str, float] = {}
    with inference(model), inference(teacher), _only_training(model):
        parts = list(_parts(model, teacher, kept, run))
        for number, (name, part) in enumerate(parts):
            training = _Learning(part.module, model)
            share = None if finished is None else finished.take_(name, training.tensors)
            if share is None:
                part.reach_()
                share = training.approach_(part, steps, rate)
                if finished is not None:
                    finished.keep(name, training.tensors, share)
            left[name] = share
            if progress is not None:
                progress(number + 1, len(parts), name)
    return left


class _Section:
    """A part of the network and the same part of the float one, with the outputs of both for each batch."""

    def __init__(self, module: nn.Module, count: int, own: Outputs, wanted: Outputs, reach: Callable[[], None]) -> None:
        self.module, self.count, self.own, self.wanted, self.reach_ = module, count, own, wanted, reach

    @torch.no_grad()
    def targets(self) -> list[Tensor]:
        """Return the outputs of the float network."""
        return [self.wanted(batch) for batch in range(self.count)]

    @torch.no_grad()
    def error(self, targets: Sequence[Tensor]) -> float:
        """Return the squared distance from them, over all batches."""
        return sum(float((self.own(batch) - one).double().square().sum()) for batch, one in enumerate(targets))


def _parts(
    model: nn.Module, teacher: nn.Module, batches: Sequence[Any], run: Forward
) -> Iterator[tuple[str, _Section]]:
    """Yield the blocks of the longest list, or the network."""
    names = {module: name for name, module in model.named_modules()}
    pairs = list(zip(find_block_sequences(model), find_block_sequences(teacher), strict=True))
    chain, taught = max(pairs, key=lambda pair: _weight_in(pair[0].blocks), default=(None, None))
    if chain is None or taught is None or _weight_in(chain.blocks) < _MOST * _weight_in([model]):
        chain = None
    recorded = chain is not None and taught is not None and all(
        _recorded(one, network, batches, run) for one, network in ((chain, model), (taught, teacher))
    )  # fmt: skip
    if chain is None or taught is None or not recorded:
        yield _WHOLE, _whole_network(model, teacher, batches, run)
        return
    for number, block in enumerate(chain.blocks):
        if _weight_in([block]):
            yield names[block], _block(chain, taught, number, len(batches))


@torch.no_grad()
def _recorded(chain: BlockSequence, network: nn.Module, batches: Sequence[Any], run: Forward) -> bool:
    return chain.record_(lambda batch: run(network, batch), batches)


def _whole_network(model: nn.Module, teacher: nn.Module, batches: Sequence[Any], run: Forward) -> _Section:
    def made(network: nn.Module, number: int) -> Tensor:
        return _joined(run(network, batches[number]))

    return _Section(
        model, len(batches), lambda number: made(model, number), lambda number: made(teacher, number), lambda: None
    )


def _block(chain: BlockSequence, taught: BlockSequence, number: int, count: int) -> _Section:
    @torch.no_grad()
    def reach() -> None:
        chain.reach_(number)
        taught.reach_(number)

    own, wanted = (lambda batch: chain.made(number, batch)), (lambda batch: taught.made(number, batch))
    return _Section(chain.blocks[number], count, own, wanted, reach)


class _Learning:
    """The trained parameters of a part: weights that have quantizers, and the scales of quantizers."""

    def __init__(self, part: nn.Module, model: nn.Module) -> None:
        inside = set(part.modules())
        quantizers, weights, sites = quantizers_of(model), weights_of(model), sites_of(model)
        self.groups: list[dict[str, Any]] = []
        self.tensors: dict[str, Tensor] = {}
        for name, site in sites.items():
            own, weight = quantizers[name].weight, weights.get(name)
            if own is None or not isinstance(weight, nn.Parameter) or site.owner not in inside:
                continue
            if len(site.places) > 1:  # a tied embedding
                continue
            size = float(own.steps_for(weight).mean())
            self._add(f"{name} weight", weight, size)
            self._add(f"{name} step", own.step, size / 4)
        for number, module in enumerate(part.modules()):
            if isinstance(module, InputQuantizer):
                self._add(f"{number} input step", module.step, float(module.step.detach().abs().mean()) / 4)

    def _add(self, name: str, parameter: nn.Parameter, size: float) -> None:
        if parameter.requires_grad and all(parameter is not known for known in self.tensors.values()):
            self.tensors[name] = parameter
            self.groups.append({"params": [parameter], "size": size})

    def approach_(self, part: _Section, steps: int, rate: float) -> float:
        """Train, and return the share of the error that is left; a part that is no better is restored."""
        targets = part.targets()
        before, start = part.error(targets), {name: one.detach().clone() for name, one in self.tensors.items()}
        if not before or not self.groups:
            return 1.0
        wide = _Widened([parameter for group in self.groups for parameter in group["params"]])
        sizes = [group["size"] for group in self.groups]
        optimizer = torch.optim.Adam(
            [{"params": [one], "lr": rate * size} for one, size in zip(wide.all, sizes, strict=True)]
        )
        powers = [max(float(widen_tensor(one).square().sum()), 1e-30) for one in targets]
        for step in range(steps):
            number = step % part.count
            with torch.enable_grad():
                loss = widen_tensor(part.own(number) - targets[number]).square().sum() / powers[number]
                optimizer.zero_grad(set_to_none=True)
                (loss * wide.scale(targets[number])).backward()
            wide.take_gradients_()
            for group, size in zip(optimizer.param_groups, sizes, strict=True):
                group["lr"] = rate * size * (1 - step / steps)
            optimizer.step()
            wide.give_back_()
        after = part.error(targets)
        if not after < before:
            with torch.no_grad():
                for name, one in self.tensors.items():
                    one.copy_(start[name])
            return 1.0
        return after / before


class _Widened:
    """Parameters, and for those of 16 bits copies of 32 that are trained: most steps of theirs are below a digit."""

    def __init__(self, own: Sequence[nn.Parameter]) -> None:
        self.own = own
        self.all = [one.detach().float() if is_half(one) else one for one in own]

    def scale(self, target: Tensor) -> float:
        """The factor of a loss before it is differentiated: small gradients are 0 in 16 bits."""
        return float(target.numel()) if any(map(is_half, self.own)) else 1.0

    def take_gradients_(self) -> None:
        """Those of the parameters, which have none then."""
        for one, wide in self._pairs:
            wide.grad = None if one.grad is None else one.grad.float()
            one.grad = None

    @torch.no_grad()
    def give_back_(self) -> None:
        """Round the trained copies into the parameters."""
        for one, wide in self._pairs:
            one.copy_(wide)

    @property
    def _pairs(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        return ((one, wide) for one, wide in zip(self.own, self.all, strict=True) if one is not wide)


@contextmanager
def _only_training(model: nn.Module) -> Iterator[None]:
    """Nothing asks for gradients but weights and steps, until the block ends; no gradient is left."""
    wanted = {id(weight) for weight in weights_of(model).values()}
    for module in model.modules():
        if isinstance(module, WeightQuantizer | InputQuantizer):
            wanted |= {id(one) for one in module.parameters() if one.requires_grad}
    before = [(one, one.requires_grad, one.grad) for one in model.parameters()]
    try:
        for parameter, _, _ in before:
            parameter.requires_grad_(id(parameter) in wanted)
        yield
    finally:
        for parameter, asked, gradient in before:
            parameter.requires_grad_(asked)
            parameter.grad = gradient


def _as_float(model: nn.Module) -> nn.Module:
    """Return a copy of a quantized network that computes in floats and is not proven."""
    made = deep_copy(model)
    take_proof_off_(unwrap(made))
    for module in made.modules():
        if isinstance(module, WeightQuantizer | InputQuantizer):
            module.enabled = False
    return made


def _weight_in(modules: Sequence[nn.Module]) -> int:
    """Return the number of values of the quantized weights inside."""
    return sum(
        parameter.numel()
        for module in modules
        for holder in module.modules()
        if any(isinstance(one, WeightQuantizer) for one in holder.children())
        for parameter in holder.parameters(recurse=False)
        if parameter.dim() > 1
    )


def _joined(outputs: Any) -> Tensor:
    """Return all outputs of a network in one vector."""
    found = [one.flatten() for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.is_floating_point()]
    if not found:
        raise InputError("the network gives out no tensor of floats, so nothing tells how near it is to the float one")
    return torch.cat(found)
