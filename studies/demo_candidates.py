"""The candidates of studies/demo_search.py, in the order in which they are preferred.

Networks that bitplan has come first, then other real kinds, then one that was made for the purpose; of the same network
the shorter trial comes first. The demonstration of before comes last, to compare with. A list that held nothing was
continued, and what was tried stays here.
"""

from __future__ import annotations

from typing import Any

from bitplan.core.rules import Rules
from bitplan.core.studies import Method, Start, Study
from bitplan.core.trials import Recipe

SHIFTED: dict[str, Any] = {"task_options": {"shifted": True}}  # 3,240 test images instead of 360
SGD: dict[str, Any] = {"batch_size": 64, "distill": 0.5, "temperature": 2.0}
ADAMW: dict[str, Any] = SGD | {"optimizer": "adamw", "warmup": 0.1, "weight_decay": 0.01}


def study(name: str, model: str, recipes: tuple[Recipe, Recipe, Recipe], *, narrow: int = 0, **more: Any) -> Study:
    """A study of random plans; the recipes are those of the float network, the start and the trials."""
    float_recipe, start, trial = recipes
    settings: dict[str, Any] = {"task": "digits", "choices": ("w2a2", "w4a4"), "budgets": ("70%",)} | more
    return Study(
        name=name,
        model=model,
        rules=Rules(narrow=narrow),
        methods=(Method(name="random"),),
        seeds=(0, 1, 2, 3, 4),
        start=Start(float_recipe=float_recipe, recipe=start),
        recipe=trial,
        **settings,
    )


def sgd(steps: int) -> tuple[Recipe, Recipe, Recipe]:
    """Those of the demonstration of before, with so many steps for a trial."""
    return (
        Recipe(**SGD | {"distill": 0.0}, steps=200, lr=0.05),
        Recipe(**SGD, steps=100, lr=0.02),
        Recipe(**SGD, steps=steps, lr=0.01),
    )


def brief(steps: int, lr: float) -> tuple[Recipe, Recipe, Recipe]:
    """Few steps with large batches, so that seeds make less of a difference than with many small ones."""
    return *sgd(steps)[:2], Recipe(**SGD | {"batch_size": 256}, steps=steps, lr=lr)


def longer(steps: int) -> tuple[Recipe, Recipe, Recipe]:
    """For networks that train in no time."""
    half = SGD | {"batch_size": 128}
    return (
        Recipe(**half | {"distill": 0.0}, steps=400, lr=0.05),
        Recipe(**half, steps=200, lr=0.02),
        Recipe(**half, steps=steps, lr=0.01),
    )


def whole(steps: int, lr: float) -> tuple[Recipe, Recipe, Recipe]:
    """All 1,437 images in every step of a trial, so that seeds differ in how they are shifted and in nothing else."""
    half = SGD | {"batch_size": 128}
    return (
        Recipe(**half | {"distill": 0.0}, steps=1000, lr=0.05),
        Recipe(**half, steps=400, lr=0.02),
        Recipe(**SGD | {"batch_size": 1437}, steps=steps, lr=lr),
    )


def adamw(steps: int) -> tuple[Recipe, Recipe, Recipe]:
    """For transformers."""
    return (
        Recipe(**ADAMW | {"distill": 0.0}, steps=400, lr=2e-3),
        Recipe(**ADAMW, steps=200, lr=1e-3),
        Recipe(**ADAMW, steps=steps, lr=5e-4),
    )


_LISTED = (
    study("transformer", "digits_transformer", adamw(20)),
    study("transformer_longer", "digits_transformer", adamw(60)),
    study("mobile", "demo_networks:mobile", sgd(20)),
    study("mobile_longer", "demo_networks:mobile", sgd(60)),
    study("plain", "demo_networks:plain", sgd(20)),
    study("plain_longer", "demo_networks:plain", sgd(60)),
    study("before", "digits_resnet", sgd(20), narrow=33),
    # Continued after "transformer" and "mobile" had failed: seeds differed too much after 20 steps of 64 images.
    study("mobile_brief", "demo_networks:mobile", brief(8, 0.01)),
    study("mobile_calm", "demo_networks:mobile", brief(20, 0.005)),
    study("before_brief", "digits_resnet", brief(8, 0.01), narrow=33),
    study("plain_brief", "demo_networks:plain", brief(8, 0.01)),
    # Continued after the first trials of "mobile_brief" differed by 9 points between seeds: smaller steps.
    study("mobile_repair", "demo_networks:mobile", brief(8, 0.001)),
    study("before_repair", "digits_resnet", brief(8, 0.001), narrow=33),
    study("plain_repair", "demo_networks:plain", brief(8, 0.001)),
    # Continued after "mobile_repair" began alike: what is lost must be what training cannot repair, and cheap to train.
    study("hourglass", "demo_networks:hourglass", longer(40)),
    # Continued after the float network of "hourglass" scored 86 and its first plans spread over twice as far as seeds.
    study("necks", "demo_networks:necks", longer(30)),
    # Continued after the first plans of "necks" spread 2.2 times as far as seeds.
    study("narrow_necks", "demo_networks:narrow_necks", longer(40)),
    # Continued after "narrow_necks" had failed its screen: nine times the test images, all training images in a step.
    study("necks_whole", "demo_networks:necks", whole(20, 0.01), **SHIFTED),
    study("necks_whole_calm", "demo_networks:necks", whole(20, 0.003), **SHIFTED),
    study("necks_whole_longer", "demo_networks:necks", whole(40, 0.01), **SHIFTED),
    study("costly_necks_whole", "demo_networks:costly_necks", whole(20, 0.01), **SHIFTED),
    study("costly_necks_whole_longer", "demo_networks:costly_necks", whole(40, 0.01), **SHIFTED),
    study("narrow_necks_whole", "demo_networks:narrow_necks", whole(20, 0.01), **SHIFTED),
)
CANDIDATES = {candidate.name: candidate for candidate in _LISTED}
