"""A quantized model's parameters in the groups that an optimizer should treat differently."""

from __future__ import annotations

from typing import Any

from torch import nn

from bitplan.quant.quantizers import InputQuantizer, WeightQuantizer


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    step_lr: float | None = None,
    decay_vectors: bool = True,
) -> list[dict[str, Any]]:
    """Named groups for any torch optimizer: steps on their own, without weight decay, at `step_lr` (default: `lr`).

    Under Adam or LAMB the gradient scale has no effect, so give steps a smaller rate there. `decay_vectors`
    False also spares biases and normalization (fewer than two dimensions). Frozen parameters are left out.
    """
    step_ids = {id(m.step) for m in model.modules() if isinstance(m, WeightQuantizer | InputQuantizer)}
    matrices, vectors, steps = [], [], []
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in step_ids:
            steps.append(parameter)
        elif parameter.dim() < 2 and not decay_vectors:
            vectors.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"name": "weights", "params": matrices, "lr": lr, "weight_decay": weight_decay},
        {"name": "vectors", "params": vectors, "lr": lr, "weight_decay": 0.0},
        {"name": "steps", "params": steps, "lr": lr if step_lr is None else step_lr, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
