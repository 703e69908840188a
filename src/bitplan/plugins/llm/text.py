"""Text for language models: windows of tokens, and how well a network foretells each token from those before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitplan.adapters.parquet import read_columns
from bitplan.adapters.tokenizers import TextTokenizer, load_tokenizer
from bitplan.adapters.torch import device_of, inference, widen_tensor
from bitplan.core.errors import FileError, InputError
from bitplan.store.files import read_text
from bitplan.tasks.base import Split, Task
from bitplan.tasks.images import Splits, check_counts, check_request, generator_of, order

_BETWEEN = "\n\n"  # between the rows of a column
_FEW = {"samples": 4, "batch_size": 1}  # windows: each has hundreds of answers, and the scores of one are 100 megabytes
_DRIFT = {**_FEW, "temperature": 1.0}  # the likelier words matter; 4 would flatten tens of thousands of others


@final
@dataclass(frozen=True)
class Text(Splits[list[Tensor]], Task):
    """Any text in `data`: a plain file (UTF-8), or a column of a parquet file, its rows joined by an empty line.

    A sample is a window of `tokens` tokens; windows lie side by side, and what is left at an end is not used. The first
    `share` of the tokens is there to choose and to tune by, the rest is the test split; `windows` and `test_windows`
    limit both to as many of their first windows. `tokenizer` is the model's folder, a tokenizer.json or a GGUF file;
    on the command line it is MODEL's unless said.
    """

    data: str | Path = "data/text.txt"
    tokenizer: str | Path | None = None
    tokens: int = 512
    share: float = 0.6
    column: str = "text"
    windows: int | None = None
    test_windows: int | None = None

    name = "text"
    metric = "perplexity"
    higher_is_better = False
    version = 1
    usual: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "drift": _DRIFT, "drift_in_context": {**_DRIFT, "rounds": 1, "decide": 8}, "drop": _FEW,
        "fisher": {"samples": 64, "part": 8}, "moments": {"samples": 16, "batch_size": 1},
    }  # fmt: skip

    def __post_init__(self) -> None:
        limits = ("windows", "test_windows")
        check_counts(self, ("tokens", *(limit for limit in limits if getattr(self, limit) is not None)))
        if self.tokens < 2:
            raise InputError("tokens is 1, and in a window of one there is nothing to foretell: give at least 2")
        if not 0 < self.share < 1:
            raise InputError(f"share is {self.share}: the part of a text to tune by is above 0 and below 1")

    def example(self) -> dict[str, Tensor]:
        """One window."""
        return {"input_ids": torch.zeros(1, self.tokens, dtype=torch.long)}

    def batches(self, split: Split, batch_size: int, seed: int | None = None) -> Iterator[Tensor]:
        """One pass over the windows of a split, (B, tokens) each."""
        check_request(split, batch_size)
        return self._passed(split, batch_size, seed)

    def _passed(self, split: Split, batch_size: int, seed: int | None) -> Iterator[Tensor]:
        windows = self._data(split)
        for rows in order(len(windows), batch_size, generator_of(seed)):
            yield torch.stack([windows[row] for row in rows.tolist()])

    def forward(self, model: nn.Module, batch: Tensor) -> Any:
        """Run a model on windows."""
        self._check_model(model)
        return model(input_ids=batch)

    def logits(self, outputs: Any) -> tuple[Tensor]:
        """Scores of every token to come, (B, words, tokens)."""
        return (self._scores_of(outputs).transpose(1, 2),)

    def loss(self, outputs: Any, batch: Tensor) -> Tensor:
        """The cross-entropy of each token but the first of a window, their mean."""
        return self._losses(outputs, batch).mean()

    def batch_score(self, outputs: Any, batch: Tensor) -> float:
        """The perplexity of a batch."""
        return perplexity(float(self.loss(outputs, batch).detach()))

    def score(self, model: nn.Module) -> float:
        """The perplexity of the test split."""
        return self.scores(model)["perplexity"]

    def scores(self, model: nn.Module) -> dict[str, float]:
        """`perplexity` of the test split, and the mean `loss` of its tokens, in nats."""
        return self.scores_of(self.each(model))

    def scores_of(self, losses: list[float]) -> dict[str, float]:
        """The same of what `each` gave."""
        lost = sum(map(math.isnan, losses))
        if lost:
            raise InputError(
                f"the loss is NaN in {lost} of {len(losses)} windows of {self.data}: look at the network's weights, of "
                "which some are NaN or far too large, or at how it was quantized"
            )
        mean = math.fsum(losses) / len(losses)
        return {"perplexity": perplexity(mean), "loss": mean}

    def each(self, model: nn.Module) -> list[float]:
        """The loss of each window of the test split, in order: networks are compared window by window."""
        device, losses = device_of(model), []
        with inference(model), torch.no_grad():
            for batch in self.batches("test", 1):  # the scores of one window's tokens are a hundred megabytes
                here = batch.to(device)
                losses.append(self._losses(self.forward(model, here), here).double().mean().item())
        return losses

    def _losses(self, outputs: Any, batch: Tensor) -> Tensor:
        """(B, tokens − 1)."""
        scores = widen_tensor(self._scores_of(outputs)[:, :-1])
        return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), batch[:, 1:].reshape(-1), reduction="none").view(
            len(batch), -1
        )

    def _scores_of(self, outputs: Any) -> Tensor:
        """(B, tokens, words): what a network returns, or the `logits` in it, or the first of several."""
        found = getattr(outputs, "logits", outputs[0] if isinstance(outputs, tuple) else outputs)
        if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[1] != self.tokens:
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise InputError(
                f"the network returned {shape}, and not scores of the words at each of {self.tokens} tokens: the task "
                "text is for causal language models"
            )
        return found

    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model that has no place for these tokens, where its configuration says so."""
        config = next((module.config for module in model.modules() if hasattr(module, "config")), None)
        longest, words = (getattr(config, name, None) for name in ("max_position_embeddings", "vocab_size"))
        if longest is not None and self.tokens > longest:
            raise InputError(
                f"windows have {self.tokens} tokens, the model has positions for {longest}: set tokens to {longest} or "
                "less"
            )
        if words is not None and self._highest >= words:
            raise InputError(
                f"the tokenizer of {self.tokenizer} gave the token {self._highest}, and the model knows {words}: take "
                "the tokenizer of the model"
            )

    def _read(self, split: Split) -> list[Tensor]:
        cut = int(len(self._ids) * self.share)
        part = self._ids[:cut] if split == "train" else self._ids[cut:]
        windows = list(part[: len(part) // self.tokens * self.tokens].view(-1, self.tokens))
        if not windows:
            raise InputError(
                f"the {split} split of {self.data} has {len(part)} tokens, fewer than a window of {self.tokens}: give "
                "a longer text, or set tokens to less"
            )
        return windows[: self.windows if split == "train" else self.test_windows]

    @cached_property
    def _ids(self) -> Tensor:
        path = Path(self.data)
        if not path.exists():
            raise FileError(f"there is no text {path}: name a file of text, or a parquet file, as the option data")
        text = self._rows(path) if path.suffix == ".parquet" else read_text(path)
        return torch.tensor(self._tokenizer(text), dtype=torch.long)

    def _rows(self, path: Path) -> str:
        rows = read_columns(path, [self.column])[self.column]
        odd = next((number for number, row in enumerate(rows) if not isinstance(row, str | None)), None)
        if odd is not None:
            raise FileError(f"{path}: row {odd} of the column {self.column} is no text; name another with column=NAME")
        return _BETWEEN.join(row for row in rows if row)

    @cached_property
    def _highest(self) -> int:
        return int(self._ids.max())

    @property
    def _tokenizer(self) -> TextTokenizer:
        if self.tokenizer is None:
            raise InputError("the task text needs a tokenizer: the model's folder, a tokenizer.json or a GGUF file")
        return load_tokenizer(Path(self.tokenizer))

    def __getstate__(self) -> dict[str, Any]:
        """Only the options travel to another process; the data is read again there."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def perplexity(loss: float) -> float:
    """e to the mean loss of a token; of a loss beyond all floats, infinite; of no number, none."""
    return math.inf if loss >= 700 else math.exp(loss)
