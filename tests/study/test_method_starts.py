"""A method may look at another start than the one that trials train from: EAGL at LSQ's beside FAQ's, as the paper."""

import pytest

import bitplan
from bitplan.core.errors import FileError, InputError
from bitplan.core.studies import Study
from bitplan.quant.checkpoint import load_checkpoint
from bitplan.reports.tables import frontier
from bitplan.store.run_folder import RunFolder
from bitplan.study.clean import find_waste
from bitplan.study.context import RunContext
from bitplan.study.forecast import forecast
from bitplan.study.spec import read_study
from bitplan.study.sweep import sweep
from bitplan.study.trials import starts, trials

FAQ = ("[start]\n", '[start]\noptions = { method = "faq" }\n')
TWO = (
    '[[methods]]\nname = "uniform"\n',
    '[[methods]]\nname = "eagl"\nlabel = "EAGL of LSQ"\nstart = { method = "lsq" }\n',
)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run from a FAQ start with EAGL by both starts."""
    from tiny import STUDY

    home = tmp_path_factory.mktemp("both")
    text = STUDY.replace(*FAQ).replace(*TWO).replace('budgets = ["85%", "70%"]', 'budgets = ["70%"]')
    (home / "study.toml").write_text(text.replace("seeds = [0, 1]", "seeds = [0]"))
    with pytest.MonkeyPatch.context() as patch:
        from pathlib import Path

        patch.chdir(Path(__file__).parent)
        study = read_study(home / "study.toml")
        summary = sweep(study, home / "run", trust=True)
    assert summary.failed == ()
    return study, home / "run"


def test_each_method_sees_its_own_start_and_all_train_from_one(done):
    study, folder = done
    run, known = RunFolder(folder), starts(study)
    assert [trial.method for trial in known.all] == ["float", "w4a4 start", "w4a4 start, method=lsq"]
    assert {path.name for path in (folder / "starts").iterdir()} == {trial.id for trial in known.all}
    for method in (study.methods[0], study.methods[1]):
        start = known.of(method)
        network = load_checkpoint(
            folder / "starts" / start.id, RunContext(study, run, True).bare_network(), of=start.id
        )
        by_hand = bitplan.estimate("eagl", network, run.graph, choices=study.choices)
        assert run.gains_of(method.title).rows == by_hand.rows
    assert run.gains_of("eagl").rows != run.gains_of("EAGL of LSQ").rows
    assert {result.trial.start for result in run.results if result.trial.role == "choice"} == {known.high.id}
    assert "EAGL of LSQ" in [row[0] for row in frontier(run).rows]


def test_nothing_is_done_again_and_nothing_of_it_is_waste(done):
    study, folder = done
    assert sweep(study, folder, trust=True).trained == 0
    assert not [path for path in find_waste(folder, [study]).paths if path.parent.name in ("starts", "estimates")]
    told = forecast(study, folder, trust=True)
    assert all(line.done for line in told.lines)
    assert len(told.lines) == len(trials(study)) == 3 + 2 + 3


def test_a_study_without_such_a_method_is_what_it_was(write):
    plain, own = read_study(write()), read_study(write(TWO, name="own.toml"))
    assert [one.id for one in trials(plain)[:2]] == [one.id for one in trials(own)[:2]]
    assert Study.from_json(own.to_json()) == own
    assert starts(plain).others == {}


def test_the_studys_own_options_are_no_other_start(write):
    same = read_study(write(FAQ, (TWO[0], TWO[1].replace("lsq", "faq"))))
    assert starts(same).others == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ((TWO[0], TWO[1].replace("lsq", "lqs")), "options: unknown quantizer 'lqs'"),
        ((TWO[0], TWO[1].replace('{ method = "lsq" }', "4")), "start"),
    ],
)
def test_what_cannot_be_is_one_line(write, changes, message):
    with pytest.raises((FileError, InputError), match=message):
        trials(read_study(write(changes)))
