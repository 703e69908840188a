"""The training loss: the task's own, mixed with what a teacher says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from bitplan.adapters.torch import widen_tensor
from bitplan.core.errors import InputError
from bitplan.core.naming import CALL_QUANTIZERS, INPUT_QUANTIZER, WEIGHT_QUANTIZER, join_names
from bitplan.core.trials import TAUGHT, Recipe
from bitplan.quant.functions import SOFTMAX, open_attention
from bitplan.quant.layers import original_class
from bitplan.quant.lsq import MASK
from bitplan.tasks.base import Batch, Task

Logits = tuple[Tensor, ...]


def divergence(student: Logits, teacher: Logits, temperature: float) -> Tensor:
    """Return T²·KL(teacher ‖ student) of softened class scores (B, classes, …), a mean over all else and the tuple.

    Hinton et al. 2015, section 2: T² keeps the size of the gradient independent of the temperature.
    """
    means = []
    for own, taught in zip(student, teacher, strict=True):
        dim, own, taught = 1, widen_tensor(own), widen_tensor(taught)
        if own.dim() > 2 and own.stride(1) == 1:  # classes lie side by side, as words do: faster as the last axis
            dim, own, taught = -1, own.movedim(1, -1), taught.movedim(1, -1)
        log_p = F.log_softmax(taught / temperature, dim=dim)  # (B, classes, …)
        log_q = F.log_softmax(own / temperature, dim=dim)
        divergences = (log_p.exp() * (log_p - log_q)).sum(dim=dim)  # (B, …)
        means.append(divergences.mean())
    return temperature**2 * torch.stack(means).mean()


def check_teacher(model: nn.Module, teacher: nn.Module | None, recipe: Recipe) -> None:
    """Refuse a teacher without a part in the recipe, and the reverse."""
    if teacher is None and recipe.distills:
        name, value = next(
            (name, getattr(stage, name)) for stage in recipe.stages for name in TAUGHT if getattr(stage, name)
        )
        raise InputError(
            f"the recipe distills ({name} = {value:g}) but there is no teacher: give one, --recipe teacher=NAME "
            "(in Python: teacher=…)"
        )
    if teacher is not None and not recipe.distills:
        raise InputError("there is a teacher but the recipe does not distill: set distill above 0, or pass no teacher")
    if teacher is model:
        raise InputError("the model cannot be its own teacher: pass a copy of it as it was (copy.deepcopy)")


def objective(
    task: Task, outputs: Any, batch: Batch, teacher: nn.Module | None, recipe: Recipe, states: States | None = None
) -> Tensor:
    """Return (1 − distill)·loss + distill·divergence from the teacher, plus the distances of `states` from its.

    The gradient of the divergence is that of soft cross-entropy: they differ by a term of the teacher alone.
    """
    if teacher is None:
        return task.loss(outputs, batch)
    with torch.no_grad(), watch_states(teacher, recipe) as theirs:
        answers = task.forward(teacher, batch)
    if recipe.distill:
        taught, own = task.logits(answers), task.logits(outputs)
        _check_shapes(own, taught)
        loss = recipe.distill * divergence(own, taught, recipe.temperature)
    else:
        loss = task.loss(outputs, batch)
    if 0 < recipe.distill < 1:
        loss = (1 - recipe.distill) * task.loss(outputs, batch) + loss
    own_states = states or States()
    if recipe.distill_hidden:
        apart = difference(own_states.hidden, theirs.hidden, "hidden states", "distill_hidden")
        loss = loss + recipe.distill_hidden * apart
    if recipe.distill_attention:
        apart = difference(own_states.scores, theirs.scores, "attention scores", "distill_attention")
        loss = loss + recipe.distill_attention * apart
    return loss


def _check_shapes(student: Logits, teacher: Logits) -> None:
    own, taught = _shapes(student), _shapes(teacher)
    if own != taught:
        raise InputError(
            f"the teacher has other classes: its scores are {taught}, the model's {own}; "
            "take a teacher that was made for the same task"
        )


def _shapes(logits: Logits) -> str:
    return " and ".join(str(tuple(scores.shape)) for scores in logits)


# Hidden states and attention scores of a network, found by its structure.

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_QUANTIZERS = (WEIGHT_QUANTIZER, INPUT_QUANTIZER, CALL_QUANTIZERS)
_LEAST_DIMENSIONS = 3


@dataclass(frozen=True)
class States:
    """Tensors seen in one forward pass, in the order of the calls."""

    hidden: list[Tensor] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)


@contextmanager
def watch_states(model: nn.Module, recipe: Recipe) -> Iterator[States]:
    """Record the states of the forward pass in this block that a recipe compares with a teacher's."""
    seen = States()
    with ExitStack() as stack:
        if recipe.distill_hidden:
            for handle in _hook_blocks(model, seen.hidden):
                stack.callback(handle.remove)
        if recipe.distill_attention:
            stack.enter_context(_show_attention())
            stack.enter_context(_AttentionScores(seen.scores))
        yield seen


@contextmanager
def _show_attention() -> Iterator[None]:
    """Let torch's attention call functions, in inference too, instead of one closed routine."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def difference(own: list[Tensor], taught: list[Tensor], what: str, option: str) -> Tensor:
    """Return the sum of the mean squared differences of every pair, as in TernaryBERT; masks count as equal."""
    if not own or not taught:
        raise InputError(
            f"the recipe compares {what} with the teacher's ({option} is above 0), and no {what} were found in "
            f"{'the model' if not own else 'the teacher'}: set {option} to 0"
        )
    shapes = [[tuple(state.shape) for state in states] for states in (own, taught)]
    if shapes[0] != shapes[1]:
        theirs, ours = (f"{len(found)} of {found[0]}" for found in (shapes[1], shapes[0]))
        raise InputError(
            f"the teacher has other {what}: {theirs}, the model {ours}; take a teacher of the same structure, or set "
            f"{option} to 0"
        )
    means = [_square_differences(one, other.to(one.dtype)).mean() for one, other in zip(own, taught, strict=True)]
    return torch.stack(means).sum()


def _square_differences(own: Tensor, taught: Tensor) -> Tensor:
    masked = (own < MASK) | (taught < MASK)
    return torch.where(masked, 0.0, own - taught).square() if bool(masked.any()) else (own - taught).square()


def blocks_of(model: nn.Module) -> dict[str, list[str]]:
    """Return the blocks of a network: the path of each row of blocks → the paths of its blocks."""
    rows: dict[str, list[str]] = {}
    _find_rows(model, "", rows)
    return rows


def _find_rows(module: nn.Module, path: str, rows: dict[str, list[str]]) -> None:
    parts = _parts_of(module)
    alike = Counter(original_class(part) for part in parts.values() if _may_repeat(part))
    for name, part in parts.items():
        if _may_repeat(part) and alike[original_class(part)] > 1:
            rows.setdefault(path, []).append(join_names(path, name))
        else:
            _find_rows(part, join_names(path, name), rows)


def _may_repeat(module: nn.Module) -> bool:
    """Return True if a module could be a block: no list, and with modules inside."""
    return not issubclass(original_class(module), _LISTS) and bool(_parts_of(module))


def _parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside that are not its quantizers."""
    return {name: child for name, child in module.named_children() if name not in _QUANTIZERS}


def _hook_blocks(model: nn.Module, seen: list[Tensor]) -> list[RemovableHandle]:
    """Record the outputs of blocks, and the input of each row's first block unless another block made it."""

    def read(_: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        state = _first_tensor((*given, *named.values()))
        if state is not None and not is_fake(state) and not any(state is one for one in seen):
            seen.append(state)

    def write(_: nn.Module, __: Any, out: Any) -> None:
        state = _first_tensor(out)
        if state is not None and not is_fake(state):
            seen.append(state)

    handles: list[RemovableHandle] = []
    for row in blocks_of(model).values():
        handles.append(model.get_submodule(row[0]).register_forward_pre_hook(read, with_kwargs=True))
        handles += [model.get_submodule(path).register_forward_hook(write) for path in row]
    return handles


def _first_tensor(out: Any) -> Tensor | None:
    """Return the first float tensor among a module's inputs or outputs."""
    if isinstance(out, Tensor):
        return out if out.is_floating_point() else None
    parts = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple | list) else ()
    return next((found for part in parts if (found := _first_tensor(part)) is not None), None)


class _AttentionScores(TorchFunctionMode):
    """Record the tensors that attention's softmax reads."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return open_attention(*args, **given)
        if func in SOFTMAX:
            operand = args[0] if args else given["input"]
            dim = args[1] if len(args) > 1 else given.get("dim")
            if operand.dim() >= _LEAST_DIMENSIONS and dim in (-1, operand.dim() - 1) and not is_fake(operand):
                self._seen.append(operand)
        elif func is F.scaled_dot_product_attention and not is_fake(args[0] if args else given["query"]):
            self._seen.append(_scores(*args, **given))
        return func(*args, **given)


def _scores(query: Tensor, key: Tensor, *_: Any, scale: float | None = None, **__: Any) -> Tensor:
    """Return q·kᵀ·scale of (…, heads, L, d) and (…, heads or fewer, S, d)."""
    if key.dim() > 2 and key.shape[-3] != query.shape[-3]:  # fewer keys than queries, each shared by a group
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    return query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
