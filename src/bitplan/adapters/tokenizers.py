"""Tokenizers from local files, through Hugging Face tokenizers: BERT's word pieces, and any model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitplan.adapters.foreign import require
from bitplan.adapters.gguf import check_gguf
from bitplan.adapters.transformers import tokenizer_in_gguf
from bitplan.core.errors import FileError
from bitplan.core.parsing import explain_failures, parse_json
from bitplan.store.files import read_text
from bitplan.weights.pretrained_folders import is_gguf, refuse_link_out

TOKENIZER = "tokenizer.json"
"""What a folder of Hugging Face's calls its tokenizer."""
_WORDS, _SETTINGS = "vocab.txt", "tokenizer_config.json"


@dataclass(frozen=True)
class Pieces:
    """The pieces of a text: their ids, and where each begins and ends, in characters."""

    ids: list[int]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True)
class WordPieces:
    """A tokenizer and its file, how many words it knows, and the ids of the three marks that BERT needs."""

    path: Path
    words: int
    begin: int
    between: int
    padding: int
    library: Any

    def __call__(self, texts: Sequence[str]) -> list[Pieces]:
        """The pieces of each text as it stands: no marks, nothing cut off, nothing padded."""
        with explain_failures(
            self.path, "a tokenizer", "fetch it again"
        ):  # it may lack the mark for what it does not know
            encodings = self.library.encode_batch(list(texts), add_special_tokens=False)
        return [Pieces(encoding.ids, encoding.offsets) for encoding in encodings]


def load_word_pieces(folder: Path) -> WordPieces:
    """The tokenizer of a folder with `tokenizer.json`, or with `vocab.txt` (lower case, unless its settings differ)."""
    require("tokenizers", "text", f"reading the tokenizer in {folder}")
    import tokenizers

    path = folder / TOKENIZER
    if not path.is_file():
        path = folder / _WORDS
    if not path.is_file():
        raise FileError(
            f"there is no tokenizer in {folder}: download {TOKENIZER}, or {_WORDS}, of your model (for BERT-base: "
            f"https://huggingface.co/google-bert/bert-base-uncased) and put it there; "
            "another folder is given as the option tokenizer"
        )
    refuse_link_out(path)
    read_text(path)  # says in one line what prevents it
    lower = path.name == TOKENIZER or _lower_case(folder / _SETTINGS)
    with explain_failures(path, "a tokenizer", "fetch it again"):
        if path.name == TOKENIZER:
            library: Any = tokenizers.Tokenizer.from_file(str(path))
        else:
            library = tokenizers.BertWordPieceTokenizer(str(path), lowercase=lower)
    library.no_truncation()
    library.no_padding()
    begin, between, padding = (_mark(library, word, path) for word in ("[CLS]", "[SEP]", "[PAD]"))
    return WordPieces(path, library.get_vocab_size(), begin, between, padding, library)


@dataclass(frozen=True)
class TextTokenizer:
    """A model's own tokenizer, where it is from, and how many tokens it knows."""

    path: Path
    words: int
    library: Any

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text as it stands: nothing is put before or behind it."""
        with explain_failures(self.path, "a tokenizer", "fetch it again"):
            ids: list[int] = self.library.encode(text, add_special_tokens=False).ids
        return ids


def load_tokenizer(source: Path) -> TextTokenizer:
    """The tokenizer of a model's folder, of a `tokenizer.json`, or in a GGUF file."""
    _, library = _parsed(source)
    library.no_truncation()
    library.no_padding()
    return TextTokenizer(source, library.get_vocab_size(), library)


def tokenizer_text(source: Path) -> str:
    """A tokenizer as the text of its `tokenizer.json`, and nothing else."""
    return _parsed(source)[0]


def _parsed(source: Path) -> tuple[str, Any]:
    """The text, and what the library makes of it."""
    require("tokenizers", "text", f"reading the tokenizer of {source}")
    import tokenizers

    path = source / TOKENIZER if source.is_dir() else source
    text = _text(source, path)
    with explain_failures(path, "a tokenizer", "fetch it again"):
        return text, tokenizers.Tokenizer.from_str(text)


def _text(source: Path, path: Path) -> str:
    if source.is_file() and is_gguf(source):
        check_gguf(source)
        return tokenizer_in_gguf(source)
    if source.is_dir() and not path.is_file():
        raise FileError(
            f"there is no {TOKENIZER} in {source}: download that of your model and put it there, or give another "
            "folder, or a GGUF file, as the option tokenizer"
        )
    if source.is_dir():
        refuse_link_out(path)
    return read_text(path)


def _mark(library: Any, word: str, path: Path) -> int:
    number: int | None = library.token_to_id(word)
    if number is None:
        raise FileError(f"{path} has no {word}: it is not BERT's tokenizer; take that of the model to be trained")
    return number


def _lower_case(settings: Path) -> bool:
    if not settings.is_file():
        return True
    with explain_failures(settings, "a tokenizer's JSON", "fetch it again"):
        return bool(parse_json(read_text(settings)).get("do_lower_case", True))
