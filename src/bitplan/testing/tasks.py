"""The contract of tasks."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitplan.adapters.torch import inference
from bitplan.tasks.base import Split, Task
from bitplan.testing.contract import Contract, NeedsMore
from bitplan.testing.networks import classifier_for

_BATCH = 7
Leaves = list[list[Tensor]]
"""The tensors of every batch of a pass, in order."""


def check_task(task: Task, *, model: nn.Module | None = None) -> None:
    """Hold a task to its contract; `model` is a network for it, unless it classifies tensors (B, features, …).

    All of its data is read a few times: give it a small part of a large data set.
    """
    contract = Contract(f"task {getattr(task, 'name', type(task).__name__)}")
    contract.has_all_of(task, Task, "a task")
    contract.clause("its version is a whole number from 1", isinstance(task.version, int) and task.version >= 1)
    contract.clause("higher_is_better is True or False", isinstance(task.higher_is_better, bool))
    splits: tuple[Split, ...] = get_args(Split)
    for split in splits:
        _check_passes(contract, task, split)
    in_both = _rows(task, splits[0]).keys() & _rows(task, splits[1]).keys()
    contract.clause("the splits are disjoint", not in_both, f"{len(in_both)} samples are in both")
    _check_sent(contract, task)
    _check_held_out(contract, task)
    network = classifier_for(task.example()) if model is None else model
    if network is None or (model is None and not _fits(task, network)):
        raise NeedsMore(f"{contract.thing} is no classification of tensors: check_task(task, model=…)")
    _check_network(contract, task, network)
    _check_score(contract, task, network)


def _check_passes(contract: Contract, task: Task, split: Split) -> None:
    with contract.works(f"a pass over the {split} split works"):
        plain, size = _passed(task, split), task.size(split)
    contract.clause("a batch is made of tensors", all(plain), f"one of the {split} split has none")
    counts = [len(batch[0]) for batch in plain]
    clause = "a pass gives every sample once"
    contract.clause(clause, sum(counts) == size, f"{sum(counts)} of {size} of the {split} split")
    longest = max(counts, default=0)
    contract.clause("a batch has at most batch_size samples", longest <= _BATCH, f"{longest} instead of {_BATCH}")
    contract.clause("without a seed the order is its own", _same(plain, _passed(task, split)), split)
    first = _passed(task, split, 5)
    contract.clause(clause, sum(len(batch[0]) for batch in first) == size, f"shuffled, of the {split} split")
    contract.clause("a seed gives the same batches", _same(first, _passed(task, split, 5)), split)
    contract.clause("a seed shuffles", size < 2 or not _same(first, plain), f"not the {split} split")
    other = _same(first, _passed(task, split, 6))
    contract.clause("another seed gives another order", size < 3 or not other, f"not of the {split} split")


def _check_sent(contract: Contract, task: Task) -> None:
    """To another process, as engines do."""
    clause = "it can be sent to another process"
    with contract.works(clause):
        sent = pickle.loads(pickle.dumps(task))
    contract.clause(clause, sent == task, "what arrives is not equal")
    contract.clause(clause, _same(_passed(sent, "test"), _passed(task, "test")), "it has other data there")


def _check_held_out(contract: Contract, task: Task) -> None:
    """Where the task can."""
    if type(task).hold_out is Task.hold_out or task.size("train") < 2:
        return
    clause = "what is held out of the training split, and what stays, make it up"
    with contract.works(clause):
        trained, judging = task.hold_out(0.3)
        stay, held = _rows(trained, "train"), _rows(judging, "test")
    made_up = stay + held == _rows(task, "train")
    contract.clause(clause, bool(stay and held and made_up), f"{held.total()} and {stay.total()} samples")


def _check_network(contract: Contract, task: Task, network: nn.Module) -> None:
    """Loss, logits and the score of a batch."""
    batch = next(iter(task.batches("train", _BATCH, seed=0)))
    with contract.works("a network can be run on a batch"), inference(network):
        outputs = task.forward(network, batch)
        loss, logits, score = task.loss(outputs, batch), task.logits(outputs), task.batch_score(outputs, batch)
    contract.clause("the loss is one number", isinstance(loss, Tensor) and loss.numel() == 1)
    contract.clause("the loss is finite", bool(loss.isfinite()), loss.item())
    contract.clause("the loss can be differentiated", loss.requires_grad)
    scores = isinstance(logits, tuple) and all(isinstance(part, Tensor) and part.dim() > 1 for part in logits)
    contract.clause("logits are a tuple of tensors, classes in dimension 1", scores)
    contract.clause("the score of a batch is a number", isinstance(score, float | int), repr(score))


def _check_score(contract: Contract, task: Task, network: nn.Module) -> None:
    network.train()
    norms = [
        module for module in network.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.LayerNorm)
    ]
    for norm in norms[:1]:
        norm.eval()  # as a frozen norm is: modes differ within a network
    with contract.leaves_as_it_was(network), contract.works("it scores a network"):
        first, second = task.score(network), task.score(network)
        scores = dict(task.scores(network))
    contract.clause(
        "the score is a finite number", isinstance(first, float | int) and math.isfinite(first), repr(first)
    )
    contract.clause("the score repeats", first == second, f"{first}, then {second}")
    contract.clause("scores has the metric, and it is the score", scores.get(task.metric) == first, scores)


def _fits(task: Task, network: nn.Module) -> bool:
    """Whether the network that stands in for one of the task's own can be run on it."""
    try:
        batch = next(iter(task.batches("train", 2)))
        with inference(network), torch.no_grad():
            task.loss(task.forward(network, batch), batch)
    except Exception:  # whatever a task says to a network that is not its own
        return False
    return True


def _rows(task: Any, split: str) -> Counter[bytes]:
    """How often each sample is in a split, by the bytes of its first tensor."""
    return Counter(row.numpy().tobytes() for batch in _passed(task, split) for row in batch[0])


def _passed(task: Any, split: str, seed: int | None = None) -> Leaves:
    batches = task.batches(split, _BATCH, seed)
    return [[leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)] for batch in batches]


def _same(first: Sequence[Sequence[Tensor]], second: Sequence[Sequence[Tensor]]) -> bool:
    return len(first) == len(second) and all(
        len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for one, other in zip(first, second, strict=True)
    )
