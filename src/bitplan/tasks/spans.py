"""Contexts cut into windows that overlap, and the best spans of all windows put together again."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from bitplan.adapters.tokenizers import Pieces, WordPieces
from bitplan.tasks.squad_files import Question

MARKS = 3  # [CLS] question [SEP] context [SEP]


@dataclass(frozen=True)
class Shape:
    """How many tokens a window has, how far the next one is, and how many of its tokens a question may take."""

    tokens: int
    stride: int
    question: int


class Batch(NamedTuple):
    """Windows (B, tokens): ids, 1 where there is no padding, 1 in the context; and (B,): first and last token of the
    answer, both 0 ([CLS]) where it is not in the window; and which window of the split it is."""

    ids: Tensor
    mask: Tensor
    types: Tensor
    starts: Tensor
    ends: Tensor
    rows: Tensor


@dataclass(frozen=True)
class Windows:
    """The windows of a split. Texts are kept once, as flat int32 tensors; a window is put together when asked for.

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
        """Some windows, padded to their full length."""
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
        """Where the context begins and ends in each window, (B,) each."""
        begin = self.table[rows, 2].long() + 2
        return begin, begin + self.table[rows, 4]

    def places(self, row: int, spans: Sequence[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
        """The question of a window, and where spans of its tokens begin and end in the context, in characters."""
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
    """Tokenize everything once and list the windows: of each question, one every `stride` tokens of its context."""
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
            answer = _within(span, begin, part, length + 2)
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
    """Begin and length of each window over a context: the last one reaches its end."""
    begins = [0]
    while begins[-1] + room < length:
        begins.append(begins[-1] + stride)
    return [(begin, min(room, length - begin)) for begin in begins]


def answer_tokens(context: Pieces, text: str, start: int) -> tuple[int, int]:
    """First and last token that share a character with an answer; first > last where none does."""
    first = bisect_right(context.offsets, start, key=itemgetter(1))
    last = bisect_left(context.offsets, start + len(text), key=itemgetter(0)) - 1
    return first, last


def _within(span: tuple[int, int], begin: int, part: int, shift: int) -> tuple[int, int]:
    """An answer's first and last token in a window, where the context is moved by `shift`; [CLS] if it is not in it."""
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
    """The spans of at most `longest` tokens inside each window's context with the highest start + end score.

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
    """The best places of each question over all of its windows, the best first; a place in two windows counts once."""
    by_question: dict[int, dict[tuple[int, int], float]] = {}  # question → place → its highest score
    for rows, best in found:
        by_window = zip(rows.tolist(), best.scores.tolist(), best.starts.tolist(), best.ends.tolist(), strict=True)
        for row, scores, starts, ends in by_window:
            spans = [span for span in zip(scores, starts, ends, strict=True) if math.isfinite(span[0])]
            question, places = windows.places(row, [(start, end) for _, start, end in spans])
            highest = by_question.setdefault(question, {})
            for place, (score, _, _) in zip(places, spans, strict=True):
                highest[place] = max(score, highest.get(place, -math.inf))
    return {question: _highest(scores, n_best) for question, scores in by_question.items()}


def _highest(scores: dict[tuple[int, int], float], count: int) -> list[tuple[int, int]]:
    return sorted(scores, key=lambda place: (-scores[place], place))[:count]
