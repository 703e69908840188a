"""Relaxations in a study: an estimate for each budget, within what the study allows; everything reads the run."""

from bitplan.store.run_folder import RunFolder
from bitplan.study.forecast import forecast
from bitplan.study.spec import read_study
from bitplan.study.status import check
from bitplan.study.sweep import sweep

METHODS = """
[[methods]]
name = "fracbits"
[[methods]]
name = "mixture"
label = "barrier"
options = { style = "bpnas" }
"""


def test_it_is_trained_for_each_budget_within_the_spend_of_the_study(write, tmp_path):
    path = write(("seeds = [0, 1]", "seeds = [0]\nspend = 0.3"), ('[[methods]]\nname = "uniform"\n', METHODS))
    study = read_study(path)
    told = forecast(study, tmp_path / "run", trust=True)
    assert set(told.methods) == {"fracbits", "barrier"}
    summary = sweep(study, tmp_path / "run", trust=True, only=["fracbits", "barrier"])
    assert summary.failed == ()
    run = RunFolder(tmp_path / "run")
    found = run.bound_gains
    titles = {f"{title} at {budget}, seed 0" for title in ("fracbits", "barrier") for budget in ("85%", "70%")}
    assert set(found) == titles
    allowed = 0.3 * 3 * 1437
    assert {gains.counts["spend"] for gains in found.values()} == {allowed // (4 * 32) * (4 * 32)}  # a teacher counts
    plans = run.plans
    for result in run.results:
        if result.trial.role == "choice":
            assert all(limit.cost <= limit.capacity for limit in plans[result.plan].limits)
    assert check(run.path).wrong == ()
    assert not list(run.running.folder.glob("*"))
    assert sweep(study, tmp_path / "run", trust=True, only=["fracbits", "barrier"]).trained == 0
