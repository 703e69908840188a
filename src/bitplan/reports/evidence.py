"""The lower half of the page: whether gains add up, every trial, and where all of it comes from."""

from __future__ import annotations

from typing import Any

from bitplan import __version__
from bitplan.core.studies import Fit, Study
from bitplan.core.trials import Trial
from bitplan.reports.subject import Subject

Data = dict[str, Any]


def additivity_data(subject: Subject) -> Data | None:
    """Points (predicted, measured) with their correlations; None where neither experiment was done."""
    pairs, fit = subject.pairs, subject.fit
    if pairs is None and fit is None:
        return None
    return {
        "pairs": pairs and {
            "metric": pairs.metric,
            "r": pairs.correlation,
            "points": [[pair.predicted, pair.measured, f"{pair.first} + {pair.second}"] for pair in pairs.pairs],
        },
        "fit": fit and {
            "metric": fit.metric,
            "r": fit.correlation,
            "r_held_out": fit.correlation_held_out,
            "residual": fit.residual,
            "networks": fit.networks,
            "fitted": fit_points(fit, held_out=False),
            "held_out": fit_points(fit, held_out=True),
        },
    }  # fmt: skip


def fit_points(fit: Fit, *, held_out: bool) -> list[list[Any]]:
    """Predicted and measured score of the networks that made the fit, or of those kept out of it."""
    kept_out = set(fit.held_out)
    networks = zip(fit.predicted, fit.measured, fit.vectors, strict=True)
    points: list[list[Any]] = []
    for index, (predicted, measured, vector) in enumerate(networks):
        if (index in kept_out) == held_out:
            points.append([predicted, measured, f"{sum(vector)} of {len(vector)} groups at the highest choice"])
    return points


def trials_data(subject: Subject) -> list[list[Any]] | None:
    """One row per trial: method, budget, seed, score or None, seconds, device, trial, plan, error."""
    study = subject.study
    if study is None:
        return None

    def head(trial: Trial) -> list[Any]:
        start = "" if trial.start_seed is None else f", start {trial.start_seed}"
        return [f"{study.title_of(trial)}{start}", ", ".join(trial.budgets), trial.seed]

    rows: list[list[Any]] = []
    for result in subject.results:
        trial = result.trial
        rows.append([*head(trial), result.score, result.seconds, result.device, trial.id, result.plan, ""])
    for failure in subject.failures:
        trial = failure.trial
        rows.append([*head(trial), None, failure.seconds, "", trial.id, "", failure.error or "failed"])

    def by_budget(row: list[Any]) -> tuple[str, str, int]:
        title, budget, seed, *_ = row
        return budget, title, seed

    return sorted(rows, key=by_budget)


def provenance_data(subject: Subject) -> list[list[str]]:
    """Names and values, in the order of the flow."""
    rows = [("bitplan", __version__), ("network", subject.graph.model), ("graph", subject.graph.id)]
    for cost in subject.costs:
        rows.append((f"costs ({cost.name})", cost.id))
    for candidate in subject.candidates:
        gains = candidate.gains
        rows.append((f"gains ({candidate.title})", _with_options(f"{gains.id}, seed {gains.seed}", gains.options)))
    if subject.plan is not None:
        rows.append(("plan", subject.plan.id))
    if subject.study is not None:
        rows += _asked_for(subject.study)
    rows += _machines(subject)
    return [list(row) for row in rows]


def _asked_for(study: Study) -> list[tuple[str, str]]:
    return [
        ("study", f"{study.name} ({study.id})"),
        ("task", _with_options(study.task, study.task_options)),
        ("budgets", ", ".join(study.budgets)),
        ("seeds", ", ".join(map(str, study.seeds))),
        ("recipe", _fields(study.recipe)),
        ("start", _fields(study.start)),
        ("rules", _fields(study.rules)),
    ]


def _with_options(name: str, options: dict[str, Any]) -> str:
    return ", ".join([name, *(f"{key}={value}" for key, value in options.items())])


def _fields(record: Any) -> str:
    """What differs from the defaults, so that the eye finds it."""
    content = record.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return ", ".join(f"{key} {_flat(value)}" for key, value in content.items()) or "as the defaults say"


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(f"{key} {_flat(inner)}" for key, inner in value.items())
        return f"({inside})"
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def _machines(subject: Subject) -> list[tuple[str, str]]:
    """Versions and devices of all results; where they differ, every one."""
    versions: dict[str, set[str]] = {}
    for result in subject.results:
        for library, version in result.versions.items():
            versions.setdefault(library, set()).add(version)
    versions.pop("bitplan", None)  # the page is of this one
    rows = [(library, ", ".join(sorted(versions[library]))) for library in sorted(versions)]
    devices = sorted({result.device for result in subject.results if result.device})
    if devices:
        rows.append(("device", ", ".join(devices)))
    return rows
