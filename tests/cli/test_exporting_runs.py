"""export and verify on the folder of a run: which network it is, that it is the recorded one, and what is said."""

import shlex
import shutil
from pathlib import Path

import pytest

import bitplan
from bitplan.core.registry import EXPORTERS
from bitplan.exporters.onnx import Onnx
from bitplan.reports.scores import answer, gather
from bitplan.reports.subject import run_subject
from bitplan.store.files import load, save
from bitplan.store.run_folder import RunFolder
from bitplan.study import scheduling

HOME = Path(__file__).parents[1] / "study"


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """The run of tests/study's tiny study; do not write to it."""
    folder = tmp_path_factory.mktemp("swept")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME))
        import tiny

        (folder / "study.toml").write_text(tiny.STUDY)
        bitplan.sweep(bitplan.read_study(folder / "study.toml"), folder / "run", trust=True)
    return folder / "run"


@pytest.fixture
def folder(swept, run, tmp_path, monkeypatch):
    """A copy of it, named `run`, where the command line is."""
    monkeypatch.syspath_prepend(str(HOME))
    return RunFolder(shutil.copytree(swept, tmp_path / "run"))


@pytest.fixture
def untrainable(monkeypatch):
    def refuse():
        def fail(*_, **__):
            raise AssertionError("something was trained")

        monkeypatch.setattr(scheduling, "finetune_", fail)

    return refuse


def recommended(folder, budget=None):
    """The first result of what the page recommends."""
    subject = run_subject(folder, budget)
    chosen = answer(subject, gather(subject, folder.plans))
    return next(
        result
        for result in folder.results
        if (folder.study.title_of(result.trial), result.trial.budgets) == (chosen.title, (chosen.budget,))
    )


def test_a_run_is_exported_as_its_page_recommends(run, folder, untrainable):
    result = recommended(folder)
    code, _, err = run("export", "run", "--trust", "--format", "packed", "-o", "net.safetensors")
    assert code == 0, err
    said = err.splitlines()
    words = folder.study.words(result.trial)
    assert said[0].startswith(f"{words}, scored {result.score:.4g}: not kept, so it is trained again; about 0:0")
    assert said[1] == f"its checkpoint is run/networks/{result.training}"
    assert said[2].startswith("wrote net.safetensors (")
    assert said[3] == "Next: bitplan verify net.safetensors --against run --trust"
    untrainable()
    task, network = bitplan.load_task("digits"), bitplan.load_model("tiny:network")[0]
    assert bitplan.evaluate(bitplan.load_packed("net.safetensors", network), task) == result.score
    code, _, err = run("export", "run", "--trust", "--format", "onnx", "-o", "net.onnx")
    assert code == 0, err
    assert err.splitlines()[0] == f"{words}, scored {result.score:.4g}"
    code, out, err = run("verify", "net.onnx", "--against", "run", "--trust")
    assert code == 0, err
    assert "codes        equal in 5 layers" in out
    assert f"top-1        {result.score:.2f} exported, {result.score:.2f} here" in out
    network = f"run/networks/{result.training}"
    words = ("verify", "net.safetensors", "--against", network, "--model", "tiny:network", "--task", "digits")
    assert run(*words)[0] == 0


def test_a_method_a_budget_and_a_seed_can_be_asked_for(run, folder):
    title, budget, seed = "from the last", "85.0%", 1
    chosen = ("--method", title, "--budget", budget, "--seed", seed)
    code, _, err = run("export", "run", "--trust", "--format", "onnx", "-o", "net.onnx", *chosen)
    assert code == 0, err
    assert err.startswith("from the last 85% seed 1, scored ")
    next_ = "verify net.onnx --against run --method 'from the last' --budget 85.0% --seed 1 --trust"
    assert f"Next: bitplan {next_}\n" in err
    code, out, err = run(*shlex.split(next_))
    assert (code, "the file does what the model does" in out) == (0, True), err
    result = next(one for one in folder.results if folder.study.words(one.trial) == "from the last 85% seed 1")
    assert Onnx().read(Path("net.onnx")).precisions == folder.plans[result.plan].precisions
    code, _, err = run("export", "run", "--trust", "--format", "packed", "-o", "w2", "--method", "w2a2")
    assert code == 0, err
    assert err.startswith("w2a2 seed 0, scored ")
    assert run("verify", "w2", "--against", "run", "--trust", "--method", "w2a2", "--limit", 9)[0] == 0
    assert run("verify", "w2", "--against", "run", "--trust", "--limit", 9)[0] == 1, "another network's"


@pytest.mark.parametrize("to", [to for to in ("compressed-tensors", "torchao") if to in EXPORTERS])
def test_a_recipe_of_a_run_trains_nothing(run, folder, untrainable, to):
    untrainable()
    result = recommended(folder, "85%")
    words = ("export", "run", "--format", to, "-o", "recipe.json", "--widen", "--budget", "85%")
    code, _, err = run(*words)
    assert code == 0, err
    assert err.startswith(f"the plan of {folder.study.words(result.trial).removesuffix(' seed 0')}\n")
    planned = folder.plans[result.plan].precisions
    for layer, found in EXPORTERS.get(to)().read(Path("recipe.json")).precisions.items():
        assert found.weight_bits >= planned[layer].weight_bits
    assert not (folder.path / "networks").exists()


def test_other_verbs_take_a_run_too(run, folder):
    result = recommended(folder)
    code, out, err = run("evaluate", "run", "--trust", "--task", "digits", "--threads", "1")
    assert code == 0, err
    assert out.startswith(f"top-1 {result.score:.2f} ")
    words = ("--model", "tiny:network", "--plan", "run", "--task", "digits", "-o", "mixed")
    code, _, err = run("quantize", f"run/networks/{result.training}", *words)
    assert code == 0, err
    mixed = bitplan.load_checkpoint("mixed", bitplan.load_model("tiny:network")[0])
    assert bitplan.plan_of(mixed).precisions == folder.plans[result.plan].precisions


def test_a_network_that_scores_otherwise_than_recorded_is_called_so(run, folder):
    result = recommended(folder)
    for one in folder.results:
        if one.training == result.training:
            folder.trials.keep(one.trial.id, one.model_copy(update={"score": 12.5}))
    words = ("--method", folder.study.title_of(result.trial), "--budget", *result.trial.budgets)
    for place in range(2):
        code, _, err = run("export", "run", "--trust", "--format", "packed", "-o", f"net{place}", *words)
        assert code == 0
        assert f"not the network that the run had: it scores {result.score:.6g}, recorded is 12.5" in err


def test_networks_that_the_sweep_kept_are_taken(run, folder, untrainable):
    study = folder.path.parent / "study.toml"
    import tiny

    study.write_text(tiny.STUDY.replace("seeds = [0, 1]", "seeds = [0]\nkeep_networks = true"))
    assert run("sweep", study, "--trust", "--run", "kept", "--only", "uniform")[0] == 0
    untrainable()
    code, _, err = run("export", "kept", "--trust", "--format", "packed", "-o", "net")
    assert code == 0, err
    assert err.startswith("uniform 85% seed 0, scored ")
    assert load(Path("kept/study.json"), bitplan.Study).keep_networks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--method", "eagel"), "unknown method of this run 'eagel'; did you mean eagl?"),
        (("--method", "hawq"), "unknown method of this run 'hawq'; there is eagl, from the last, uniform, w2a2, w4a4"),
        (("--budget", "60%"), "at the budget 60%: there is 85%, 70%"),
        (("--budget", "3bpw"), "of another kind than those of the study (85%, 70%)"),
        (("--budget", "much"), "budget 'much' cannot be read"),
        (("--seed", 7), "with seed 7: there is 0, 1"),
        (("--method", "w4a4", "--budget", "70%"), "w4a4 has no budget: leave out --budget 70%"),
        (("--format", "packed:opset=3"), "unknown option of packed 'opset'"),
        (("-o", "here"), "here exists: choose another name, or give --force"),
        (("-o", "run"), "run is also what is read (run), and would be replaced: write to another name"),
        (("-o", "run/trials"), "run/trials is among the files that the run "),
        (("-o", "folder"), "folder is a folder, and this format writes a file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_before_anything_is_trained(run, folder, untrainable, words, said):
    untrainable()
    Path("here").write_text("mine")
    Path("folder").mkdir()
    code, out, err = run("export", "run", "--trust", "--format", "packed", "-o", "x", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not Path("x").exists()


def test_a_run_without_results_and_options_without_a_run(run, folder):
    plan = save(folder.plans[folder.results[2].plan], "plan.json")
    start = folder.path / "starts" / folder.results[1].trial.id
    own = ("--model", "tiny:network")
    for words, said in (
        (("export", plan, "--format", "packed", "-o", "x", "--seed", 1), "--seed is for the folder of a run"),
        (("verify", "x", "--against", plan, "--task", "digits"), "plan.json is no network"),
        (("verify", "x", "--against", start, *own), "say whose test split to run both on: --task NAME"),
    ):
        code, _, err = run(*words)
        assert code == 2
        assert said in err
        assert err.count("\n") == 1
    shutil.rmtree(folder.path / "trials")
    code, _, err = run("export", "run", "--trust", "--format", "packed", "-o", "x")
    assert code == 2
    assert "run has no trained network yet: go on with `bitplan sweep`" in err
