"""Results in one file: every table, figure and page is that of the run's folder."""

import json

import pytest

from bitplan.core.errors import FileError, InputError
from bitplan.core.records import Plan
from bitplan.core.results import PackedRecords, RunResults
from bitplan.core.trials import Result
from bitplan.reports.contents import contents
from bitplan.reports.kept_results import ResultsFile, RunSnapshot, keep_results, open_run
from bitplan.reports.regrets import methods, methods_values
from bitplan.reports.subject import run_subject
from bitplan.reports.tables import CHOSEN, TABLES, make, significance
from bitplan.store.files import load


@pytest.fixture
def kept(run, tmp_path):
    """A run, and its results in a file."""
    path = tmp_path / "elsewhere" / "results.json"
    path.parent.mkdir()
    path.write_text(keep_results(run.path).to_json())
    return RunSnapshot(run.path), open_run(path)


def test_results_and_plans_are_the_same_but_for_logs(kept):
    folder, file = kept
    assert isinstance(file, ResultsFile)
    assert [one.model_copy(update={"log": ()}) for one in folder.results] == file.results
    assert [one.id for one in file.plans.values()] == list(file.plans)
    assert {result.plan for result in file.results if result.training} <= file.plans.keys() <= folder.plans.keys()
    assert (folder.gains, folder.bound_gains, folder.fit, folder.pairs) == (
        file.gains, file.bound_gains, file.fit, file.pairs,
    )  # fmt: skip
    assert (folder.unfinished, folder.failures) == (file.unfinished, file.failures)


@pytest.mark.parametrize("which", [*TABLES, *CHOSEN])
@pytest.mark.parametrize("plain", [False, True])
def test_every_table_is_the_same(kept, which, plain):
    made = []
    for one in kept:
        try:
            made.append(make(which, one, plain=plain))
        except InputError as error:  # no ceiling, no quantizers
            made.append(str(error).replace(str(one.path), "RUN"))
    assert made[0] == made[1]


def test_tests_and_the_page_are_the_same(kept):
    assert significance(kept[0]) == significance(kept[1])
    pages = [contents(run_subject(one), one.plans) for one in kept]
    for page, one in zip(pages, kept, strict=True):
        page["answer"]["command"] = page["answer"]["command"].replace(str(one.path), "RUN")
        page.pop("provenance")
    assert pages[0] == pages[1]


def test_it_is_small_names_no_places_and_says_when_it_was_edited(kept):
    path = kept[1].path
    text = path.read_text()
    assert len(text) < 0.4 * sum(file.stat().st_size for file in (kept[0].path / "trials").glob("*.json")) + 40_000
    assert load(path, RunResults).to_json() == text
    path.write_text(text.replace('"unfinished": 0', '"unfinished": 1').replace('"score":', '"score": 1', 1))
    with pytest.raises((FileError, InputError)):
        _ = open_run(path).study
    other = json.loads(text)["study"]["task_options"]
    assert not any(str(value).startswith("/") for value in other.values())


def test_what_only_some_say_is_not_usual():
    plans = [
        Plan(model="m", precisions={"a": "w2a2", "b": "w4a4"}, method="x", selector="exact", gain=1.0),
        Plan(model="m", precisions={"a": "w4a4", "b": "w4a4"}, method="x", selector="exact", rounding=0.5, gap=0.5),
    ]
    packed = PackedRecords.of(plans)
    assert packed.read(Plan) == plans
    assert "rounding" not in packed.usual
    assert packed.usual["precisions/b"] == "w4a4"
    assert PackedRecords.of([]).read(Result) == []


def test_methods_over_runs_need_ceilings(kept):
    for make_table in (methods, methods_values):
        with pytest.raises(InputError, match="has no ceiling"):
            make_table([kept[1]])
