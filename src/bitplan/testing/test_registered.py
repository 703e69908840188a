"""`pytest --pyargs bitplan.testing`: everything that is registered, entries of other packages included.

An entry is tried with its default options. What cannot be tried so (an option without a default, data that is not
there, a library that is not installed) is skipped and said at the end, with the call that tries it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bitplan.core.errors import FileError, InputError, MissingExtra
from bitplan.core.registry import (
    CONTRACTS,
    COSTS,
    ENGINES,
    EXPORTERS,
    GAINS,
    JUDGES,
    LAYERS,
    MODELS,
    QUANTIZERS,
    RELAXATIONS,
    SEARCHES,
    SELECTORS,
    TASKS,
    Registry,
)
from bitplan.testing import (
    BrokenContract,
    NeedsMore,
    check_cost,
    check_engine,
    check_exporter,
    check_gain,
    check_layer,
    check_model,
    check_quantizer,
    check_selector,
    check_task,
)

# Of bitplan's own, what is quick.
_QUICK: Mapping[str, Mapping[str, Any]] = {
    "adaptive": {"samples": 32, "batch_size": 16, "levels": 2},
    "alps": {"steps": 2},
    "alps_racing": {"steps": 2, "rounds": 2, "budgets": "70%", "samples": 32, "batch_size": 16},
    "drop": {"samples": 32, "batch_size": 16},
    "hawq": {"probes": 3, "min_probes": 2},
    "hawq_v1": {"iterations": 3},
    "hawq_v2": {"probes": 3, "min_probes": 2},
    "plan_racing": {"plans": "drift,uniform", "spend": 0.2},
    "regression": {"steps": 1},
    "table": {"path": "gains.csv"},
}
_QUICK_JUDGES: Mapping[str, Mapping[str, Any]] = {
    "drift": {"samples": 32, "batch_size": 16},
    "drop": {"samples": 32, "batch_size": 16},
    "finetuned": {"steps": 2},
}
_TABLE = "layer,w2a2,w3a3,w4a4,w8a8\na,0,1,2,3\nb,0,1,2,3\nc,0,2,3,4\n"
_MOST_SAMPLES = 20_000  # all of them are read a few times
_WORKERS: Mapping[str, tuple[Mapping[str, Any], ...]] = {"local": ({}, {"workers": 2}), "cluster": ({"cpus": 1},)}

# Of bitplan's own relaxations, options that train otherwise; a barrier needs more than the lowest choices.
_RELAXED: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "fracbits": ({}, {"penalty": "linear"}),
    "mixture": ({}, {"style": "dnas", "halves": False}),
}

# Of bitplan's own quantizers, options that make other modules.
_WAYS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "dorefa": ({}, {"zero": True, "scaled": True}),
    "sawb": ({}, {"zero": True}),
    "ternary": ({}, {"learned": True}),
}


@pytest.mark.parametrize("name", list(GAINS))
def test_gain(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group finite values, 0 at the lowest, the same for a seed; the model as it was."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gains.csv").write_text(_TABLE)
    check_gain(_made(GAINS, name, _QUICK.get(name, {})))


@pytest.mark.parametrize("name", list(SEARCHES))
def test_search(name: str) -> None:
    """The best plan that it saw, within the budget, for no more than may be spent; the same for a seed."""
    CONTRACTS.get("check_search")(_made(SEARCHES, name, {}))


@pytest.mark.parametrize(
    ("name", "options"), [(name, one) for name in RELAXATIONS for one in _RELAXED.get(name, ({},))]
)  # fmt: skip
def test_relaxation(name: str, options: Mapping[str, Any]) -> None:
    """Shares that learn, a table that uses the budget up, for no more than is allowed; the same for a seed."""
    CONTRACTS.get("check_relaxation")(_made(RELAXATIONS, name, options))


@pytest.mark.parametrize("name", list(JUDGES))
def test_judge(name: str) -> None:
    """A finite score for each plan, the same again; the model as it was."""
    CONTRACTS.get("check_judge")(_made(JUDGES, name, _QUICK_JUDGES.get(name, {})))


@pytest.mark.parametrize("name", list(COSTS))
def test_cost(name: str) -> None:
    """Whole numbers from 0, with a unit."""
    check_cost(COSTS.get(name))


@pytest.mark.parametrize("name", list(SELECTORS))
def test_selector(name: str) -> None:
    """Within every budget, and the same again."""
    check_selector(SELECTORS.get(name))


@pytest.mark.parametrize("name", list(MODELS))
def test_model(name: str) -> None:
    """Built and traced."""
    with _tried():
        check_model(MODELS.get(name), name=name)


@pytest.mark.parametrize("name", list(TASKS))
def test_task(name: str) -> None:
    """Disjoint splits, scores that repeat, batches by seed."""
    task = _made(TASKS, name, {})
    try:
        samples = task.size("train") + task.size("test")
    except (FileError, MissingExtra) as error:
        pytest.skip(f"task {name} has no data here: {error}")
    if samples > _MOST_SAMPLES:
        pytest.skip(f"task {name} has {samples:,} samples: try a small part of them, with check_task(task, model=…)")
    with _tried():
        check_task(task)


@pytest.mark.parametrize("name", list(EXPORTERS))
def test_exporter(name: str) -> None:
    """What is written reads back equal, what cannot be is refused by name, and what runs does what the model does."""
    exporter = _made(EXPORTERS, name, {})
    with _tried():
        check_exporter(exporter)


@pytest.mark.parametrize(("name", "options"), [(name, one) for name in ENGINES for one in _WORKERS.get(name, ({},))])
def test_engine(name: str, options: Mapping[str, Any]) -> None:
    """All items, in any order, whichever fails."""
    engine = _made(ENGINES, name, options)
    with _tried():
        check_engine(engine)


@pytest.mark.parametrize("name", list(LAYERS))
def test_layer(name: str) -> None:
    """Quantized, calibrated, trained, saved, packed and counted."""
    check_layer(LAYERS.get(name))


@pytest.mark.parametrize(("name", "options"), [(name, one) for name in QUANTIZERS for one in _WAYS.get(name, ({},))])
def test_quantizer(name: str, options: Mapping[str, Any]) -> None:
    """Codes and levels that agree with what is computed; trained, saved, packed and counted."""
    check_quantizer(_made(QUANTIZERS, name, options))


def _made(registry: Registry, name: str, options: Mapping[str, Any]) -> Any:
    """The entry with these options; one that needs more is skipped."""
    try:
        return registry.make(name, options)
    except InputError as error:
        if isinstance(error.__context__, TypeError):  # an option without a default
            pytest.skip(f"{error}: try it with bitplan.testing.check_{registry.what}(…)")
        raise


@contextmanager
def _tried() -> Iterator[None]:
    """Skip what needs a library that is not installed, or something that only its author can give."""
    try:
        yield
    except BrokenContract as broken:
        if isinstance(broken.__cause__, MissingExtra):
            pytest.skip(str(broken.__cause__))
        raise
    except (MissingExtra, NeedsMore) as error:
        pytest.skip(str(error))
