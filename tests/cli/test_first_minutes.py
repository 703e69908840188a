"""What a newcomer meets: names of packages that are not there, devices, help where nothing is typed."""

import os

import pytest
from accelerate.state import AcceleratorState

import bitplan
from bitplan.adapters import timm, torchvision
from bitplan.reports.tables import frontier
from bitplan.tune.loop import training_on


@pytest.fixture
def without(monkeypatch):
    """An environment that lacks these libraries."""

    def lacking(*libraries):
        for library in libraries:
            monkeypatch.setattr(library, "is_installed", lambda: False)

    return lacking


@pytest.mark.parametrize("name", ["resnet50", "vit_b_16", "mobilenet_v2", "wide_resnet50_2"])
@pytest.mark.parametrize(
    "words", [("plan", "--budget", "70%"), ("steps", "trace"), ("quantize", "--bits", "w4a4", "-o", "q")]
)
def test_a_name_of_torchvisions_says_what_to_install(run, without, name, words):
    without(torchvision, timm)
    code, out, err = run(*words[: 1 + (words[0] == "steps")], name, *words[1 + (words[0] == "steps") :])
    needs = "needs torchvision, which is not installed: pip install 'bitplan[vision]'"
    assert (code, out, err) == (2, "", f"error: the model {name} {needs}\n")


def test_a_name_of_timms_says_what_to_install(run, without):
    without(timm)
    code, _, err = run("plan", "timm/resnet18", "--budget", "70%")
    assert code == 2
    assert err == "error: the model timm/resnet18 needs timm, which is not installed: pip install 'bitplan[vision]'\n"


def test_an_unknown_name_says_whose_names_are_not_known(run, without):
    without(torchvision, timm)
    code, _, err = run("steps", "trace", "digits_transformr")
    assert code == 2
    assert "did you mean digits_transformer" in err
    assert "? Those of torchvision and timm are not known here: pip install" in err
    assert run("steps", "trace", "digits_resnet")[0] == 0  # bitplan's own are there


@pytest.mark.parametrize("words", [(), ("run", "store")])
def test_alone_it_shows_what_there_is(run, words):
    _, out, err = run(*words)
    assert "Usage: bitplan" in out + err
    assert "error" not in out + err


def test_training_is_where_device_says(run, monkeypatch):
    """accelerate is asked, as by its own launcher; afterwards it decides again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
    words = ("--task", "digits", "--recipe", "steps=1", "--recipe", "batch_size=16")
    assert run("finetune", "digits_resnet", *words, "--device", "cpu:0", "-o", "trained")[0] == 0
    assert str(AcceleratorState().device) == "cpu:0"
    assert "ACCELERATE_TORCH_DEVICE" not in os.environ
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_device_that_was_set_before_is_so_again(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    with training_on("cpu:0"):
        assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu:0"
    assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu"
    with training_on(None):
        assert os.environ["ACCELERATE_TORCH_DEVICE"] == "cpu"


def test_the_method_uniform_and_a_network_at_one_precision_have_different_names(tmp_path):
    from bad_files import digits_run

    rows = frontier(bitplan.RunFolder(digits_run(tmp_path / "run"))).rows
    assert [row[0] for row in rows] == ["all at w2a2", "all at w4a4", "float", "eagl", "uniform", "first_to_last"]
