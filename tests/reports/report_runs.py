"""Run folders made of real records: a traced network, real estimates, and scores drawn around made-up means."""

from __future__ import annotations

import random
from pathlib import Path

import torch

import bitplan
from bitplan.core.precision import parse_choices
from bitplan.core.records import Costs, Gains, Graph, Layer, Link, Plan
from bitplan.core.studies import FailedTrial, Fit, Method, Pair, Pairs, Start, Study
from bitplan.core.trials import Recipe, Result, Trial
from bitplan.gains.base import Context
from bitplan.store.run_folder import RunFolder

BUDGETS = ("60%", "70%", "80%", "90%")
LEVEL = {"eagl": 1.0, "uniform": 0.6, "first_to_last": 0.0, "random": 0.3}


def digits_graph(name="digits_resnet") -> tuple[torch.nn.Module, Graph]:
    torch.manual_seed(0)
    model, _ = bitplan.load_model(name)
    return model, bitplan.trace(model, bitplan.load_task("digits").example(), name=name, rules=bitplan.Rules(narrow=48))


def study_of(model="digits_resnet", methods=("eagl", "uniform", "first_to_last"), budgets=BUDGETS, seeds=5, **fields):
    made = [Method(name=one, options={"steps": "mse", "bootstrap": 20} if one == "eagl" else {}) for one in methods]
    fields = {"name": "Handwritten digits", "task": "digits", "choices": parse_choices("w2a2,w4a4")} | fields
    return Study(
        model=model, budgets=budgets, methods=fields.pop("planners", made), seeds=tuple(range(seeds)),
        start=Start(float_recipe=Recipe(epochs=20)), recipe=Recipe(epochs=30, lr=0.02, distill=0.5), **fields,
    )  # fmt: skip


def trial_of(study: Study, method: str, budget: str | None, seed: int, options=None, selector="exact") -> Trial:
    recipe = study.start.float_recipe if method == "float" else study.recipe
    role = "choice" if budget else "float" if method == "float" else "reference"
    precision = method if role == "reference" else None
    return Trial(
        task=study.task, model=study.model, start="0" * 12, role=role, method=method, precision=precision,
        options=options or {}, selector=selector, cost=study.cost, budgets=(budget,) if budget else (),
        choices=study.choices, recipe=recipe, seed=seed,
    )  # fmt: skip


def result_of(trial: Trial, score: float, plan: Plan | None = None) -> Result:
    return Result(
        trial=trial,
        plan=plan.id if plan else f"plan of {trial.method}",
        score=score,
        metric="top-1",
        higher_is_better=True,
        seconds=12.5,
        device="cpu",
        versions={"torch": "2.13.0", "bitplan": bitplan.__version__},
    )


def write_run(folder: Path, study: Study, graph: Graph, gains: dict[str, Gains], costs: Costs) -> None:
    """The part of a run that needs no training."""
    run = RunFolder(folder)
    run.keep(study, graph, costs)
    for title, one in gains.items():
        run.keep_gains(title, one)


def write_results(
    folder: Path, study: Study, graph: Graph, gains: dict[str, Gains], costs: Costs, leave_out=()
) -> None:
    """Scores around 97 - falling with the budget, better for some methods - and the references."""
    draw = random.Random(7)
    for method in study.methods:
        for budget in study.budgets:
            if (method.title, budget) in leave_out:
                continue
            plan = bitplan.select(graph, gains[method.title], costs, budget=budget)
            RunFolder(folder).keep_plans([plan])
            lost = 100 - float(budget.rstrip("%"))
            for seed in study.seeds:
                score = 97.2 - 0.035 * lost * (1.8 - LEVEL.get(method.name, 0.5)) + draw.gauss(0, 0.12)
                trial = trial_of(study, method.name, budget, seed, method.options, gains[method.title].selector)
                RunFolder(folder).trials.keep(trial.id, result_of(trial, score, plan))
    for title, mean in (("w2a2", 93.9), ("w4a4", 97.1), ("float", 97.5)):
        for seed in study.seeds[:1] if title == "float" else study.seeds:
            trial = trial_of(study, title, None, seed)
            RunFolder(folder).trials.keep(trial.id, result_of(trial, mean + draw.gauss(0, 0.12)))


def write_failure(folder: Path, study: Study, method: str, budget: str, seed: int, error: str, options=None) -> None:
    trial = trial_of(study, method, budget, seed, options)
    RunFolder(folder).trials.remove(trial.id)
    RunFolder(folder).failed.keep(trial.id, FailedTrial(trial=trial, fault="code", error=error, seconds=3.0))


def write_additivity(folder: Path, graph: Graph) -> None:
    draw = random.Random(3)
    names = [group.name for group in graph.selectable]
    alone = {name: draw.random() * 2 for name in names}
    pairs = []
    for _ in range(40):
        first, second = draw.sample(names, 2)
        both = alone[first] + alone[second]
        pairs.append(Pair(first=first, second=second, predicted=both, measured=both * 1.02 + draw.gauss(0, 0.15)))
    RunFolder(folder).keep(
        Pairs(graph=graph.id, metric="top-1", alone=alone, pairs=tuple(pairs), correlation=0.98),
    )
    vectors = tuple(tuple(draw.randrange(2) for _ in names) for _ in range(60))
    predicted = tuple(
        93 + sum(alone[n] * bit for n, bit in zip(names, vector, strict=True)) * 0.3 for vector in vectors
    )
    measured = tuple(value + draw.gauss(0, 0.1) for value in predicted)
    fit = Fit(
        graph=graph.id, metric="top-1", groups=tuple(names), coefficients=tuple(alone[n] * 0.3 for n in names),
        intercept=93.0, vectors=vectors, measured=measured, predicted=predicted, held_out=tuple(range(0, 60, 10)),
        correlation=0.993, correlation_held_out=0.987, residual=0.1, networks=60,
    )  # fmt: skip
    RunFolder(folder).keep(fit)


def digits_run(folder: Path, *, results=True, **fields) -> Path:
    """A whole run on the digits network: three methods, four budgets, five seeds."""
    model, graph = digits_graph()
    study = study_of(**fields)
    costs = bitplan.price("bmac", graph)
    gains = {
        one.title: bitplan.estimate(one.name, model, graph, context=Context(seed=1), **one.options)
        for one in study.methods
    }
    write_run(folder, study, graph, gains, costs)
    if results:
        write_results(folder, study, graph, gains, costs)
    return folder


def crossed_run(folder: Path) -> Path:
    """A run whose curves cross the lines of the references: one rises through them from the left to the right."""
    digits_run(folder, results=False)
    run, draw = RunFolder(folder), random.Random(1)
    study, graph, costs = run.study, run.graph, bitplan.price("bmac", run.graph)
    for method in study.methods:
        for place, budget in enumerate(study.budgets):
            plan = bitplan.select(graph, run.gains[method.title], costs, budget=budget)
            run.keep_plans([plan])
            for seed in study.seeds:
                score = 94 + (0.8 if method.name == "eagl" else 0.4) * (place + 0.3) + draw.gauss(0, 0.05)
                trial = trial_of(study, method.name, budget, seed, method.options, run.gains[method.title].selector)
                run.trials.keep(trial.id, result_of(trial, score, plan))
    for title, score in (("w2a2", 94.0), ("w4a4", 96.0), ("float", 96.2)):
        trial = trial_of(study, title, None, 0)
        run.trials.keep(trial.id, result_of(trial, score))
    return folder


def large_run(folder: Path, layers=1000, methods=8, budgets=100, seeds=5) -> Path:
    """A run of the size that the page must bear; gains are random numbers."""
    draw = random.Random(0)
    widths = [64, 128, 256, 512, 1024]
    made = [
        Layer(name=f"blocks.{i // 10}.part{i % 10}.conv", kind="conv2d", in_features=256,
              macs=draw.choice(widths) * draw.choice(widths) * 49, weights=draw.choice(widths) * draw.choice(widths))
        for i in range(layers)
    ]  # fmt: skip
    links = tuple(Link(layers=(made[i].name, made[i + 1].name), through=f"output {i}") for i in range(0, layers, 25))
    graph = Graph(model="large", layers=tuple(made), links=links)
    costs = bitplan.price("bmac", graph)
    planners = [Method(name="random", label=f"method {index}", options={"place": index}) for index in range(methods)]
    gains = {
        one.title: Gains(
            method="random", options=one.options, choices=costs.choices, graph=graph.id,
            rows={group.name: (0.0, draw.random() * len(group.layers)) for group in graph.selectable},
            histograms=None if index else {layer.name: tuple(draw.choices(range(9999), k=16)) for layer in made},
        )
        for index, one in enumerate(planners)
    }  # fmt: skip
    percents = tuple(f"{51 + 48 * place / (budgets - 1):.2f}%" for place in range(budgets))
    study = study_of("large", budgets=percents, seeds=seeds, planners=tuple(planners), name="Large")
    write_run(folder, study, graph, gains, costs)
    for one in planners:
        for budget in percents:
            for seed in study.seeds:
                trial = trial_of(study, one.name, budget, seed, one.options)
                RunFolder(folder).trials.keep(trial.id, result_of(trial, 90 + draw.random()))
    return folder
