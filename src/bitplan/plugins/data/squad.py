"""SQuAD v1.1: the answer to a question is a span of the text beside it."""

from __future__ import annotations

import copy
import math
import re
import string
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.adapters.parquet import read_columns
from bitplan.adapters.tokenizers import Pieces, WordPieces, load_word_pieces
from bitplan.adapters.torch import device_of, inference
from bitplan.core.errors import FileError, InputError
from bitplan.core.parsing import explain_failures, parse_json
from bitplan.plugins.data.encoded_images import parquet_files
from bitplan.store.files import read_text
from bitplan.tasks.base import Split, Task
from bitplan.tasks.images import Splits, check_counts, check_request, generator_of, held_out, order, other_split

# Contexts cut into windows that overlap, and the best spans of all windows put together again.

MARKS = 3  # [CLS] question [SEP] context [SEP]


@dataclass(frozen=True)
class Shape:
    """The tokens of a window, the distance to the next window, and the most tokens of a question."""

    tokens: int
    stride: int
    question: int


class Batch(NamedTuple):
    """Windows (B, tokens): ids, mask (0 for padding), types (1 in the context). Answers (B,): first and last token.

    Both are 0 ([CLS]) if the answer is not in the window. `rows` (B,) are the numbers of the windows in the split.
    """

    ids: Tensor
    mask: Tensor
    types: Tensor
    starts: Tensor
    ends: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Windows:
    """The windows of a split. Texts are stored once, as flat int32 tensors; a window is put together on demand.

    `table` (N, 7) has, for each window: its question; begin and length of the question's ids in `ids`; those of its
    part of the context; and the answer's first and last token in the window.
    """

    ids: Tensor
    offsets: Tensor  # (len(ids), 2): where each token begins and ends in its text
    table: Tensor
    pieces: WordPieces
    tokens: int

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, rows: Tensor) -> Batch:
        """Return these windows, padded to their full length."""
        ids = torch.full((len(rows), self.tokens), self.pieces.padding)
        mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
        chosen = self.table[rows]
        for row, (_, asked, length, begin, part, _, _) in enumerate(chosen.tolist()):
            context = length + 2  # where it begins: after [CLS] question [SEP]
            end = context + part + 1
            ids[row, 0] = self.pieces.begin
            ids[row, 1 : context - 1] = self.ids[asked : asked + length]
            ids[row, context - 1] = ids[row, end - 1] = self.pieces.between
            ids[row, context : end - 1] = self.ids[begin : begin + part]
            mask[row, :end] = 1
            types[row, context:end] = 1
        return Batch(ids, mask, types, chosen[:, 5].long(), chosen[:, 6].long(), rows)

    def parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the begin and the end of the context in each window, (B,) each."""
        begin = self.table[rows, 2].long() + 2
        return begin, begin + self.table[rows, 4]

    def places(self, row: int, spans: Sequence[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
        """Return the question of a window, and the begin and end of token spans in the context, in characters."""
        question, _, length, begin, part, *_ = self.table[row].tolist()
        offsets = self.offsets[begin : begin + part].tolist()
        context = length + 2
        places = []
        for first, last in spans:
            first_begins, _ = offsets[first - context]
            _, last_ends = offsets[last - context]
            places.append((first_begins, last_ends))
        return question, places


def cut(questions: Sequence[Question], pieces: WordPieces, shape: Shape) -> Windows:
    """Tokenize everything once and list the windows: for each question, one every `stride` tokens of its context."""
    contexts = list(dict.fromkeys(question.context for question in questions))  # many questions share one
    place_of = {context: place for place, context in enumerate(contexts)}
    texts = [*pieces(contexts), *pieces([question.question for question in questions])]
    begins = [0, *accumulate(len(text.ids) for text in texts)]  # of each text in the ids of all
    table = []
    for number, question in enumerate(questions):
        place, asked = place_of[question.context], len(contexts) + number
        context = texts[place]
        length = min(len(texts[asked].ids), shape.question)
        span = answer_tokens(context, *question.answers[0])
        room = shape.tokens - length - MARKS
        for begin, part in windows_of(len(context.ids), room, shape.stride):
            answer = _place_in_window(span, begin, part, length + 2)
            table.append((number, begins[asked], length, begins[place] + begin, part, *answer))
    ids = list(chain.from_iterable(text.ids for text in texts))
    offsets = list(chain.from_iterable(text.offsets for text in texts))
    return Windows(
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(offsets, dtype=torch.int32).reshape(-1, 2),
        torch.tensor(table, dtype=torch.int32).reshape(-1, 7),
        pieces,
        shape.tokens,
    )


def windows_of(length: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return begin and length of each window over a context: the last one reaches its end."""
    begins = [0]
    while begins[-1] + room < length:
        begins.append(begins[-1] + stride)
    return [(begin, min(room, length - begin)) for begin in begins]


def answer_tokens(context: Pieces, text: str, start: int) -> tuple[int, int]:
    """Return the first and last token that share a character with an answer; first > last if none does."""
    first = bisect_right(context.offsets, start, key=itemgetter(1))
    last = bisect_left(context.offsets, start + len(text), key=itemgetter(0)) - 1
    return first, last


def _place_in_window(span: tuple[int, int], begin: int, part: int, shift: int) -> tuple[int, int]:
    """Return an answer's first and last token in a window with its context at `shift`; [CLS] if it is not in it."""
    first, last = span
    if not begin <= first <= last < begin + part:
        return 0, 0
    return first - begin + shift, last - begin + shift


class Best(NamedTuple):
    """The best spans of each window, (B, n) each, the best first; a score of −inf is no span."""

    scores: Tensor
    starts: Tensor
    ends: Tensor


def best_spans(logits: tuple[Tensor, Tensor], parts: tuple[Tensor, Tensor], longest: int, n_best: int) -> Best:
    """Return the spans of at most `longest` tokens inside each window's context with the highest start + end score.

    All of them are compared, not only those of the best starts and ends.
    """
    count, tokens = logits[0].shape
    device = logits[0].device
    place = torch.arange(tokens, device=device)
    begin, stop = (bound.to(device)[:, None] for bound in parts)  # (B, 1)
    outside = (place < begin) | (place >= stop)
    start, end = (scores.float().masked_fill(outside, -torch.inf) for scores in logits)  # (B, T)
    padded = torch.nn.functional.pad(end, (0, longest - 1), value=-torch.inf)
    sums = start[:, :, None] + padded.unfold(1, longest, 1)  # (B, T, longest): a start, and how much later the end
    scores, flat = sums.reshape(count, -1).topk(min(n_best, tokens * longest), dim=1)
    starts, later = flat // longest, flat % longest
    return Best(scores, starts, starts + later)


def gather(windows: Windows, found: Iterable[tuple[Tensor, Best]], n_best: int) -> dict[int, list[tuple[int, int]]]:
    """Return the best places of each question over all of its windows, the best first, each place once."""
    by_question: dict[int, dict[tuple[int, int], float]] = {}  # question → place → its highest score
    for rows, best in found:
        by_window = zip(rows.tolist(), best.scores.tolist(), best.starts.tolist(), best.ends.tolist(), strict=True)
        for row, scores, starts, ends in by_window:
            spans = [span for span in zip(scores, starts, ends, strict=True) if math.isfinite(span[0])]
            question, places = windows.places(row, [(start, end) for _, start, end in spans])
            highest = by_question.setdefault(question, {})
            for place, (score, _, _) in zip(places, spans, strict=True):
                highest[place] = max(score, highest.get(place, -math.inf))
    return {question: _pick_highest(scores, n_best) for question, scores in by_question.items()}


def _pick_highest(scores: dict[tuple[int, int], float], count: int) -> list[tuple[int, int]]:
    return sorted(scores, key=lambda place: (-scores[place], place))[:count]


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
        """Return one window."""
        ids = torch.zeros(1, self.tokens, dtype=torch.long)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Batch]:
        """Yield one pass over a split."""
        check_request(split, batch_size)
        return self._pass(split, batch_size, seed)

    def _pass(self, split: Split, batch_size: int, seed: int | None) -> Iterator[Batch]:
        windows = self._data(split)
        for rows in order(len(windows), batch_size, generator_of(seed)):
            yield windows.batch(rows)

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Run a model on the windows of a batch."""
        self._check_model(model)
        return model(input_ids=batch.ids, attention_mask=batch.mask, token_type_ids=batch.types)

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """Return the mean of the cross-entropies of start and end, a mean over the windows."""
        start, end = self.logits(outputs)
        return (F.cross_entropy(start, batch.starts) + F.cross_entropy(end, batch.ends)) / 2

    def logits(self, outputs: Any) -> tuple[Tensor, Tensor]:
        """Return the scores of each token as the first and as the last of the answer, (B, tokens) each."""
        return outputs[0], outputs[1]

    def batch_score(self, outputs: Any, batch: Batch) -> float:
        """Return the percentage of windows whose best start and best end are both right."""
        start, end = self.logits(outputs)
        right = (start.argmax(1) == batch.starts) & (end.argmax(1) == batch.ends)
        return 100 * float(right.double().mean())

    def score(self, model: nn.Module) -> float:
        """Return F1 on the test split."""
        return self.scores(model)["F1"]

    def scores(self, model: nn.Module) -> dict[str, float]:
        """Return `F1` and `exact match` on the test split, in percent, means over its questions."""
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
        """Return the `n_best` answers to each test question by its id, the best over all windows first."""
        windows = self._data("test")
        with inference(model), torch.no_grad():
            places = gather(windows, self._find_spans(model, windows), self.n_best)
        answers: dict[str, list[str]] = {}
        for number, question in enumerate(self._test_questions):
            answers[question.id] = [question.context[begin:end] for begin, end in places.get(number, [])]
        return answers

    def _find_spans(self, model: nn.Module, windows: Windows) -> Iterator[tuple[Tensor, Best]]:
        """Yield the rows of each batch of test windows, and their best spans."""
        device = device_of(model)
        for batch in self.batches("test", _SCORED_AT_ONCE):
            here = Batch(*(part.to(device) for part in batch))
            logits = self.logits(self.forward(model, here))
            yield batch.rows, best_spans(logits, windows.parts(batch.rows), self.answer_tokens, self.n_best)

    def _check_model(self, model: nn.Module) -> None:
        """Raise InputError if the model's configuration has no embeddings for these tokens."""
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
        """Hold out whole questions, with all of their windows."""
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
        return _draw_questions(read_questions(Path(self.data), "train"), self.questions)

    @cached_property
    def _test_questions(self) -> list[Question]:
        return _draw_questions(read_questions(Path(self.data), "test"), self.test_questions)

    @cached_property
    def _pieces(self) -> WordPieces:
        return load_word_pieces(Path(self.tokenizer))

    def __getstate__(self) -> dict[str, Any]:
        """Return the options alone; the data is read again in another process."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def _draw_questions(questions: list[Question], count: int | None) -> list[Question]:
    if count is None or count >= len(questions):
        return questions
    ticket = np.random.RandomState(_DRAW).permutation(len(questions))  # numpy keeps this stream for ever
    return [questions[row] for row in sorted(ticket[:count])]


# --- SQuAD v1.1 on disk: the official JSON, or parquet files with one question per row.

_SITE = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
_ADVICE = f"download {_SITE}/train-v1.1.json and {_SITE}/dev-v1.1.json"
_JSON = {"train": "train-v1.1.json", "test": "dev-v1.1.json"}
_WORDS = {"train": ("train",), "test": ("dev", "validation")}


@dataclass(frozen=True)
class Question:
    """A question on a context, and the answers people gave: text, and its begin in the context."""

    id: str
    context: str
    question: str
    answers: tuple[tuple[str, int], ...]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _GivenAnswer(_Strict):
    text: str
    answer_start: int


class _Asked(_Strict):
    id: str
    question: str
    answers: list[_GivenAnswer]
    is_impossible: bool | None = None  # version 2.0 has it


class _Paragraph(_Strict):
    context: str
    qas: list[_Asked]


class _Article(_Strict):
    paragraphs: list[_Paragraph]


class _File(_Strict):
    data: list[_Article]


class _Columns(_Strict):
    text: list[str]
    answer_start: list[int]


class _Row(_Strict):
    id: str
    context: str
    question: str
    answers: _Columns


def read_questions(folder: Path, split: Split) -> list[Question]:
    """Return all questions of a split in the order of the files, each with at least one answer in its right place."""
    official = folder / _JSON[split]
    paths = [official] if official.is_file() else _parquet(folder, split)
    if not paths:
        raise FileError(
            f"there is no SQuAD {split} data in {folder}: download {_SITE}/{official.name} and put it there, or put "
            f"parquet files (*{_WORDS[split][0]}*.parquet) there; another folder is given as the option data"
        )
    return [question for path in paths for question in _read(path)]


def _parquet(folder: Path, split: Split) -> list[Path]:
    other = _WORDS[other_split(split)][0]
    return [path for word in _WORDS[split] for path in parquet_files(folder, word, other)]


def _read(path: Path) -> list[Question]:
    read = _from_json if path.suffix == ".json" else _from_parquet
    questions = [_check_question(question, path) for question in read(path)]
    if not questions:
        raise FileError(f"{path} has no questions: fetch it again")
    return questions


def _from_json(path: Path) -> Iterator[Question]:
    with explain_failures(path, "SQuAD's JSON", "fetch it again"):
        content = parse_json(read_text(path))
    version = str(content.get("version", "")) if isinstance(content, dict) else ""
    if version.removeprefix("v").startswith("2"):
        raise _version_2_error(path)
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        raise _format_error(path, error) from None
    for article in file.data:
        for paragraph in article.paragraphs:
            for asked in paragraph.qas:
                if asked.is_impossible is not None:
                    raise _version_2_error(path)
                answers = tuple((answer.text, answer.answer_start) for answer in asked.answers)
                yield Question(asked.id, paragraph.context, asked.question, answers)


def _from_parquet(path: Path) -> Iterator[Question]:
    columns = read_columns(path, tuple(_Row.model_fields))
    for number, values in enumerate(zip(*columns.values(), strict=True)):
        try:
            row = _Row.model_validate(dict(zip(columns, values, strict=True)))
        except ValidationError as error:
            raise _format_error(path, error, f"row {number}, ") from None
        texts, starts = row.answers.text, row.answers.answer_start
        if len(texts) != len(starts):
            raise FileError(f"{path}: question {row.id} has {len(texts)} answers at {len(starts)} places")
        yield Question(row.id, row.context, row.question, tuple(zip(texts, starts, strict=True)))


def _check_question(question: Question, path: Path) -> Question:
    if not question.answers:
        raise FileError(f"{path}: question {question.id} has no answer, as in SQuAD v2.0: this task is v1.1; {_ADVICE}")
    for text, start in question.answers:
        is_there = start >= 0 and question.context[start : start + len(text)] == text
        if not text or not is_there:
            there = question.context[max(start, 0) : max(start, 0) + len(text)]
            raise FileError(
                f"{path}: an answer of question {question.id} is not in its context: at {start} there is "
                f"{there[:40]!r}, not {text[:40]!r}; fetch the file again, or remove the question"
            )
    return question


def _version_2_error(path: Path) -> FileError:
    return FileError(f"{path} is SQuAD v2.0, where questions may have no answer: this task is v1.1; {_ADVICE}")


def _format_error(path: Path, error: ValidationError, place: str = "") -> FileError:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return FileError(f"{path} is not SQuAD v1.1 ({place}{where or 'the whole'}: {first['msg']}): fetch it again")


# F1 and exact match of answers, as the official script of SQuAD v1.1 defines them (Rajpurkar et al. 2016).

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII's only, as in the script


def normalize(text: str) -> str:
    """Return lower case, without punctuation and articles, words separated by single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the best F1 over the answers, 0 … 1, of shared words, each counted as often as both sides have it."""
    return max(_f1(normalize(prediction).split(), normalize(answer).split()) for answer in answers)


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 if the prediction equals an answer after both are normalized, else 0."""
    return float(any(normalize(prediction) == normalize(answer) for answer in answers))


def _f1(found: list[str], wanted: list[str]) -> float:
    shared = sum((Counter(found) & Counter(wanted)).values())
    if not shared:  # also where both are empty: version 1.1 of the script gives 0
        return 0.0
    precision, recall = shared / len(found), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)
