"""A study may score its networks as integer kernels compute them."""

import pytest
from small_study import BESIDE_THE_NETWORK
from tiny import network

import bitplan
from bitplan.core.registry import EXECUTIONS
from bitplan.plugins.integer import integer
from bitplan.quant.checkpoint import load_checkpoint
from bitplan.store.run_folder import RunFolder
from bitplan.study.spec import read_study
from bitplan.study.sweep import sweep
from bitplan.study.trials import trials

IN_INTEGERS = ("seeds = [0, 1]", "seeds = [0]\nin_integers = true\nkeep_networks = true")


def test_networks_are_scored_in_integers(write, monkeypatch, tmp_path):
    monkeypatch.chdir(BESIDE_THE_NETWORK)
    study = read_study(write(IN_INTEGERS))
    called = []
    monkeypatch.setitem(EXECUTIONS._registered, "integer", lambda *given: called.append(1) or integer(*given))
    sweep(study, tmp_path / "run", trust=True)
    run = RunFolder(tmp_path / "run")
    kept = list(run.networks.folder.iterdir())
    starts = [result for result in run.results if result.trial.role in ("float", "start")]
    assert len(called) == len([path for path in kept if path.is_dir()]) + 1, "all but the float network"
    high = next(result for result in starts if result.trial.role == "start")
    found = integer(load_checkpoint(run.starts.path(high.trial.id), network()))
    assert high.score == pytest.approx(bitplan.evaluate(found, bitplan.load_task("digits")))


def test_ids_tell_how_networks_are_scored(write, study):
    in_integers = read_study(write(("seeds = [0, 1]", "seeds = [0, 1]\nin_integers = true")))
    assert in_integers.id != study.id
    assert not {trial.id for trial in trials(in_integers)} & {trial.id for trial in trials(study)}
