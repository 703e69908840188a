"""task: make a task of a user's loaders or datasets, a loss and a score.

Batches are read as in `forward/batches.py`, unless `forward` says otherwise.
"""

from __future__ import annotations

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)

from bitplan.adapters.torch import device_of, inference
from bitplan.core.errors import InputError
from bitplan.forward.batches import LABELS, run_batch, split_batch
from bitplan.tasks.base import Batch, Split, Task, samples_in
from bitplan.tasks.images import held_out

_LOOKED_AT = 16  # samples that tell data from other data


class Samples(ABC):
    """Numbered samples. Two are equal if they have the same number of samples and the same fingerprint."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def draw_batches(self, rows: Sequence[Sequence[int]], seed: int) -> Iterator[Batch]:
        """Yield a batch for each sequence of numbers; random numbers in it depend on the seed alone."""

    @abstractmethod
    def part(self, rows: Sequence[int]) -> Self:
        """Return the samples with these numbers."""

    def batches(self, batch_size: int, seed: int | None) -> Iterator[Batch]:
        """Yield one pass: in their own order without a seed, else in that of the seed."""
        order = torch.arange(len(self))
        if seed is not None:
            order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.draw_batches([rows.tolist() for rows in order.split(batch_size)], 0 if seed is None else seed)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of some samples; it is the same in every process."""
        every = sorted({row * (len(self) - 1) // max(1, _LOOKED_AT - 1) for row in range(_LOOKED_AT)})
        digest = hashlib.sha256()
        for batch in self.draw_batches([[row] for row in every if row < len(self)], 0):
            for leaf in tree_leaves(batch):
                digest.update(_bytes(leaf))
        return digest.hexdigest()[:12]

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Samples) and len(self) == len(other)
        return same and self.fingerprint == other.fingerprint  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((len(self), self.fingerprint))

    def __repr__(self) -> str:
        return f"<{len(self):,} samples {self.fingerprint}>"


@dataclass(frozen=True, eq=False, repr=False)
class KeptRows(Samples):
    """Tensors in memory, one row each for every sample; `structure` is a batch with their numbers in their places."""

    tensors: tuple[Tensor, ...]
    structure: Any

    def __len__(self) -> int:
        return len(self.tensors[0])

    def draw_batches(self, rows: Sequence[Sequence[int]], seed: int) -> Iterator[Batch]:
        """Yield the rows; nothing is random here."""
        for some in rows:
            batch = [tensor[list(some)] for tensor in self.tensors]
            yield tree_map(batch.__getitem__, self.structure)

    def part(self, rows: Sequence[int]) -> KeptRows:
        """Return copies of these rows."""
        return KeptRows(tuple(tensor[list(rows)] for tensor in self.tensors), self.structure)

    @classmethod
    def read(cls, batches: Iterable[Any], most: int | None = None) -> KeptRows:
        """Read batches until there are `most` samples, or all; batches that cannot be cut by rows are refused."""
        kept: list[list[Tensor]] = []
        structure, count = None, 0
        for number, batch in enumerate(batches):
            leaves, parts = tree_flatten(_to_dicts(batch))
            own = tree_unflatten(list(range(len(leaves))), parts)
            kept.append([_to_tensor(leaf, number) for leaf in leaves])
            _check_same_shape(kept, own, own if structure is None else structure)
            structure = own
            count += len(kept[-1][0])
            if most is not None and count >= most:
                break
        if structure is None or not count:
            raise InputError("the batches are empty: give at least one, with at least one sample")
        columns = zip(*kept, strict=True)
        return cls(tuple(torch.cat(list(column))[:most] for column in columns), structure)


@dataclass(frozen=True, eq=False, repr=False)
class Indexed(Samples):
    """Items of a dataset by their numbers in it, collated on demand, in `workers` processes if any."""

    dataset: Any
    numbers: Sequence[int]
    collate: Callable[[list[Any]], Batch] = default_collate
    workers: int = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def draw_batches(self, rows: Sequence[Sequence[int]], seed: int) -> Iterator[Batch]:
        """Yield batches whose random numbers depend on seed and number, so that augmentation repeats in any process."""
        wanted = [[self.numbers[row] for row in some] for some in rows]
        seeded = _Seeded(self.dataset, self.collate, seed)
        if self.workers:
            unused = torch.Generator().manual_seed(seed)  # or a pass would draw from the numbers of everybody
            yield from DataLoader(
                seeded, batch_sampler=wanted, collate_fn=seeded.put_together, num_workers=self.workers, generator=unused
            )
            return
        for some in wanted:
            yield seeded.put_together([seeded[number] for number in some])

    def part(self, rows: Sequence[int]) -> Indexed:
        """Return fewer numbers of the same dataset."""
        return Indexed(self.dataset, [self.numbers[row] for row in rows], self.collate, self.workers)


@dataclass(frozen=True)
class _Seeded(Dataset[Any]):
    """A dataset whose items depend on a seed and their number alone."""

    dataset: Any
    collate: Callable[[list[Any]], Batch]
    seed: int

    def __getitem__(self, number: int) -> tuple[int, Any]:
        with _seed_all(self.seed, number):
            return number, self.dataset[number]

    def put_together(self, items: list[tuple[int, Any]]) -> Batch:
        """Return a batch of items; collating may draw too, such as the words to mask."""
        with _seed_all(self.seed, *(number for number, _ in items)):
            return _to_dicts(self.collate([item for _, item in items]))


def samples_of(given: Any, *, most: int | None = None) -> Samples:
    """Return a user's data as samples; of data without a length, at most `most` are read."""
    if isinstance(given, Samples):
        return given
    if isinstance(given, DataLoader):
        return _of_loader(given, most)
    if isinstance(given, Tensor | Mapping):
        return KeptRows.read([given])
    if isinstance(given, list | tuple):
        return KeptRows.read(given)
    if isinstance(given, Dataset) and not isinstance(given, IterableDataset):
        return _index_dataset(given, default_collate, 0)
    if hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, str):
        return _index_dataset(given, default_collate, 0)
    if isinstance(given, Iterable) and not isinstance(given, str):
        return KeptRows.read(given, None if hasattr(given, "__len__") else most)
    raise InputError(
        f"batches are a DataLoader, a Dataset, a batch or any iterable of batches, not {type(given).__name__}"
    )


def check_disjoint(train: Samples, test: Samples) -> None:
    """Refuse splits that are seen to share samples: scores would be of what was trained on."""
    shared = len(train) if train is test else 0
    if isinstance(train, Indexed) and isinstance(test, Indexed) and train.dataset is test.dataset:
        shared = len(set(train.numbers) & set(test.numbers))
    if shared:
        raise InputError(
            f"train and test share {shared:,} samples, so scores would be of what was trained on: give a test split of "
            "its own, such as by torch.utils.data.random_split"
        )


def _of_loader(loader: DataLoader[Any], most: int | None) -> Samples:
    """Return the samples behind a loader, without its order and batch size."""
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return KeptRows.read(loader, most)
    sampler = loader.sampler
    plain = isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement)
    some = isinstance(sampler, SubsetRandomSampler)
    if type(loader.batch_sampler) is not BatchSampler or not (plain or some):
        odd = loader.batch_sampler if plain or some else sampler
        raise InputError(
            f"the loader draws by {type(odd).__name__}, but every sample is to come once, in an order by seed: give "
            "its dataset, or list(loader) to have the batches as they come now"
        )
    found = _index_dataset(loader.dataset, loader.collate_fn, loader.num_workers)
    return found.part(list(sampler.indices)) if isinstance(sampler, SubsetRandomSampler) else found


def _index_dataset(dataset: Any, collate: Callable[[list[Any]], Batch], workers: int) -> Indexed:
    """Return a dataset, or the one that it is a subset of, with the numbers there."""
    numbers: Sequence[int] = range(len(dataset))
    while isinstance(dataset, Subset):
        numbers, dataset = [dataset.indices[number] for number in numbers], dataset.dataset
    return Indexed(dataset, numbers, collate, workers)


@contextmanager
def _seed_all(*parts: int) -> Iterator[None]:
    """Seed torch, numpy and Python from these parts, and restore their random numbers afterwards."""
    mixed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big")
    plain, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(mixed)
        random.seed(mixed)
        np.random.seed(mixed)
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(numpy)


def _to_dicts(batch: Any) -> Any:
    """Return a batch whose mappings are dicts, which torch looks into; Hugging Face's are not."""
    if isinstance(batch, Mapping):
        return {key: _to_dicts(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [_to_dicts(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _to_tensor(leaf: Any, number: int) -> Tensor:
    if isinstance(leaf, np.ndarray):
        leaf = torch.from_numpy(leaf)
    if not isinstance(leaf, Tensor) or not leaf.dim():
        raise InputError(
            f"batch {number} holds {type(leaf).__name__} {leaf!r:.40}, and batches are tensors with a row for each "
            "sample: give a DataLoader, whose dataset may hold anything that its collate_fn understands"
        )
    return leaf


def _check_same_shape(kept: list[list[Tensor]], own: Any, structure: Any) -> None:
    """Refuse batches that cannot be put together: other parts, other shapes, parts of other lengths."""
    first, last = kept[0], kept[-1]
    lengths = {len(leaf) for leaf in last}
    if not last or len(lengths) > 1:
        raise InputError(f"batch {len(kept) - 1} has parts of {sorted(lengths)} rows: all have one for each sample")
    shapes = [[tuple(leaf.shape[1:]) for leaf in leaves] for leaves in (first, last)]
    if own != structure or shapes[0] != shapes[1]:
        raise InputError(
            f"batches 0 and {len(kept) - 1} are not alike ({shapes[0]} and {shapes[1]} without the first dimension), "
            "so they cannot be cut anew: pad them to one length, or give the DataLoader, which collates itself"
        )


def _bytes(leaf: Any) -> bytes:
    """Return the bytes that a fingerprint is made of; for anything but numbers and texts, the type's name."""
    if isinstance(leaf, Tensor):
        flat = leaf.detach().cpu().contiguous()
        return repr((leaf.shape, leaf.dtype)).encode() + flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    return repr(leaf).encode() if isinstance(leaf, str | int | float | bool) else type(leaf).__name__.encode()


_SCORED_AT_ONCE = 64


@dataclass(frozen=True, eq=False, repr=False)
class UserFunction:
    """A function of the user; two are equal if their names and their code are."""

    function: Callable[..., Any]

    def __call__(self, *given: Any) -> Any:
        """Call the function."""
        return self.function(*given)

    def __repr__(self) -> str:
        code = getattr(self.function, "__code__", None)
        if code is None:
            return repr(self.function) if isinstance(self.function, nn.Module) else type(self.function).__qualname__
        digest = hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()[:8]
        return f"{self.function.__module__}.{self.function.__qualname__} {digest}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserFunction) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


@dataclass(frozen=True)
class Loaded(Task):
    """Samples with a loss and a score, as `task` makes it."""

    name: str
    metric: str
    higher_is_better: bool
    train: Samples
    test: Samples | None = None
    of_loss: UserFunction | None = None
    of_score: UserFunction | None = None
    run: UserFunction | None = None
    of_answers: UserFunction | None = None
    version = 1

    def example(self) -> Any:
        """Return the input of one sample."""
        batch = next(iter((self.test or self.train).batches(1, None)))
        positional, keyword, _ = split_batch(batch)
        if keyword:
            return {key: value for key, value in keyword.items() if isinstance(value, Tensor) and key != LABELS}
        return positional[0] if len(positional) == 1 else positional

    def size(self, split: Split) -> int:
        """Return how many samples a split has."""
        samples = self._of(split)
        return 0 if samples is None else len(samples)

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterable[Batch]:
        """Yield one pass over a split."""
        if batch_size < 1:
            raise InputError(f"a batch has at least one sample, not {batch_size}")
        samples = self._of(split)
        return () if samples is None else samples.batches(batch_size, seed)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model on a batch, by the user's `forward` if there is one."""
        return run_batch(model, batch) if self.run is None else self.run(model, batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the user's loss, or the one that the model returns with its outputs."""
        if self.of_loss is None:
            return _loss_of_model(outputs)
        loss: Any = self.of_loss(outputs, _get_labels(batch))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(f"the loss is one number for a batch, a mean over its samples, not {shown}")
        return loss

    def logits(self, outputs: Any) -> tuple[Tensor, ...]:
        """Return class scores, classes in dimension 1."""
        return answers_of(outputs) if self.of_answers is None else _to_tuple(self.of_answers(outputs))

    def batch_score(self, outputs: Any, batch: Batch) -> float:
        """Return the user's score of a batch; NaN without one."""
        return math.nan if self.of_score is None else float(self.of_score(outputs, _get_labels(batch)))

    def score(self, model: nn.Module) -> float:
        """Return the mean score over the samples of the test split; without a score, the mean loss."""
        device, total = device_of(model), 0.0
        with inference(model), torch.no_grad():
            for batch in self.batches("test", _SCORED_AT_ONCE):
                here = tree_map_only(Tensor, lambda leaf: leaf.to(device), batch)
                outputs = self.forward(model, here)
                measured = self.loss(outputs, here) if self.of_score is None else self.batch_score(outputs, here)
                total += float(measured) * samples_in(batch)
        return total / max(1, self.size("test"))

    def hold_out(self, share: float) -> tuple[Self, Self]:
        """Return the task without a share of its training samples, and one whose test split is that share."""
        stay, held = held_out(len(self.train), share)
        return replace(self, train=self.train.part(stay)), replace(self, test=self.train.part(held))

    def _of(self, split: Split) -> Samples | None:
        if split not in ("train", "test"):
            raise InputError(f"a task has the splits train and test, not {split!r}")
        return self.train if split == "train" else self.test


def task(
    *,
    train: Any,
    test: Any = None,
    loss: Callable[[Any, Any], Any] | None = None,
    score: Callable[[Any, Any], Any] | None = None,
    higher_is_better: bool = True,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    answers: Callable[[Any], Any] | None = None,
    name: str = "yours",
) -> Task:
    """Return a task of data, a loss and a score, for `finetune_`, `evaluate`, `Context(task=…)` and studies.

    `train` and `test` are each a DataLoader, a Dataset, or batches. Of a loader its dataset, `collate_fn` and workers
    are used; order and size of batches are asked for anew, by seed and recipe. A plain iterable of batches is read
    once and kept in memory, so augmentation stays as it was drawn then, and its batches must be alike in shape.

    `loss(outputs, labels)` is a mean over samples; without it a model's own is taken (`outputs.loss`, as Hugging Face
    models give it for batches with labels). `score(outputs, labels)` is a mean over samples too, better where it is
    higher unless said; without it the loss is the score. `answers(outputs)` gives class scores, classes in dimension 1,
    where `answers_of` would not find them; `forward(model, batch)` runs a model where a batch is read otherwise.
    Functions must be importable (no lambdas) to travel to other processes.
    """
    samples = samples_of(train)
    tested = None if test is None else samples_of(test)
    if tested is not None:
        check_disjoint(samples, tested)
    metric = "loss" if score is None else getattr(score, "__name__", type(score).__name__).replace("<lambda>", "score")
    return Loaded(
        name=name,
        metric=metric,
        higher_is_better=higher_is_better and score is not None,
        train=samples,
        test=tested,
        of_loss=_wrap(loss),
        of_score=_wrap(score),
        run=_wrap(forward),
        of_answers=_wrap(answers),
    )


def _wrap(function: Callable[..., Any] | None) -> UserFunction | None:
    return None if function is None else UserFunction(function)


def answers_of(outputs: Any) -> tuple[Tensor, ...]:
    """Return the class scores among a model's outputs, classes in dimension 1, for distillation and `drift`.

    They are the outputs, their first part, or their `logits` (or `start_logits` and `end_logits`). Of three dimensions
    the last one holds the classes, as in language models. One column is the score of yes against no.
    """
    read = outputs.get if isinstance(outputs, Mapping) else lambda key: getattr(outputs, key, None)
    start, end = read("start_logits"), read("end_logits")
    if isinstance(start, Tensor) and isinstance(end, Tensor):
        return start, end
    found = outputs if isinstance(outputs, Tensor) else read("logits")
    if found is None:
        found = next((leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.dim()), None)
    if found is None:
        raise InputError(
            f"no class scores are found in what the model returns ({type(outputs).__name__}): say where they are, "
            "answers=… of bitplan.task"
        )
    scores = found[:, None] if found.dim() == 1 else found.movedim(-1, 1) if found.dim() == 3 else found
    return (torch.cat([scores, torch.zeros_like(scores)], 1) if scores.shape[1] == 1 else scores,)


def _loss_of_model(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor):
        raise InputError(
            "the loss of these batches is not known: give loss=…, a function of outputs and labels "
            "(torch.nn.functional.cross_entropy, say), or batches with labels for a model that returns its own loss; "
            "on the command line --task package.module:task, a function that returns bitplan.task(…)"
        )
    return loss.mean()


def _get_labels(batch: Batch) -> Any:
    labels = split_batch(batch)[2]
    if labels is None:
        raise InputError(
            "the batches have no labels, which the loss and the score are computed with: give pairs of inputs and "
            f"labels, or mappings with {LABELS!r}"
        )
    return labels


def _to_tuple(answers: Any) -> tuple[Tensor, ...]:
    return tuple(answers) if isinstance(answers, tuple | list) else (answers,)
