"""A quantized model's parameters in the groups that an optimizer should treat differently."""

from __future__ import annotations

from typing import Any

from torch import nn

from bitplan.quant.blend import SHARES, shares_of
from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    step_lr: float | None = None,
    decay_vectors: bool = True,
) -> list[dict[str, Any]]:
    """Named groups for any torch optimizer: steps, and whatever else quantizers learn, on their own, without weight
    decay unless their method has one, at `step_lr` (default: `lr`).

    Under Adam or LAMB the gradient scale has no effect, so give steps a smaller rate there. `decay_vectors`
    False also spares biases and normalization (fewer than two dimensions). Frozen parameters are left out. What a
    relaxation learns of precisions has a group to itself, at its own rate, without momentum and weight decay: bitplan's
    own loop gives it to no optimizer.
    """
    shares = shares_of(model)
    relaxed = list(shares.parameters())
    apart = {id(parameter) for parameter in relaxed}
    decays = {
        id(parameter): module.decay
        for module in model.modules()
        if isinstance(module, WeightQuantizer | InputQuantizer)
        for parameter in module.parameters(recurse=False)
    }
    matrices, vectors = [], []
    steps: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad or id(parameter) in apart:
            continue
        if id(parameter) in decays:
            steps.setdefault(decays[id(parameter)], []).append(parameter)
        elif parameter.dim() < 2 and not decay_vectors:
            vectors.append(parameter)
        else:
            matrices.append(parameter)
    groups: list[dict[str, Any]] = [
        {"name": "weights", "params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"name": "vectors", "params": vectors, "lr": lr, "weight_decay": 0.0},
    ]
    for decay, learned in steps.items():
        rate = lr if step_lr is None else step_lr
        groups.append({"name": "steps", "params": learned, "lr": rate, "weight_decay": decay})
    own = {"lr": shares.rate, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    groups.append({"name": SHARES, "params": relaxed, **own})
    return [group for group in groups if group["params"]]
