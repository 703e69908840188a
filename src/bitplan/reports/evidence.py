"""The lower half of the page: whether gains add up, every trial, and where all of it comes from."""

from __future__ import annotations

from typing import Any

from bitplan import __version__
from bitplan.core.studies import Fit
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
    kept = set(fit.held_out)
    return [
        [predicted, measured, f"{sum(vector)} of {len(vector)} groups at the highest choice"]
        for index, (predicted, measured, vector) in enumerate(
            zip(fit.predicted, fit.measured, fit.vectors, strict=True)
        )
        if (index in kept) == held_out
    ]


def trials_data(subject: Subject) -> list[list[Any]] | None:
    """One row per trial: method, budget, seed, score or None, seconds, device, trial, plan, error."""
    study = subject.study
    if study is None:
        return None

    def head(trial: Trial) -> list[Any]:
        return [study.title_of(trial), ", ".join(trial.budgets), trial.seed]

    rows = [
        [*head(one.trial), one.score, one.seconds, one.device, one.trial.id, one.plan, ""] for one in subject.results
    ]
    rows += [
        [*head(one.trial), None, one.seconds, "", one.trial.id, "", one.error or "failed"] for one in subject.failures
    ]
    return sorted(rows, key=lambda row: (row[1], row[0], row[2]))


def provenance_data(subject: Subject) -> list[list[str]]:
    """Names and values, in the order of the flow."""
    study, candidates = subject.study, subject.candidates
    rows = [("bitplan", __version__), ("network", subject.graph.model), ("graph", subject.graph.id)]
    rows += [(f"costs ({cost.name})", cost.id) for cost in subject.costs]
    rows += [
        (f"gains ({one.title})", _gains_line(one.gains.id, one.gains.seed, one.gains.options)) for one in candidates
    ]
    if subject.plan is not None:
        rows.append(("plan", subject.plan.id))
    if study is not None:
        rows += [
            ("study", f"{study.name} ({study.id})"),
            ("task", _with_options(study.task, study.task_options)),
            ("budgets", ", ".join(study.budgets)),
            ("seeds", ", ".join(map(str, study.seeds))),
            ("recipe", _fields(study.recipe)),
            ("start", _fields(study.start)),
            ("rules", _fields(study.rules)),
        ]
    rows += _machines(subject)
    return [list(row) for row in rows]


def _gains_line(identity: str, seed: int, options: dict[str, Any]) -> str:
    return _with_options(f"{identity}, seed {seed}", options)


def _with_options(name: str, options: dict[str, Any]) -> str:
    return ", ".join([name, *(f"{key}={value}" for key, value in options.items())])


def _fields(record: Any) -> str:
    """What differs from the defaults, so that the eye finds it."""
    content = record.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return ", ".join(f"{key} {_flat(value)}" for key, value in content.items()) or "as the defaults say"


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_flat(inner)}" for key, inner in value.items()) + ")"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _machines(subject: Subject) -> list[tuple[str, str]]:
    """Versions and devices of all results; where they differ, every one."""
    versions: dict[str, set[str]] = {}
    for result in subject.results:
        for library, version in result.versions.items():
            versions.setdefault(library, set()).add(version)
    rows = [(library, ", ".join(sorted(found))) for library, found in sorted(versions.items()) if library != "bitplan"]
    devices = sorted({result.device for result in subject.results if result.device})
    return rows + ([("device", ", ".join(devices))] if devices else [])
