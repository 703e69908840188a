"""F1 and exact match of answers, as the official script of SQuAD v1.1 defines them (Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII's only, as in the script


def normalized(text: str) -> str:
    """Lower case, without punctuation and articles, words parted by single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 over the answers, 0 … 1: of shared words, each counted as often as both sides have it."""
    return max(_f1(normalized(prediction).split(), normalized(answer).split()) for answer in answers)


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 where the prediction equals an answer after both are normalized, else 0."""
    return float(any(normalized(prediction) == normalized(answer) for answer in answers))


def _f1(found: list[str], wanted: list[str]) -> float:
    shared = sum((Counter(found) & Counter(wanted)).values())
    if not shared:  # also where both are empty: version 1.1 of the script gives 0
        return 0.0
    precision, recall = shared / len(found), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)
