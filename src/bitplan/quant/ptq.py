"""Post-training quantization: weights are rounded, or rounded so that errors in a layer's outputs cancel."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from bitplan.adapters.torch import inference
from bitplan.core.errors import InputError
from bitplan.core.progress import Progress
from bitplan.core.registry import ROUNDINGS
from bitplan.forward.batches import run_batch
from bitplan.quant.block_sequence import BlockSequence, find_block_sequences
from bitplan.quant.calibrate import calibrate_
from bitplan.quant.convert import Forward, options_of, plan_of, quantizers_of
from bitplan.quant.moments import Enough, Moments, watching
from bitplan.quant.proof import Unreached, report_unreached
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer, why_not_uniform
from bitplan.quant.sites import Site, sites_of
from bitplan.quant.weight_groups import GroupedWeight, Grouping, Levels, fit_levels
from bitplan.store.files import atomic_file
from bitplan.weights.torch_tensors import hash_of_tensors, read_safetensors, write_tensors

# Finished layers in a folder: a killed run of hours goes on with the others.

_WEIGHT, _SHARE, _OF = "weight", "share", "of"


class FinishedParts:
    """A folder with a file for each finished part: its tensors, its remaining error, and its origin.

    A part from another plan, method or setting, from other weights anywhere in the network or other batches is not
    taken: the input of a part depends on all of them. `model` is as it is before its first part is finished.
    """

    def __init__(self, folder: str | Path, model: nn.Module, batches: Sequence[Any], setting: str) -> None:
        self.folder = Path(folder)
        options = sorted(asdict(options_of(model)).items())
        self._made_of = f"{plan_of(model).id} {options} {setting} {_hash(model.state_dict())} {_hash(list(batches))}"

    @torch.no_grad()
    def take_(self, name: str, tensors: Mapping[str, Tensor]) -> float | None:
        """Fill a part's tensors from its file, and return the share of its error that was left; None without a file."""
        try:
            kept, texts = read_safetensors(self._path(name))
        except InputError:  # not there, or damaged: it is made again
            return None
        if texts.get(_OF) != self._made_of:
            return None
        for key, tensor in tensors.items():
            tensor.copy_(kept[key])
        return float(texts[_SHARE])

    def keep(self, name: str, tensors: Mapping[str, Tensor], share: float) -> None:
        """Write a part that is finished."""
        with atomic_file(self._path(name)) as temporary:
            texts = {_SHARE: repr(share), _OF: self._made_of}
            write_tensors({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, temporary, texts)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '_')}.safetensors"


class FinishedLayers(FinishedParts):
    """A file for each layer: its weight and its quantizer's tensors."""

    def take_layer_(self, name: str, weight: Tensor, quantizer: WeightQuantizer) -> float | None:
        """Fill a layer from its file."""
        share = self.take_(name, self._tensors(weight, quantizer))
        if share is not None:
            quantizer.load_state_dict(quantizer.state_dict())  # what it leads from them is led again
        return share

    def keep_layer(self, name: str, weight: Tensor, quantizer: WeightQuantizer, share: float) -> None:
        """Write a layer that is finished."""
        self.keep(name, self._tensors(weight, quantizer), share)

    def _tensors(self, weight: Tensor, quantizer: WeightQuantizer) -> dict[str, Tensor]:
        return {_WEIGHT: weight, **quantizer.state_dict()}


def _hash(tree: Any) -> str:
    """Return a hash of a tree: tensors by names, types, shapes and values, and other things as they print."""
    tensors: dict[str, Tensor] = {}
    for number, (path, leaf) in enumerate(tree_leaves_with_path(tree)):
        is_tensor = isinstance(leaf, Tensor)
        said = f"{leaf.dtype} {tuple(leaf.shape)}" if is_tensor else repr(leaf)
        tensors[f"{number} {keystr(path)} {said}"] = leaf if is_tensor else torch.empty(0)
    return hash_of_tensors(tensors)


# Error-compensated rounding of a matrix (GPTQ, Frantar et al. 2022): the weights of later inputs compensate the error
# that rounding an input's weights makes in the outputs.

DAMPING = 0.01
"""λ as a share of the mean of H's diagonal."""
BLOCK = 128
"""So many inputs are done before the weights of all others are corrected at once."""


class FixedLevels:
    """Levels that are given: multiples of scales (B, rows, inputs) from `low` to `high`."""

    def __init__(self, step: Tensor, low: int, high: int, width: int = BLOCK) -> None:
        self.step, self.low, self.high = step, low, high
        self.width = width

    def begin(self, start: int, weights: Tensor) -> None:
        """Fit nothing."""

    def nearest(self, column: int, values: Tensor) -> Tensor:
        """Return the levels of one input's weights (B, rows)."""
        step = self.step[..., column]
        return torch.clamp(values / step, self.low, self.high).round_() * step


class FittedLevels:
    """Levels of groups, each fitted to its weights when its turn comes."""

    def __init__(self, width: int, bits: int, *, zeros: bool, digits: int = 0) -> None:
        self.width, self.bits, self.zeros, self.digits = width, bits, zeros, digits
        self.groups: list[Levels] = []  # of each (B, rows, 1)

    def begin(self, start: int, weights: Tensor) -> None:
        """Fit the group that begins here, (B, rows, width)."""
        found = fit_levels(weights.flatten(0, 1)[:, None], self.bits, zeros=self.zeros, digits=self.digits)
        shape = weights.shape[:2]
        zero = None if found.zero is None else found.zero.view(*shape, 1).to(weights)
        self.groups.append(Levels(found.step.view(*shape, 1).to(weights), zero))
        low, high = self.groups[-1].bounds(self.bits)
        self._step = self.groups[-1].step[..., 0]
        self._low, self._high = (
            bound.view(shape) if isinstance(bound, Tensor) else torch.full(shape, float(bound)).to(weights)
            for bound in (low, high)
        )

    def nearest(self, column: int, values: Tensor) -> Tensor:
        """Return the levels of one input's weights (B, rows)."""
        return (values / self._step).clamp_(self._low, self._high).round_().mul_(self._step)

    @property
    def levels(self) -> Levels:
        """The levels of all groups, (rows of all parts, groups)."""
        step = torch.cat([group.step for group in self.groups], -1).flatten(0, 1)
        zeros = [group.zero for group in self.groups if group.zero is not None]
        return Levels(step, torch.cat(zeros, -1).flatten(0, 1) if zeros else None)


def round_compensated(
    weight: Tensor, moments: Tensor, grid: FixedLevels | FittedLevels, *, damping: float = DAMPING
) -> Tensor:
    """Round weights (B, rows, inputs) to the levels of a grid, by moments (B, inputs, inputs) of their inputs."""
    left, made = weight.clone(), torch.empty_like(weight)
    factor = _cholesky_factor(moments, damping).to(weight.dtype)
    inputs = weight.shape[-1]
    for start in range(0, inputs, grid.width):
        end = min(start + grid.width, inputs)
        block, errors = left[..., start:end], torch.empty_like(left[..., start:end])
        grid.begin(start, block)
        for place in range(end - start):
            values, row = block[..., place], factor[..., start + place, start:end]
            made[..., start + place] = grid.nearest(start + place, values)
            error = (values - made[..., start + place]) / row[..., place, None]
            block[..., place:] -= error[..., None] * row[:, None, place:]
            errors[..., place] = error
        left[..., end:] -= errors @ factor[..., start:end, end:]
    return made


def output_errors(weight: Tensor, made: Tensor, moments: Tensor) -> Tensor:
    """Return the squared error of each row's outputs, (w − ŵ)ᵀH(w − ŵ): (B, rows)."""
    lost = (weight - made).double()
    return ((lost @ moments.double()) * lost).sum(-1)


def _cholesky_factor(moments: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of (H + λI)⁻¹; an input that is always 0 counts as independent."""
    wide = moments.double()
    diagonal = wide.diagonal(dim1=-2, dim2=-1)
    if not math.isfinite(float(diagonal.sum())):
        raise InputError("the inputs have NaN or infinite values: check the data and the layers before it")
    size = diagonal.mean(-1, keepdim=True)
    added = torch.where(diagonal > 0, damping * size, torch.where(size > 0, size, 1.0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide + torch.diag_embed(added)))
    return torch.linalg.cholesky(inverse, upper=True)


# The finish of a whole network: layer after layer, each behind the quantized layers in front of it.

_log = logging.getLogger(__name__)
_SHOWN = 4


def finish_(
    model: nn.Module,
    batches: Iterable[Any],
    finish: str,
    *,
    forward: Forward | None = None,
    unreached: Unreached = "raise",
    progress: Progress | None = None,
) -> None:
    """Set the input scales of a quantized model by batches, then finish its weights."""
    kept = list(batches)
    if finish == "round" or any(isinstance(module, InputQuantizer) for module in model.modules()):
        calibrate_(model, kept, forward=forward, unreached=unreached)
    if finish != "round":
        ROUNDINGS.get(finish)(model, kept, forward=forward, unreached=unreached, progress=progress)


def compensate_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    damping: float = DAMPING,
    unreached: Unreached = "raise",
    store: str | Path | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Round the weights of a quantized model anew, so that errors in a layer's outputs cancel.

    Each layer is done after those in front of it, by the second moments of its inputs over all batches, which are as
    `calibrate_` takes them. Quantized inputs must be calibrated before. Afterwards the weights lie on their levels. The
    error of no layer's outputs on these batches is larger than by plain rounding.

    Return the share of that error that is left, by layer. Layers that are no matrix product or convolution of one
    weight used in one place stay rounded, and are named in a warning. `store` is a folder that keeps finished layers: a
    killed call goes on there. Layers from other batches, weights or settings are computed again.
    """
    kept = list(batches)
    if not kept:
        raise InputError("compensated rounding got no batches: give some, as for calibrate_")
    layers = weighted_layers(model)
    work = _Compensation(model, kept, forward, damping, store)
    left: dict[str, float] = {}
    with inference(model), torch.no_grad():
        order = work.order(layers)
        report_unreached([name for name in layers if name not in order], unreached)
        stages = _group_stages(order, plan_of(model).links)
        with _switched_off(layers):
            for number, stage in enumerate(stages):
                left |= work.finish_(stage)
                if progress is not None:
                    progress(number + 1, len(stages), next(iter(stage)))
    _warn_rounded([name for name, layer in layers.items() if name not in left and layer.reads])
    return left


class WeightedLayer(NamedTuple):
    """A layer whose weight is quantized: its site, its quantizer, and the weight."""

    site: Site
    quantizer: WeightQuantizer
    weight: Tensor

    @property
    def reads(self) -> bool:
        """True if it multiplies its weight, and does not only look rows up."""
        return any(place.reads for place in self.site.places)

    @property
    def can_change(self) -> bool:
        """True if the weight is a parameter that is used in one place."""
        return self.reads and isinstance(self.weight, nn.Parameter) and len(self.site.places) == 1


class _Compensation:
    """Runs the network, or only the block that matters, and finishes layers."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        forward: Forward | None,
        damping: float,
        store: str | Path | None,
    ) -> None:
        self.model, self.batches, self.damping = model, batches, damping
        self.forward = forward or run_batch
        self.store = None if store is None else FinishedLayers(store, model, batches, repr(damping))
        self.chains = find_block_sequences(model)
        self.recorded: dict[int, bool] = {}
        self.times: Counter[str] = Counter()

    def order(self, layers: Mapping[str, WeightedLayer]) -> dict[str, WeightedLayer]:
        """Return the layers in the order in which they run, and count their runs."""
        names = {layer.quantizer: name for name, layer in layers.items()}

        def note(module: nn.Module, *_: Any) -> None:
            if module in names:  # and no copy of it, by which a first run is proven
                self.times[names[module]] += 1

        hooks = [quantizer.register_forward_hook(note) for quantizer in names]
        try:
            self.run(self.batches[0])
        finally:
            for hook in hooks:
                hook.remove()
        return {name: layers[name] for name in self.times}

    def run(self, batch: Any) -> Any:
        """Run the whole network."""
        return self.forward(self.model, batch)

    def finish_(self, stage: Mapping[str, WeightedLayer]) -> dict[str, float]:
        """Finish layers that read the same tensor, and return the share of the error that is left for each."""
        changing = {name: layer for name, layer in stage.items() if layer.can_change}
        left = self._take_finished(changing)
        lacking = {name: layer for name, layer in changing.items() if name not in left}
        seen = self.moments(lacking) if lacking else {}
        for layer in stage.values():
            layer.quantizer.enabled = True
        for name, layer in lacking.items():
            share = compensate_layer_(layer, seen[name], self.damping)
            if share is not None:
                left[name] = share
            if share is not None and self.store is not None:
                self.store.keep_layer(name, layer.weight, layer.quantizer, share)
        for name in left:
            stage[name].quantizer.enabled = False  # its weight lies on levels now, and need not be rounded in every run
        return left

    def _take_finished(self, stage: Mapping[str, WeightedLayer]) -> dict[str, float]:
        """Return the layers that an earlier call finished."""
        if self.store is None:
            return {}
        found = {name: self.store.take_layer_(name, layer.weight, layer.quantizer) for name, layer in stage.items()}
        return {name: share for name, share in found.items() if share is not None}

    def moments(self, stage: Mapping[str, WeightedLayer]) -> dict[str, Moments]:
        """Return the moments of the inputs of these layers, over all batches."""
        quantizers = {name: layer.quantizer for name, layer in stage.items()}
        chain, block = self._find_block(quantizers)
        if chain is not None and block is not None:
            chain.reach_(block)
        with watching(quantizers, stop=all(self.times[name] == 1 for name in stage)) as seen:
            if chain is not None and block is not None:
                chain.run_(block)
                return seen
            for batch in self.batches:
                with suppress(Enough):
                    self.run(batch)
        return seen

    def _find_block(self, quantizers: Mapping[str, WeightQuantizer]) -> tuple[BlockSequence | None, int | None]:
        """Return the chain and the block that contain all of these, if the block can be run alone."""
        for number, chain in enumerate(self.chains):
            places = {chain.place(quantizer) for quantizer in quantizers.values()}
            block = places.pop() if len(places) == 1 else None
            if block is None:
                continue
            if number not in self.recorded:
                self.recorded[number] = chain.record_(self.run, self.batches)
            return (chain, block) if self.recorded[number] and block >= chain.next else (None, None)
        return None, None


@torch.no_grad()
def compensate_layer_(layer: WeightedLayer, seen: Moments, damping: float = DAMPING) -> float | None:
    """Round a layer's weight to its levels by moments of its input; return the share of rounding's error that is left.

    Rows for which plain rounding is better are rounded. Return None if the moments do not fit the weight.
    """
    _, quantizer, weight = layer
    if seen.total is None or seen.layout is None:
        return None
    blocks = quantizer.blocks if isinstance(quantizer, GroupedWeight) else Grouping(weight.numel(), seen.layout)
    rows = blocks.rows(weight.detach() if weight.dtype == torch.float64 else weight.detach().float())
    parts, inputs = seen.total.shape[0], seen.total.shape[-1]
    if blocks.channels != seen.layout or rows.shape[1] != inputs:
        return None
    shaped = rows.unflatten(0, (parts, -1))
    rounded = blocks.rows(quantizer(weight).detach()).to(rows.dtype).unflatten(0, (parts, -1))
    grid: FixedLevels | FittedLevels
    if isinstance(quantizer, GroupedWeight):
        zeros, digits = quantizer.zero is not None, quantizer.digits
        grid = FittedLevels(blocks.width(inputs), quantizer.bits, zeros=zeros, digits=digits)
    else:
        steps = blocks.rows(quantizer.steps_for(weight).expand(weight.shape).to(rows))
        grid = FixedLevels(steps.unflatten(0, (parts, -1)), *quantizer.range)
    made = round_compensated(shaped, seen.total, grid, damping=damping)
    before, after = (output_errors(shaped, one, seen.total) for one in (rounded, made))
    better = after < before
    made = torch.where(better[..., None], made, rounded)
    if isinstance(grid, FittedLevels) and isinstance(quantizer, GroupedWeight):
        quantizer.settle_(_choose_levels(better.flatten(), grid.levels, quantizer.in_levels))
    weight.copy_(blocks.whole(made.flatten(0, 1), weight))
    total = float(before.sum())
    return float(torch.where(better, after, before).sum()) / total if total else 1.0


def _choose_levels(better: Tensor, ours: Levels, rounded: Levels) -> Levels:
    """Return the compensated levels of the rows that are better with them, and the rounded levels of the others."""
    step = torch.where(better[:, None], ours.step.float(), rounded.step)
    if ours.zero is None or rounded.zero is None:
        return Levels(step, None)
    return Levels(step, torch.where(better[:, None], ours.zero.float(), rounded.zero))


def weighted_layers(model: nn.Module) -> dict[str, WeightedLayer]:
    """Return every layer whose weight is quantized; raise an error if levels change when weights do."""
    quantizers, found = quantizers_of(model), {}
    for name, site in sites_of(model).items():
        quantizer, weight = quantizers[name].weight, site.weight
        if quantizer is None or weight is None:
            continue
        why = "" if isinstance(quantizer, GroupedWeight) else why_not_uniform(quantizer)
        why = "its levels follow from its weights" if quantizer.follows else why
        if why:
            raise InputError(
                f"layer {name!r} cannot be compensated, {why}: quantize with method groups, lsq or faq, or finish by "
                "rounding"
            )
        found[name] = WeightedLayer(site, quantizer, weight)
    return found


def _group_stages(order: Mapping[str, WeightedLayer], links: Sequence[Sequence[str]]) -> list[dict[str, WeightedLayer]]:
    """Return layers in their order, together if they follow one another and read the same tensor."""
    link_of = {name: number for number, link in enumerate(links) for name in link}
    stages: list[dict[str, WeightedLayer]] = []
    before: int | None = None
    for name, layer in order.items():
        link = link_of.get(name)
        if link is not None and link == before:
            stages[-1][name] = layer
        else:
            stages.append({name: layer})
        before = link
    return stages


@contextmanager
def _switched_off(layers: Mapping[str, WeightedLayer]) -> Iterator[None]:
    """Let weights pass in float until the block ends, or until they are switched on in it."""
    for layer in layers.values():
        layer.quantizer.enabled = False
    try:
        yield
    finally:
        for layer in layers.values():
            layer.quantizer.enabled = True


def _warn_rounded(names: list[str]) -> None:
    if names:
        shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
        _log.warning("%d layers are only rounded, since nothing tells what they read: %s", len(names), shown)
