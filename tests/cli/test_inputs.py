"""What users type: what it is, what it has, that nothing is loaded twice, and what is said of what it has not."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bitplan
from bitplan.cli import inputs
from bitplan.cli.inputs import (
    BuiltModel,
    CheckpointFolder,
    InputOptions,
    RecordFile,
    RunChoice,
    RunNetwork,
    WeightsFile,
    read_input,
)
from bitplan.core.errors import InputError
from bitplan.core.studies import Method, Start, Study
from bitplan.models import zoo
from bitplan.quant import checkpoint
from bitplan.store.files import save
from bitplan.tasks import base

RULES = bitplan.Rules(narrow=0)


@pytest.fixture
def here(graph, tmp_path, monkeypatch):
    """One thing of each kind."""
    monkeypatch.chdir(tmp_path)
    save(graph, "graph.json")
    Path("words.json").write_text("no record at all")
    torch.save({"a.weight": torch.ones(2, 2)}, "pickle.json")
    torch.save({"a.weight": torch.ones(2, 2)}, "old_pickle.json", _use_new_zipfile_serialization=False)
    save_file({"a.weight": torch.ones(2, 2)}, "safe.json")
    save(bitplan.Plan.uniform(graph, 4), "plan.json")
    model = bitplan.load_model("digits_resnet")[0]
    bitplan.save_checkpoint(model, "named", spec="digits_resnet")
    bitplan.save_checkpoint(model, "unnamed")
    tensors = {f"layers.{number}.q_proj.weight": torch.randn(200, 200) for number in range(3)}
    save_file(tensors, "net.safetensors")
    torch.save(tensors, "weights.ckpt")
    recipe = bitplan.Recipe(steps=1)
    bitplan.store.run_folder.RunFolder(tmp_path / "run").keep(
        Study(name="s", task="digits", model="digits_resnet", choices=("w2a2", "w4a4"), budgets=("70%",), seeds=(0,),
              methods=(Method(name="uniform"),), start=Start(float_recipe=recipe), recipe=recipe)
    )  # fmt: skip
    return tmp_path


@pytest.fixture
def loads(monkeypatch):
    """What is built, read and opened, one entry each time."""
    seen = []
    for place, name in ((zoo, "load_model"), (checkpoint, "load_checkpoint"), (base, "load_task")):
        original = getattr(place, name)

        def counted(*given, original=original, name=name, **options):
            seen.append(name)
            return original(*given, **options)

        monkeypatch.setattr(place, name, counted)
    return seen


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        ("resnet50", BuiltModel),
        ("timm/vit_tiny_patch16_224", BuiltModel),
        ("package.module:factory", BuiltModel),
        ("gone", BuiltModel),
        ("named", CheckpointFolder),
        ("unnamed", CheckpointFolder),
        ("net.safetensors", WeightsFile),
        ("gone.safetensors", WeightsFile),
        ("gone.index.json", WeightsFile),
        ("weights.ckpt", WeightsFile),
        (".", WeightsFile),
        ("graph.json", RecordFile),
        ("gone.json", RecordFile),
        ("words.json", RecordFile),
        ("pickle.json", WeightsFile),
        ("old_pickle.json", WeightsFile),
        ("safe.json", WeightsFile),
        ("run", RunNetwork),
    ],
)
def test_what_a_thing_is_shows_without_loading_it(here, loads, written, kind):
    assert type(read_input(written)) is kind
    assert loads == []


def test_a_model_is_built_once_with_weights_and_not_at_all_twice(here, loads):
    thing = read_input("digits_resnet")
    assert thing.graph(RULES) == thing.graph(RULES)
    assert thing.example is not None
    assert loads == ["load_model"]
    whole = read_input("digits_resnet", InputOptions(seed=3))
    model = whole.model
    assert whole.graph(RULES).id == thing.graph(RULES).id
    assert whole.model is model
    assert loads == ["load_model"] * 2
    again = read_input("digits_resnet", InputOptions(seed=3)).model
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_a_checkpoint_that_names_its_model_is_read_once(here, loads):
    thing = read_input("named")
    assert thing.graph(RULES).model == "digits_resnet"
    assert thing.weights is thing.model
    assert (thing.spec, thing.has_random_weights) == ("digits_resnet", False)
    assert loads == ["load_model", "load_checkpoint"]


def test_a_checkpoint_that_names_none_is_a_file_of_weights_or_what_the_user_says(here):
    by_names = read_input("unnamed")
    assert by_names.graph(RULES).links == ()
    assert by_names.weights.tensors
    with pytest.raises(InputError, match="say which it is with --model"):
        _ = by_names.model
    said = read_input("unnamed", InputOptions(model="digits_resnet"))
    assert said.graph(RULES).id == read_input("named").graph(RULES).id


def test_a_file_never_names_code(here, tmp_path):
    """Who sends a checkpoint must not decide which module is imported."""
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a stranger was run')\n")
    about = json.loads((here / "named" / "checkpoint.json").read_text()) | {"spec": "evil:network"}
    for line in ("id", "checksum"):
        about.pop(line, None)
    (here / "named" / "checkpoint.json").write_text(json.dumps(about))
    thing = read_input("named")
    for ask in (lambda: thing.model, lambda: thing.graph(RULES), lambda: thing.example, lambda: thing.weights):
        with pytest.raises(InputError, match=r"named/checkpoint.json names code to import \(evil:network\)"):
            ask()
    assert read_input("named", InputOptions(model="digits_resnet")).model is not None


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: read_input("graph.json").model, "graph.json is no network: give the model, a checkpoint"),
        (lambda: read_input("graph.json").plan, "this is a graph, where a plan is needed"),
        (lambda: read_input("plan.json").graph(RULES), "this is a plan, where a graph is needed"),
        (lambda: read_input("net.safetensors").model, "not a checkpoint that bitplan wrote: name the model and give"),
        (lambda: read_input("net.safetensors").plan, "net.safetensors is a file of weights, which has no plan"),
        (lambda: read_input("named").plan, "named holds a float network, which has no plan"),
        (lambda: read_input("resnet50").plan, "resnet50 is a model, which has no plan"),
        (lambda: read_input("resnet50").quantized_model, "resnet50 is neither a plan"),
        (lambda: read_input("run").graph(RULES), "run is the folder of a run: its graph is in run/graph.json"),
        (lambda: read_input("run").model, "run has no trained network yet"),
        (lambda: read_input("named", InputOptions(weights="x")).model, "has its own weights: leave --weights out"),
        (lambda: read_input("resnet50", InputOptions(model="x")), "--model names the network of a checkpoint folder"),
        (lambda: read_input("named", choice=RunChoice(method="eagl")), "--method is for the folder of a run"),
        (lambda: read_input("named").graph(RULES, ["q_proj"]), "--rules link=… is for checkpoints"),
        (lambda: read_input("graph.json").graph(RULES, ["q_proj"]), "--rules link=… is for checkpoints"),
        (lambda: inputs.load_teacher("resnet50", None), "teach nothing: add teacher_weights=FILE"),
        (lambda: inputs.load_teacher("graph.json", None), "graph.json is no network"),
    ],
)  # fmt: skip
def test_what_a_thing_has_not_is_said_with_what_it_is(here, ask, said):
    with pytest.raises(InputError) as caught:
        ask()
    assert said in str(caught.value)


def test_links_of_a_file_can_be_asked_for(here):
    thing = read_input("net.safetensors")
    assert thing.graph(RULES, ["none"]).links == ()
    assert [len(link.layers) for link in thing.graph(RULES, [r"\d+(?=\.q_proj)"]).links] == [3]


def test_task_and_teacher_are_loaded_once(run, here, loads):
    """Also by a method that says beforehand what it will take."""
    words = ("--rules", "narrow=0", "--task", "digits", "--samples", "32", "-o", "start")
    assert run("quantize", "named", "--bits", "w4a4", *words)[0] == 0
    fixed = ("--rules", "fix=blocks.[0-3].*=w4a4")  # three groups are left, which are trained one at a time
    assert run("steps", "trace", "start", "--rules", "narrow=0", *fixed, "-o", "start.json")[0] == 0
    loads.clear()
    recipe = (
        "--recipe",
        "steps=2",
        "--recipe",
        "batch_size=16",
        "--recipe",
        "distill=0.5",
        "--recipe",
        "teacher=named",
    )
    words = ("--model", "start", "--task", "digits", *recipe)
    code, _, err = run("steps", "estimate", "alps:steps=1", "start.json", *words)
    assert code == 0, err
    assert "3 trainings (0 of them done)" in err
    assert loads.count("load_task") == 1
    assert loads.count("load_checkpoint") == 2  # the network and its teacher
