"""OMPQ: a layer gains by how little what it gives out resembles what the other layers give out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitplan.core.errors import InputError
from bitplan.core.method_facts import About
from bitplan.core.precision import Precision
from bitplan.core.records import Graph
from bitplan.gains.base import Context, Gain, LayerGains
from bitplan.gains.baselines import bits_above_lowest
from bitplan.gains.lowering import check_task
from bitplan.plugins.methods.layer_outputs import check_model, run, split_by_sample, watch_outputs
from bitplan.quant.convert import deep_copy
from bitplan.tasks.base import WithData, draw, measuring_split

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Ompq(Gain):
    """What a layer gives out, compared with what the others do: the less alike, the more it is worth.

    Ma et al. 2023, "OMPQ: Orthogonal Mixed Precision Quantization". One batch of `samples` without labels runs through
    the network as it is. X_i is what layer i gives out, flattened, K_i = X_i·X_iᵀ with centred rows and columns; ORM_ij
    = ⟨K_i, K_j⟩/(‖K_i‖·‖K_j‖), the linear CKA of two layers; γ_i = Σ_{j≠i} ORM_ij, θ_i = e^(−βγ_i), and a layer's
    importance is the mean of θ_j over it and those behind it. value(c) = importance · (bits of c − bits of c0), bits
    being those of weights, or of inputs where only these differ. Published β: 3.3 (ResNet-50), 10 and 100 (ResNet-18),
    1e-9 (MobileNetV2, at which all layers count the same to eight digits). θ is divided by its greatest value, which
    changes no plan; the layers are those that can be chosen for, and `exact` selects in place of a real-valued solver
    whose rounding may exceed a budget. After the authors' code; its batch of 64 is as others report it.
    """

    about: ClassVar[About] = About(True, passes="N", source="Ma et al. 2023")

    samples: int = 64
    beta: float = 3.3

    def __post_init__(self) -> None:
        if self.samples < 3:
            raise InputError(f"ompq compares how samples lie to each other: give at least 3, not {self.samples}")
        if not 0 <= self.beta < math.inf:
            raise InputError(f"ompq: beta must be 0 or more, not {self.beta}")

    def layer_gains(self, model: Any, graph: Graph, choices: tuple[Precision, ...], context: Context) -> LayerGains:
        """One pass forward for each sample."""
        task = check_task(context.task, "ompq", "runs the network on data", WithData)
        network = deep_copy(check_model(model, "ompq")).eval()
        layers = [layer.name for group in graph.selectable for layer in group.layers]
        split = measuring_split(task)
        samples = min(self.samples, task.size(split))
        grams: dict[str, Tensor] = {}

        def see(name: str, out: Tensor) -> None:
            rows = split_by_sample(name, out, samples).double()
            grams[name] = grams.get(name, torch.zeros(())) + (rows @ rows.T).cpu()  # calls stand side by side

        with watch_outputs(network, layers, see):
            run(task, network, draw(network, task, 1, samples, context.seed, split))
        weights = importances(orthogonality(np.array([grams[name].numpy() for name in layers])), self.beta)
        bits = bits_above_lowest(choices)
        values = {
            name: tuple(float(weight) * more for more in bits) for name, weight in zip(layers, weights, strict=True)
        }
        return LayerGains(values, counts={"passes": 1, "samples": samples})


def orthogonality(grams: Floats) -> Floats:
    """ORM (L, L) of Gram matrices (L, N, N); a layer that gives out the same for every sample resembles none."""
    centred = grams - grams.mean(axis=1, keepdims=True) - grams.mean(axis=2, keepdims=True)
    centred += grams.mean(axis=(1, 2), keepdims=True)
    flat = centred.reshape(len(grams), -1)
    norms = np.linalg.norm(flat, axis=1)
    unit = np.divide(flat, norms[:, None], out=np.zeros_like(flat), where=norms[:, None] > 0)
    resemblance: Floats = unit @ unit.T
    return resemblance


def importances(resemblance: Floats, beta: float) -> Floats:
    """The mean of θ over each layer and those behind it, (L), up to a common factor."""
    gamma = resemblance.sum(axis=1) - resemblance.diagonal()
    theta = np.exp(-beta * (gamma - gamma.min()))
    behind: Floats = np.cumsum(theta[::-1])[::-1] / np.arange(len(theta), 0, -1)
    return behind
