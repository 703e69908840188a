"""Recipes from the command line: a plan of a checkpoint scan → what other tools read."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bitplan
from bitplan.core.precision import Precision
from bitplan.exporters.base import make_exporter
from bitplan.plugins.runtimes.llama_cpp import tensor_of
from bitplan.store.files import load, save

RECIPES = ["compressed-tensors", "torchao", "llama.cpp", "mlx"]
BLOCK = {
    "self_attn.q_proj": (256, 256),
    "self_attn.k_proj": (64, 256),
    "self_attn.v_proj": (64, 256),
    "self_attn.o_proj": (256, 256),
    "mlp.gate_proj": (512, 256),
    "mlp.up_proj": (512, 256),
    "mlp.down_proj": (256, 512),
}


@pytest.fixture
def planned(run):
    """The plan of a small llama's file at 3 bits per weight, made by the commands, and its graph."""
    torch.manual_seed(0)
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in BLOCK.items()}
    save_file({f"{name}.weight": torch.randn(shape) / 16 for name, shape in shapes.items()}, "llama.safetensors")
    rules = ("--rules", "narrow=0", "--rules", "first=free", "--rules", "last=free")
    assert run("steps", "trace", "llama.safetensors", *rules, "-o", "graph.json")[0] == 0
    words = ("plan", "llama.safetensors", *rules, "--bits", "w2a16,w4a16", "--budget", "3bpw", "-o", "plan.json")
    code, _, err = run(*words)
    assert code == 0, err
    plan = load("plan.json", bitplan.Plan)
    assert {str(precision) for precision in plan.precisions.values()} == {"w2a16", "w4a16"}
    return plan


@pytest.mark.parametrize("graph_first", [False, True])
@pytest.mark.parametrize("to", RECIPES)
def test_the_weight_only_plan_of_the_readme_can_be_exported(run, to, graph_first):
    """Beside choices that leave inputs alone, rules leave them alone as well, also those of a graph made before."""
    shapes = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in BLOCK.items()}
    shapes |= {"model.embed_tokens": (320, 256), "lm_head": (320, 256)}
    save_file({f"{name}.weight": torch.randn(shape) / 16 for name, shape in shapes.items()}, "model.safetensors")
    words = ("--budget", "3.2bpw", "--bits", "w2a16,w3a16,w4a16", "-o", "plan.json")
    given = ("model.safetensors",)
    if graph_first:
        assert run("steps", "trace", "model.safetensors", "-o", "graph.json")[0] == 0
        given = ("graph.json", "--gain", "uniform")
    code, _, err = run("plan", *given, *words)
    assert code == 0, err
    precisions = load("plan.json", bitplan.Plan).precisions
    assert str(precisions["model.embed_tokens"]) == str(precisions["lm_head"]) == "w8a16"
    options = ("--widen",) if to == "torchao" else ()  # it has no 3 bits for activations of 16
    assert run("export", "plan.json", "--format", to, *options, "-o", "recipe")[0] == 0


def test_every_verb_that_has_choices_makes_rules_for_them(run):
    save_file({f"{name}.weight": torch.randn(8, 8) for name in ("stem", "middle", "head")}, "net.safetensors")
    rules = ("--rules", "narrow=0", "--rules", "fix=stem=w8a16")
    assert run("steps", "trace", "net.safetensors", *rules, "-o", "usual.json")[0] == 0
    assert (
        run("steps", "trace", "net.safetensors", "--rules", "narrow=128", "--bits", "w2a16,w4a16", "-o", "alone.json")[
            0
        ]
        == 0
    )
    assert {str(layer.fixed) for layer in load("alone.json", bitplan.Graph).layers} == {"w4a16"}
    assert run("quantize", "digits_resnet", "--bits", "w4a16", "-o", "q")[0] == 0
    precisions = bitplan.plan_of(bitplan.load_checkpoint("q")).precisions.values()
    assert {precision.act_bits for precision in precisions} == {16}


def changed(plan, layer, precision):
    """The plan with one layer at another precision, as a file."""
    precisions = dict(plan.precisions) | {layer: Precision.parse(precision)}
    return save(plan.model_copy(update={"precisions": precisions}), "changed.json")


def named(to, precisions):
    return {tensor_of(name) if to == "llama.cpp" else name: one for name, one in precisions.items()}


@pytest.mark.parametrize("to", RECIPES)
@pytest.mark.parametrize("shapes", [(), ("--graph", "graph.json")], ids=["alone", "with its graph"])
def test_a_plan_becomes_each_recipe(run, planned, to, shapes):
    code, out, err = run("export", "plan.json", "--format", to, "-o", "recipe", *shapes)
    assert (code, out) == (0, "")
    assert err.endswith(f"wrote recipe ({Path('recipe').stat().st_size:,} bytes)\n")
    assert make_exporter(to, {}).read(Path("recipe")).precisions == named(to, planned.precisions)


@pytest.mark.parametrize("to", RECIPES)
def test_what_a_target_cannot_express_is_refused_by_name_or_widened(run, planned, to, caplog):
    layer = "model.layers.1.mlp.down_proj"
    plan = changed(planned, layer, "w2a4")
    code, _, err = run("export", plan, "--format", to, "-o", "recipe")
    assert code == 2
    assert f"{to} cannot express {layer} at w2a4 (4-bit activations): plan other precisions" in err
    assert "--widen" in err
    assert err.count("\n") == 1
    assert not Path("recipe").exists()
    caplog.clear()
    assert run("export", plan, "--format", to, "-o", "recipe", "--widen", "--graph", "graph.json")[0] == 0
    wide = "w2a8" if to in ("compressed-tensors", "torchao") else "w2a16"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"widened for {to}: w2a4 → {wide} (4-bit activations): {layer}"]
    expected = dict(planned.precisions) | {layer: Precision.parse(wide)}
    assert make_exporter(to, {}).read(Path("recipe")).precisions == named(to, expected)


def test_widening_is_said_on_the_terminal(run, planned):
    plan = changed(planned, "model.layers.0.self_attn.o_proj", "w9a16")
    words = ("export", plan, "--format", "torchao", "-o", "recipe", "--widen", "--graph", "graph.json")
    done = subprocess.run([sys.executable, "-m", "bitplan", *words], capture_output=True, text=True, check=True)
    assert "WARNING: widened for torchao: w9a16 → w16a16 (9-bit weights" in done.stderr
    assert "model.layers.0.self_attn.o_proj" in done.stderr


def test_an_existing_recipe_is_kept_unless_forced(run, planned):
    Path("recipe").write_text("mine")
    code, _, err = run("export", "plan.json", "--format", "mlx", "-o", "recipe")
    assert (code, Path("recipe").read_text()) == (2, "mine")
    assert "recipe exists: choose another name, or give --force" in err
    assert run("export", "plan.json", "--format", "mlx", "-o", "recipe", "--force")[0] == 0
    assert Path("recipe").read_text().startswith("{")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("plan.json", "--format", "torchoa", "-o", "x"), "unknown exporter 'torchoa'; did you mean torchao?"),
        (("plan.json", "--format", "compressed_tensors", "-o", "x"), "did you mean compressed-tensors?"),
        (("plan.json", "--format", "llamacpp", "-o", "x"), "did you mean llama.cpp?"),
        (("plan.json", "--format", "mlx", "-o", "here/below"), "cannot write here/below: "),
        (("plan.json", "--format", "mlx", "-o", "/proc/x"), "cannot write /proc/x: "),
        (("plan.json", "--format", "mlx:group_size=7", "-o", "x"), "group_size must be 32, 64 or 128"),
        (("plan.json", "--format", "mlx:size=7", "-o", "x"), "unknown option of mlx 'size'"),
        (("plan.json", "--format", "mlx", "-o", "x", "--graph", "plan.json"), "a plan, where a graph is needed"),
        (("gone.json", "--format", "mlx", "-o", "x"), "gone.json"),
        (("here", "--format", "mlx", "-o", "x"), "here is neither a plan (.json), nor a checkpoint"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(run, planned, words, said):
    Path("here").write_text("mine")
    code, out, err = run("export", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not Path("x").exists()
    assert Path("here").read_text() == "mine"
