"""A study with several starts: each has its own seed, methods estimate from each, and tests are within starts."""

from pathlib import Path

import pytest
from tiny import STUDY

from bitplan.core.errors import FileError
from bitplan.reports.scores import gather
from bitplan.reports.subject import run_subject
from bitplan.reports.tables import frontier
from bitplan.stats.compare import cells, compare
from bitplan.stats.ranksum import stratified_rank_sum
from bitplan.store.run_folder import RunFolder
from bitplan.study.spec import read_study
from bitplan.study.sweep import sweep
from bitplan.study.trials import agenda, all_starts, starts

SEEDS = ("[start]\n", "[start]\nseeds = [0, 7]\n")
FEWER = ('budgets = ["85%", "70%"]', 'budgets = ["70%"]')


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """A finished run with two starts; do not write to it."""
    home = tmp_path_factory.mktemp("twice")
    (home / "study.toml").write_text(STUDY.replace(*SEEDS).replace(*FEWER))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).parent)
        summary = sweep(read_study(home / "study.toml"), home / "run", trust=True)
    assert (summary.done, summary.failed) == (24, ())  # 2 starts of 2 networks, then 2 · 2 · (2 references + 3 methods)
    return RunFolder(home / "run")


def test_one_seed_among_several_starts_is_a_study_with_one_start(write):
    study = read_study(write())
    alike = read_study(write(("[start]\n", "[start]\nseeds = [0]\n")))
    assert (alike.id, agenda(alike).id) == (study.id, agenda(study).id)


def test_every_start_has_its_own_float_network_and_the_first_is_that_of_before(write):
    one, several = read_study(write()), read_study(write(SEEDS))
    first, second = all_starts(several)
    assert (first.floating.id, first.high.id) == (starts(one).floating.id, starts(one).high.id)
    assert second.floating.seed == second.high.seed == 7
    assert second.high.start == second.floating.id != first.floating.id


def test_methods_choose_from_every_start(twice):
    chosen = [result for result in twice.results if result.trial.role == "choice"]
    assert sorted((result.trial.start_seed, result.trial.seed) for result in chosen) == sorted(
        [(0, 0), (0, 1), (7, 0), (7, 1)] * 3
    )
    gains = [twice.gains_of(title) for title in ("eagl", "eagl, start 7")]
    assert gains[0].rows != gains[1].rows
    assert twice.study.words(chosen[-1].trial) == "from the last 70% start 7 seed 1"


def test_networks_distill_from_the_float_network_of_their_own_start(twice):
    scores = {
        (one.trial.role, one.trial.seed): one.score for one in twice.results if one.trial.role in ("float", "start")
    }
    assert len(set(scores.values())) > 2
    assert len({result.training for result in twice.results if result.training}) >= 12


def test_spreads_are_over_starts_and_seeds_and_p_is_within_starts(twice):
    study = twice.study
    by_title = {cell.title: cell for cell in cells(study, twice.results, twice.plans)}
    eagl, last = by_title["eagl"], by_title["from the last"]
    assert (eagl.starts, eagl.seeds) == ((0, 0, 7, 7), (0, 1, 0, 1))
    test = next(
        one
        for one in compare(study, twice.results, twice.plans)
        if {one.first, one.second} == {"eagl", "from the last"}
    )
    assert test.p == stratified_rank_sum([(eagl.from_start(start), last.from_start(start)) for start in (0, 7)])
    assert test.floor == pytest.approx(2 / 36)
    assert f"{eagl.mean:.2f} ± {eagl.sd:.2f}" in str(frontier(twice).rows)


def test_a_page_shows_all_trials(twice):
    scores = gather(run_subject(twice), twice.plans)
    assert (scores.done, scores.planned) == (12, 12)


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        ("seed = 1\nseeds = [0, 7]", "says seed and seeds"),
        ("seeds = [3, 3]", "must differ"),
        ('seeds = [0, 1]\ncheckpoint = "x"', "a checkpoint is one start"),
    ],
)
def test_bad_starts_are_refused(write, told, complaint):
    with pytest.raises(FileError, match=complaint):
        read_study(write(("[start]\n", f"[start]\n{told}\n")))
