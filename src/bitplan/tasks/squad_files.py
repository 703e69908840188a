"""SQuAD v1.1 on disk: the official JSON, or parquet files with one question per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from bitplan.adapters.parquet import read_columns
from bitplan.core.errors import FileError
from bitplan.core.parsing import parse_json, parsing
from bitplan.core.store import read_text
from bitplan.tasks.base import Split
from bitplan.tasks.encoded import parquet_files
from bitplan.tasks.splits import other_split

_SITE = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
_ADVICE = f"download {_SITE}/train-v1.1.json and {_SITE}/dev-v1.1.json"
_JSON = {"train": "train-v1.1.json", "test": "dev-v1.1.json"}
_WORDS = {"train": ("train",), "test": ("dev", "validation")}


@dataclass(frozen=True)
class Question:
    """A question on a context, and the answers people gave: text, and where it begins in the context."""

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
    """All questions of a split in the order of the files, each with at least one answer that is where it should be."""
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
    questions = [_checked(question, path) for question in read(path)]
    if not questions:
        raise FileError(f"{path} has no questions: fetch it again")
    return questions


def _from_json(path: Path) -> Iterator[Question]:
    with parsing(path, "SQuAD's JSON", "fetch it again"):
        content = parse_json(read_text(path))
    version = str(content.get("version", "")) if isinstance(content, dict) else ""
    if version.removeprefix("v").startswith("2"):
        raise _of_version_2(path)
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        raise _foreign(path, error) from None
    for article in file.data:
        for paragraph in article.paragraphs:
            for asked in paragraph.qas:
                if asked.is_impossible is not None:
                    raise _of_version_2(path)
                answers = tuple((answer.text, answer.answer_start) for answer in asked.answers)
                yield Question(asked.id, paragraph.context, asked.question, answers)


def _from_parquet(path: Path) -> Iterator[Question]:
    columns = read_columns(path, tuple(_Row.model_fields))
    for number, values in enumerate(zip(*columns.values(), strict=True)):
        try:
            row = _Row.model_validate(dict(zip(columns, values, strict=True)))
        except ValidationError as error:
            raise _foreign(path, error, f"row {number}, ") from None
        texts, starts = row.answers.text, row.answers.answer_start
        if len(texts) != len(starts):
            raise FileError(f"{path}: question {row.id} has {len(texts)} answers at {len(starts)} places")
        yield Question(row.id, row.context, row.question, tuple(zip(texts, starts, strict=True)))


def _checked(question: Question, path: Path) -> Question:
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


def _of_version_2(path: Path) -> FileError:
    return FileError(f"{path} is SQuAD v2.0, where questions may have no answer: this task is v1.1; {_ADVICE}")


def _foreign(path: Path, error: ValidationError, place: str = "") -> FileError:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return FileError(f"{path} is not SQuAD v1.1 ({place}{where or 'the whole'}: {first['msg']}): fetch it again")
