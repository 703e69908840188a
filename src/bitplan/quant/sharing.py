"""One name in a state dict for each tensor of a quantizer, however many layers share it.

Linked layers hold the same input quantizer, and a layer that a model holds twice has its quantizers twice. Everything
that runs or moves a network wants them at all of their places; files want them once (safetensors refuses tensors that
share memory). So only the state dict is thinned out: the first of a quantizer's names stays, and any of them is loaded.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from bitplan.core.naming import inside
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer


def save_once_(model: nn.Module) -> None:
    """Let the state dict of a model, or of whatever wraps it, name the tensors of its quantizers once."""
    model.register_state_dict_post_hook(_leave_out)
    model.register_load_state_dict_pre_hook(_fill_in)


def further_names(model: nn.Module) -> dict[str, str]:
    """Every name of a quantizer's tensor that a state dict leaves out, and the one under which it is there."""
    first: dict[nn.Module, str] = {}
    further: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, WeightQuantizer | InputQuantizer) and first.setdefault(module, path) != path:
            names = [*module._parameters, *module._buffers]
            further |= {inside(path, name): inside(first[module], name) for name in names}
    return further


def state_in_full(model: nn.Module) -> dict[str, Tensor]:
    """The model's state under all names, in the order of a state dict."""
    state: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        module._save_to_state_dict(state, inside(path, ""), True)
    return state


# Both are found by their names when a model is unpickled.
def _leave_out(model: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    for name in further_names(model):
        state.pop(prefix + name, None)


def _fill_in(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, first in further_names(model).items():
        known = state.get(prefix + first, state.get(prefix + name))
        if known is not None:
            state[prefix + first] = state[prefix + name] = known
