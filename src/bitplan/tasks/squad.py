"""SQuAD v1.1: the answer to a question is a span of the text beside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.adapters.tokenizers import WordPieces, load_word_pieces
from bitplan.adapters.torch import device_of, inference
from bitplan.core.errors import InputError
from bitplan.tasks.base import Split, Task
from bitplan.tasks.images import check_counts, check_request, generator_of, order
from bitplan.tasks.spans import MARKS, Batch, Best, Shape, Windows, best_spans, cut, gather
from bitplan.tasks.splits import Splits, held_out
from bitplan.tasks.squad_files import Question, read_questions
from bitplan.tasks.squad_metric import exact_match, f1

_SCORED_AT_ONCE = 32
_DRAW = 0  # which questions a limited number is


@final
@dataclass(frozen=True)
class Squad(Splits[Windows], Task):
    """From `train-v1.1.json` and `dev-v1.1.json` as published, or parquet files `*train*` and `*dev*.parquet`.

    A sample is a window: [CLS] question [SEP] part of the context [SEP], `tokens` long; the next window of a context
    begins `stride` tokens later, as in Devlin et al. 2018. `questions` and `test_questions` limit the two splits to as
    many questions, drawn once from all of it (a smaller draw is part of a larger one). `tokenizer` is the folder
    of the model's `tokenizer.json` or `vocab.txt`. An answer has at most `answer_tokens`.
    """

    data: str | Path = "data/squad"
    tokenizer: str | Path = "data/bert"
    tokens: int = 384
    stride: int = 128
    question_tokens: int = 64
    answer_tokens: int = 30
    n_best: int = 20
    questions: int | None = None
    test_questions: int | None = None

    name = "squad"
    metric = "F1"
    higher_is_better = True
    version = 1

    def __post_init__(self) -> None:
        check_counts(self, ("tokens", "stride", "question_tokens", "answer_tokens", "n_best"))
        limits = ("questions", "test_questions")
        check_counts(self, tuple(option for option in limits if getattr(self, option) is not None))
        room = self.tokens - self.question_tokens - MARKS
        if room < 1:
            least = self.question_tokens + MARKS + 1
            raise InputError(
                f"tokens is {self.tokens}, which a question of {self.question_tokens} tokens (question_tokens) fills: "
                f"raise tokens to at least {least}, or lower question_tokens"
            )
        if self.stride > room:
            raise InputError(
                f"stride is {self.stride}, but a window of {self.tokens} tokens may have room for only {room} after "
                f"its question, so tokens between two windows would be lost: lower stride to {room} or less (half of "
                "it lets windows overlap)"
            )

    def example(self) -> dict[str, Tensor]:
        """One window."""
        ids = torch.zeros(1, self.tokens, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Batch]:
        """One pass over a split."""
        check_request(split, batch_size)
        return self._passed(split, batch_size, seed)

    def _passed(self, split: Split, batch_size: int, seed: int | None) -> Iterator[Batch]:
        windows = self._data(split)
        for rows in order(len(windows), batch_size, generator_of(seed)):
            yield windows.batch(rows)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model on the windows of a batch."""
        self._check_model(model)
        return model(input_ids=batch.ids, attention_mask=batch.mask, token_type_ids=batch.types)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The mean of the cross-entropies of start and end, a mean over the windows."""
        start, end = self.logits(outputs)
        return (F.cross_entropy(start, batch.starts) + F.cross_entropy(end, batch.ends)) / 2

    def logits(self, outputs: Any) -> tuple[Tensor, Tensor]:
        """Scores of each token as the first and as the last of the answer, (B, tokens) each."""
        return outputs[0], outputs[1]

    def batch_score(self, outputs: Any, batch: Batch) -> float:
        """Percent of windows whose best start and best end are both right."""
        start, end = self.logits(outputs)
        right = (start.argmax(1) == batch.starts) & (end.argmax(1) == batch.ends)
        return 100 * float(right.double().mean())

    def score(self, model: nn.Module) -> float:
        """F1 on the test split."""
        return self.scores(model)["F1"]

    def scores(self, model: nn.Module) -> dict[str, float]:
        """`F1` and `exact match` on the test split, in percent, means over its questions."""
        guesses = self.answers(model)
        f1s: list[float] = []
        matches: list[float] = []
        for question in self._test_questions:
            best, *_ = guesses[question.id] or [""]
            wanted = [text for text, _ in question.answers]
            f1s.append(f1(best, wanted))
            matches.append(exact_match(best, wanted))
        return {"F1": 100 * sum(f1s) / len(f1s), "exact match": 100 * sum(matches) / len(matches)}

    def answers(self, model: nn.Module) -> dict[str, list[str]]:
        """The `n_best` answers to each test question by its id, the best over all windows first."""
        windows = self._data("test")
        with inference(model), torch.no_grad():
            places = gather(windows, self._found(model, windows), self.n_best)
        answers: dict[str, list[str]] = {}
        for number, question in enumerate(self._test_questions):
            answers[question.id] = [question.context[begin:end] for begin, end in places.get(number, [])]
        return answers

    def _found(self, model: nn.Module, windows: Windows) -> Iterator[tuple[Tensor, Best]]:
        """The rows of each batch of test windows, and their best spans."""
        device = device_of(model)
        for batch in self.batches("test", _SCORED_AT_ONCE):
            here = Batch(*(part.to(device) for part in batch))
            logits = self.logits(self.forward(model, here))
            yield batch.rows, best_spans(logits, windows.parts(batch.rows), self.answer_tokens, self.n_best)

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model whose embeddings have no place for these tokens, where its configuration says so."""
        config = next((module.config for module in model.modules() if hasattr(module, "config")), None)
        longest = getattr(config, "max_position_embeddings", None)
        words = getattr(config, "vocab_size", None)
        if longest is not None and self.tokens > longest:
            raise InputError(
                f"a context longer than the model takes: windows have {self.tokens} tokens, the model has positions "
                f"for {longest}; set tokens to {longest} or less"
            )
        if words is not None and self._pieces.words > words:
            raise InputError(
                f"the tokenizer in {self.tokenizer} has {self._pieces.words} words, the model {words}: "
                "take the tokenizer of the model"
            )

    def hold_out(self, share: float) -> tuple[Self, Self]:
        """Whole questions are held out, with all of their windows."""
        questions = self._train_questions
        stay, held = ([questions[row] for row in rows] for rows in held_out(len(questions), share))
        judging = copy.copy(self)
        judging.__dict__["_test_questions"] = held
        return self._with("train", self._cut(stay)), judging

    def _read(self, split: Split) -> Windows:
        return self._cut(self._test_questions if split == "test" else self._train_questions)

    def _cut(self, questions: list[Question]) -> Windows:
        return cut(questions, self._pieces, Shape(self.tokens, self.stride, self.question_tokens))

    @property
    def _train_questions(self) -> list[Question]:
        return _drawn(read_questions(Path(self.data), "train"), self.questions)

    @cached_property
    def _test_questions(self) -> list[Question]:
        return _drawn(read_questions(Path(self.data), "test"), self.test_questions)

    @cached_property
    def _pieces(self) -> WordPieces:
        return load_word_pieces(Path(self.tokenizer))

    def __getstate__(self) -> dict[str, Any]:
        """Only the options travel to another process; the data is read again there."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _drawn(questions: list[Question], count: int | None) -> list[Question]:
    if count is None or count >= len(questions):
        return questions
    ticket = np.random.RandomState(_DRAW).permutation(len(questions))  # numpy keeps this stream for ever
    return [questions[row] for row in sorted(ticket[:count])]
