"""How a batch of a user's data is given to a model: which parts are inputs, and which are labels.

a mapping            keyword arguments of the model, as far as it takes them; labels under the key `labels`
(inputs, labels)     inputs that are a tuple, a list or a mapping are several arguments
(a, b, …, labels)    positional arguments, then labels
(inputs,)            inputs alone, without labels
anything else        the one input
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bitplan.adapters.torch import as_floats_of
from bitplan.core.errors import InputError

LABELS = "labels"
"""The key of labels in a mapping."""


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return positional and keyword arguments for a model, and labels (None if there are none).

    Labels of a mapping stay among the keyword arguments too: some models compute their own loss.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch), batch.get(LABELS)
    if not isinstance(batch, tuple | list):
        return (batch,), {}, None
    *inputs, labels = batch if len(batch) > 1 else (*batch, None)
    if len(inputs) == 1 and isinstance(inputs[0], tuple | list):
        return tuple(inputs[0]), {}, labels
    if len(inputs) == 1 and isinstance(inputs[0], Mapping):
        return (), dict(inputs[0]), labels
    return tuple(inputs), {}, labels


def run_batch(model: nn.Module, batch: Any) -> Any:
    """Run a model on the inputs of a batch, floats in the model's own type."""
    positional, keyword, _ = split_batch(batch)
    positional, keyword = tree_map_only(Tensor, lambda leaf: as_floats_of(model, leaf), (positional, keyword))
    keyword = filter_accepted(model, keyword)
    try:
        return model(*positional, **keyword)
    except TypeError as error:
        _check_fits(model, positional, keyword, error)
        raise


def filter_accepted(model: nn.Module, keyword: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that the model takes: datasets have further columns."""
    parameters = inspect.signature(model.forward).parameters.values() if keyword else ()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return keyword
    names = {one.name for one in parameters}
    return {key: value for key, value in keyword.items() if key in names}


def _check_fits(model: nn.Module, positional: tuple[Any, ...], keyword: dict[str, Any], failed: TypeError) -> None:
    """Raise an error that explains the failed call if the model cannot be called with these arguments."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*positional, **keyword)
    except TypeError as error:
        raise InputError(
            f"a batch does not fit the model, which takes ({', '.join(signature.parameters)}): {error}. The last part "
            "of a tuple holds labels: give ((x, mask), labels) for two inputs, or ((x, mask),) without labels"
        ) from failed
