"""The ceiling of a study: judged on held-out samples, resumed after a kill, finalists trained as trials are."""

import itertools
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed_ceiling import EFFORT, search
from small_study import BESIDE_THE_NETWORK
from tiny import diary_of

from bitplan.cli import main
from bitplan.core.errors import FileError, InputError
from bitplan.core.records import Checkpoint
from bitplan.plugins.methods.ceiling import Effort, find_ceiling, outlook
from bitplan.reports.document import report
from bitplan.reports.kept_results import keep_results, open_run
from bitplan.reports.regrets import methods, methods_values, regret, regret_values
from bitplan.stats.regret import regrets
from bitplan.store.files import load, write_text
from bitplan.store.run_folder import RunFolder
from bitplan.study.clean import find_waste
from bitplan.study.context import RunContext
from bitplan.study.restore import restore
from bitplan.study.spec import read_study
from bitplan.study.status import check
from bitplan.study.trials import starts
from bitplan.tasks.base import choosing_task

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(swept, tmp_path_factory):
    """A run with a ceiling at 70 %, and the ceiling; do not write to it."""
    run = tmp_path_factory.mktemp("ceiling") / "run"
    shutil.copytree(swept, run)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(BESIDE_THE_NETWORK)
        return run, search(swept.parent / "study.toml", run)


def test_the_search_uses_what_it_was_given_and_the_finalists_the_study_s_seeds(found):
    run, ceiling = RunFolder(found[0]), found[1]
    assert len(ceiling.judged) == EFFORT.trainings
    assert ceiling.complete
    assert all(one.seed > max(run.study.seeds) for one in ceiling.judged)
    assert ceiling.judged[0].by.startswith("eagl")
    assert [sorted({score.seed for score in one.scores}) for one in ceiling.finalists] == [[0, 1], [0, 1]]
    expected = [one.expected for one in ceiling.finalists]
    assert expected == sorted(expected, reverse=True)
    assert [one.search.budget for one in run.found_ceilings] == ["70%"]
    ids = {one.training for one in ceiling.judged}
    assert len(ids) == EFFORT.trainings <= len(run.trained.ids())


def test_plans_are_judged_by_samples_that_they_were_not_trained_on(found, study):
    task = RunContext(study, RunFolder(found[0]), trust=True).task
    part = choosing_task(task, 0.1)
    assert part.size("train") + part.size("test") == task.size("train")
    for one in found[1].judged:
        assert RunFolder(found[0]).trained.read(one.training).score == one.score
        right = one.score * part.size("test") / 100
        assert right == pytest.approx(round(right))  # so many of the 144 samples held out; the test split has 360


def test_a_network_that_the_sweep_trained_is_not_trained_again(found, swept):
    ceiling, before = found[1], RunFolder(swept).trained.ids()
    from_methods = [one for one in ceiling.finalists if "eagl" in one.by]
    for one in from_methods:
        assert {score.training for score in one.scores} <= before
    assert {one.training for one in ceiling.judged}.isdisjoint(before)


def test_a_start_that_comes_out_otherwise_when_made_again_is_refused(swept, study, tmp_path):
    run = RunFolder(shutil.copytree(swept, tmp_path / "run"))
    high = run.starts.path(starts(study).high.id)
    shutil.move(high, aside := high.with_name(f"{high.name}.damaged"))
    about = load(aside / "checkpoint.json", Checkpoint).model_copy(update={"sha256": "0" * 64})
    (aside / "checkpoint.json").write_text(about.to_json(of=high.name))
    with pytest.raises(InputError, match=rf"{high.name} was damaged and made again, and is not the network"):
        find_ceiling(study, run.path, "70%", effort=EFFORT, trust=True)


def test_a_killed_search_goes_on_and_finds_the_same(found, swept, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(swept, run)
    diary_of(run).touch()
    command = [sys.executable, str(HERE / "killed_ceiling.py"), str(swept.parent / "study.toml"), str(run)]
    path = {"PYTHONPATH": str(BESIDE_THE_NETWORK), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=BESIDE_THE_NETWORK, env=os.environ | path
    ) as process:
        for line in itertools.islice(process.stdout, 200):
            if line.startswith("searching") and len(diary_of(run).read_text().splitlines()) >= 5:
                break
        process.kill()
    begun = diary_of(run).read_text().splitlines()
    done = RunFolder(run).trained.ids() - RunFolder(swept).trained.ids()
    assert 0 < len(done) < EFFORT.trainings
    torch.set_num_threads(1)
    ceiling = search(swept.parent / "study.toml", run)
    assert ceiling.model_copy(update={"seconds": 0.0}) == found[1].model_copy(update={"seconds": 0.0})
    after = diary_of(run).read_text().splitlines()[len(begun) :]
    assert not done.intersection(after)  # what was finished is not begun again


def test_more_trainings_go_on_where_fewer_ended(found, swept, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(found[0], run)
    more = Effort(EFFORT.trainings + 3, EFFORT.finalists, EFFORT.seed)
    ceiling = find_ceiling(RunFolder(run).study, run, "70%", effort=more, trust=True)
    assert ceiling.judged[: EFFORT.trainings] == found[1].judged
    assert len(ceiling.judged) == EFFORT.trainings + 3
    assert RunFolder(run).found_ceilings == [ceiling]


@pytest.mark.parametrize(("more", "ended_at"), [(0, "searching"), (3, "deciding")])
def test_a_search_that_is_killed_while_it_repeats_takes_nothing_away(found, study, tmp_path, more, ended_at):
    run = tmp_path / "run"
    shutil.copytree(found[0], run)
    events = []

    def end(done, total, what):
        events.append(what.partition(":")[0])
        if events.count(ended_at) > (6 if ended_at == "searching" else 0):
            raise KeyboardInterrupt

    effort = Effort(EFFORT.trainings + more, EFFORT.finalists, EFFORT.seed)
    with pytest.raises(KeyboardInterrupt):
        find_ceiling(study, run, "70%", effort=effort, progress=end, trust=True)
    (kept,) = RunFolder(run).found_ceilings
    assert kept.judged[: EFFORT.trainings] == found[1].judged
    assert len(kept.judged) == effort.trainings
    assert kept.finalists == found[1].finalists
    assert find_waste(run, [study]).paths == ()
    assert any("not finished" in note for note in regret(RunFolder(run)).notes) == bool(more)
    asked = outlook(study, run, ["70%"], effort=effort, trust=True)
    assert (asked.searching, asked.deciding) == (0, 4 if more else 0)


def test_a_shorter_search_does_not_take_the_place_of_a_longer_one(found, study):
    kept = found[0] / "ceilings" / f"{found[1].search.id}.json"
    before = kept.read_bytes()
    with pytest.raises(
        InputError, match=f"a search of {EFFORT.trainings} trainings at 70%.* ask for {EFFORT.trainings}"
    ):
        find_ceiling(study, found[0], "70%", effort=Effort(2, EFFORT.finalists, EFFORT.seed), trust=True)
    assert kept.read_bytes() == before


def test_what_another_seed_found_is_not_taken_for_done(found, study):
    other = outlook(study, found[0], ["70%"], effort=Effort(9, 2, seed=4), trust=True)
    assert (other.searching, other.deciding) == (9, 4)


def test_nothing_of_it_is_waste_and_all_is_sound(found, study):
    assert find_waste(found[0], [study]).paths == ()
    assert check(found[0]).wrong == ()


def test_what_is_left_is_told_before_it_begins(found, study, swept):
    all_of_it = outlook(study, swept, ["70%"], effort=EFFORT, trust=True)
    assert (all_of_it.trials, all_of_it.searching, all_of_it.deciding) == (0, 9, 4)
    assert all_of_it.seconds > 0
    nothing = outlook(study, found[0], ["70%"], effort=EFFORT, trust=True)
    assert (nothing.searching, nothing.deciding, nothing.seconds) == (0, 0, 0)


def test_regrets_stand_in_tables_and_on_the_page(found, tmp_path):
    run, ceiling = RunFolder(found[0]), found[1]
    values = {one.title: one for one in regrets(run.study, run.results, [ceiling], run.plans)}
    assert set(values) == {"eagl", "uniform", "from the last"}
    by_method = {row[0]: row for row in regret_values(run).rows}
    assert by_method["eagl"][2] == values["eagl"].value
    assert [row[0] for row in regret(run).rows] == ["eagl", "uniform", "from the last"]
    assert "Against the best plan found" in report(run, tmp_path / "page.html").read_text()


def test_methods_over_runs_are_the_same_from_the_folder_and_from_its_results(found, tmp_path, monkeypatch, capsys):
    kept = tmp_path / "results.json"
    for told in (
        ["run", "results", str(found[0]), "-o", str(kept)],
        ["run", "tables", str(kept), "--which", "methods"],
    ):
        monkeypatch.setattr(sys, "argv", ["bitplan", *told])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
    assert "tiny:network, 70%" in capsys.readouterr().out
    runs = [RunFolder(found[0]), open_run(kept)]
    assert methods([runs[0]]) == methods([runs[1]])
    values = {row[0]: row[3] for row in methods_values([runs[1]]).rows}
    own = {one.title: one.value for one in regrets(runs[0].study, runs[0].results, [found[1]], runs[0].plans)}
    assert values == {"eagl": own["eagl"], "uniform": own["uniform"], "last_to_first": own["from the last"]}


def test_a_method_is_one_row_whatever_studies_call_it(found, tmp_path):
    kept = keep_results(found[0])
    labels = [method.model_copy(update={"label": f"our {method.name}"}) for method in kept.study.methods]
    study = kept.study.model_copy(update={"name": "another", "methods": tuple(labels)})
    searches = [one.search.model_copy(update={"study": study.id}) for one in kept.ceilings]
    ceilings = [one.model_copy(update={"search": own}) for one, own in zip(kept.ceilings, searches, strict=True)]
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    files[0].write_text(kept.to_json())
    files[1].write_text(kept.model_copy(update={"study": study, "ceilings": tuple(ceilings)}).to_json())
    made = methods([open_run(file) for file in files])
    assert [column.name for column in made.columns] == ["method", "tiny, 70%", "another, 70%", "epochs to choose"]
    assert [row[0] for row in made.rows] == ["eagl", "uniform", "last_to_first"]
    assert all(row[1] == row[2] for row in made.rows)


def test_bad_wishes_are_refused(study, tmp_path, swept):
    with pytest.raises(InputError, match="no budget 50%.*85%, 70%"):
        find_ceiling(study, tmp_path, "50%")
    with pytest.raises(InputError, match="at least 2 trainings"):
        Effort(trainings=1)
    with pytest.raises(InputError, match="no ceiling yet: `bitplan run ceiling"):
        regret(RunFolder(swept))
    with pytest.raises(FileError, match="is not the folder of a run"):
        regret(RunFolder(tmp_path))


def test_the_verb_tells_what_it_takes_then_the_regrets(found, swept, monkeypatch, capsys):
    told = ["--trainings", "9", "--finalists", "2", "--seed", "3", "--budget", "70%", "--trust"]
    monkeypatch.setattr(
        sys, "argv", ["bitplan", "run", "ceiling", str(swept.parent / "study.toml"), "--run", str(found[0]), *told]
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    out, err = capsys.readouterr()
    assert "0 trainings to search and 0 of the finalists are left" in err
    assert "what each method lacks against the best plan found" in out


def test_a_ceiling_is_found_again_and_goes_on_from_there(swept, write, tmp_path):
    study = read_study(write())
    shutil.copytree(swept, tmp_path / "copy")
    find_ceiling(study, tmp_path / "copy", "70%", effort=EFFORT, trust=True)
    kept = write_text(tmp_path / "kept.json", keep_results(tmp_path / "copy").to_json())
    run = tmp_path / "run"
    restore(study, run, open_run(kept))
    diary_of(run).touch()
    again = find_ceiling(study, run, "70%", effort=EFFORT, trust=True)
    for name, trained in RunFolder(tmp_path / "copy").trained.read_all().items():
        if name in {result.training for result in RunFolder(swept).results}:
            assert RunFolder(run).trained.read(name) == trained.model_copy(update={"log": ()})
    [before] = RunFolder(tmp_path / "copy").found_ceilings
    assert (again.judged, again.finalists) == (before.judged, before.finalists)
    assert not diary_of(run).read_text()
    longer = find_ceiling(study, run, "70%", effort=replace(EFFORT, trainings=11), trust=True)
    assert len(longer.judged) == 11
    assert longer.judged[:9] == before.judged
    assert RunFolder(run).starts.has(before.search.start)  # made again, now that something is left to do from it
    assert not list(RunFolder(run).running.folder.iterdir())
