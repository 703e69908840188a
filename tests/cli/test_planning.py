import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import bitplan
from bitplan.cli.show import show_rows
from bitplan.core.records import Graph, Plan
from bitplan.store.files import save


def test_the_flow_as_separate_verbs_equals_plan_in_one_go(run, own_model):
    target = f"{own_model}:with_example"
    assert run("steps", "trace", target, "-o", "graph.json")[0] == 0
    assert run("steps", "estimate", "random", "graph.json", "--seed", 3, "-o", "gains.json")[0] == 0
    assert run("steps", "price", "bmac", "graph.json", "-o", "bmac.json")[0] == 0
    assert run("steps", "price", "memory", "graph.json", "-o", "memory.json")[0] == 0
    limits = ("--budget", "80%", "--budget", "memory=80%")
    code, _, err = run(
        "steps", "select", "memory.json", "bmac.json", "gains.json", "graph.json", *limits[:2], "-o", "a.json"
    )
    assert code == 0, err
    code, out, err = run("steps", "select", "graph.json", "gains.json", "bmac.json", "memory.json", *limits, "--json")
    assert code == 0, err
    one_go = run("plan", target, "--gain", "random", "--seed", 3, *limits, "--json")
    assert one_go[0] == 0, one_go[2]
    assert Plan.from_json(out).precisions == Plan.from_json(one_go[1]).precisions
    assert run("show", "validate", "graph.json", "gains.json", "bmac.json", "a.json")[0] == 0


def test_price_and_estimate_take_what_plan_takes(run, own_model):
    model = f"{own_model}:with_example"
    assert run("steps", "trace", model, "-o", "graph.json")[0] == 0
    assert run("quantize", model, "--bits", "w4a4", "-o", "folder")[0] == 0
    for written, given in ((model, ()), ("folder", ("--trust",))):
        traced, direct = run("steps", "price", "bmac", "graph.json"), run("steps", "price", "bmac", written, *given)
        assert traced[:2] == direct[:2]
    by_graph = run("steps", "estimate", "eagl:steps=mse", "graph.json", "--model", model)
    direct = run("steps", "estimate", "eagl:steps=mse", model)
    assert direct[0] == 0, direct[2]
    assert by_graph[:2] == direct[:2]
    code, _, err = run("steps", "estimate", "eagl", model, "--model", model)
    assert (code, err.count("\n")) == (2, 1)
    assert "--model is the network of a graph file" in err


def test_plan_prints_the_answer_first(run, own_model):
    code, out, _ = run("plan", f"{own_model}:with_example", "--gain", "uniform", "--budget", "80%")
    assert code == 0
    first, second, third, fourth = out.splitlines()[:4]
    assert first.startswith("users_model:with_example: 4 layers in 4 groups (0 links), 2 to choose")
    assert "80% of bmac" in second
    assert "proven best" in third
    assert "smaller than 32-bit" in fourth
    assert "\x1b" not in out  # no colour where there is no terminal


def test_explain_says_gain_cost_and_reason_of_every_layer(run):
    code, out, _ = run("plan", "resnet50", "--gain", "uniform", "--budget", "70%", "--explain")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("layer2.0.downsample.0"))
    assert "layer2.0.conv1" in line
    assert "linked to layer2.0.conv1 through output of layer1.2.relu (relu_)" in line
    assert "64 input features, fewer than 128" in out
    assert "0 of 2" in next(line for line in out.splitlines() if line.startswith("layer2.0.conv1"))


def test_explain_says_how_sure_each_choice_is(run, graph):
    names = [group.name for group in graph.selectable]
    gains = bitplan.Gains(
        method="m", choices=("w2a2", "w4a4"), graph=graph.id, rows=dict.fromkeys(names, (0.0, 5.0)),
        errors=dict.fromkeys(names, (0.0, 1.0)),
    )  # fmt: skip
    files = []
    for record in (graph, gains, bitplan.price("memory", graph)):
        files.append(f"{record.kind()}.json")
        save(record, files[-1])
    code, out, err = run("steps", "select", *files, "--budget", "80%", "--explain")
    assert code == 0, err
    assert "groups are a stable core" in out.splitlines()[-1]
    assert "sure" in next(line for line in out.splitlines() if line.startswith("layer"))
    assert "%" in next(line for line in out.splitlines() if line.startswith("b "))
    code, out, _ = run("plan", "resnet50", "--gain", "uniform", "--budget", "70%", "--explain")
    assert "The gains by uniform carry no standard errors" in out.splitlines()[-1]
    assert "sure" not in next(line for line in out.splitlines() if line.startswith("layer"))


def test_gains_are_shown_with_their_errors(graph, capsys):
    names = [group.name for group in graph.selectable]
    rows = dict.fromkeys(names, (0.0, 5.0))
    gains = bitplan.Gains(method="m", choices=("w2a2", "w4a4"), graph=graph.id, rows=rows, errors={"b": (0.0, 0.25)})
    show_rows(gains)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[-3:]] == [["a", "0", "5"], ["b", "0", "5", "±", "0.25"], ["c", "0", "5"]]


def test_frontier_shows_the_budgets_and_all_points_as_json(run):
    code, out, _ = run("show", "frontier", "resnet50", "--gain", "uniform", "--budgets", "70%,60%")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if "×" in line] == ["70%", "60%"]
    code, out, _ = run("show", "frontier", "resnet50", "--gain", "uniform", "--budgets", "70%", "--json")
    content = json.loads(out)
    assert len(content["points"]) > 20
    assert content["plans"][0]["limits"][0]["budget"] == "70%"


def test_trace_shows_what_was_not_reached(run):
    code, out, _ = run("steps", "trace", "googlenet")
    assert code == 0
    assert "Not reached by the example input, so not planned: aux1.conv.conv" in out


def test_trace_takes_rules_and_shapes(run, own_model):
    code, out, err = run(
        "steps",
        "trace",
        f"{own_model}:body",
        "--input",
        "7x200",
        "--rules",
        "fix=2=w2a2",
        "--rules",
        "first=free",
        "--json",
    )
    assert code == 0, err
    layers = {layer.name: layer for layer in Graph.from_json(out).layers}
    assert str(layers["2"].fixed) == "w2a2"
    assert layers["0"].fixed is None
    assert layers["0"].macs == 7 * 200 * 300


def test_bits_per_weight(run, own_model):
    code, out, err = run("plan", f"{own_model}:with_example", "--gain", "uniform", "--budget", "3.2bpw", "--json")
    assert code == 0, err
    assert Plan.from_json(out).limits[0].cost_name == "weight bits"


def test_weight_only_choices(run, own_model):
    words = ("--bits", "w2a16,w4a16,w8a16", "--budget", "4bpw", "--gain", "uniform", "--json")
    code, out, err = run("plan", f"{own_model}:with_example", *words)
    assert code == 0, err
    assert {precision.act_bits for precision in Plan.from_json(out).precisions.values()} == {16}


def a_checkpoint(path):
    """A small decoder in bf16 under the usual names, wide enough for the rules."""
    torch.manual_seed(0)
    sizes = {f"model.layers.{n}.self_attn.{part}_proj": (128, 128) for n in range(3) for part in "qkvo"}
    sizes |= {f"model.layers.{n}.mlp.{part}_proj": (256, 128) for n in range(3) for part in ("gate", "up")}
    sizes |= {"model.embed_tokens": (50, 128), "lm_head": (50, 128)}
    tensors = {f"{name}.weight": torch.randn(size) * (1 + len(name) % 3) for name, size in sizes.items()}
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path)
    return path


def test_a_checkpoint_file_is_planned_without_its_code(run, tmp_path):
    path = a_checkpoint(tmp_path / "model.safetensors")
    words = ("plan", path, "--budget", "3.2bpw", "--bits", "w2a16,w3a16,w4a16", "--json")
    code, out, err = run(*words)
    assert code == 0, err
    plan = Plan.from_json(out)
    assert plan.method == "equal_bits"
    assert len(plan.links) == 6
    code, out, _ = run("steps", "trace", path, "--rules", "link=none", "--json")
    assert (code, Graph.from_json(out).links) == (0, ())
    code, out, _ = run("steps", "trace", path, "--rules", r"link=\b[qk]_proj$", "--json")
    assert {len(link.layers) for link in Graph.from_json(out).links} == {2}
    assert run("steps", "trace", path, "-o", "graph.json")[0] == 0
    code, out, err = run("steps", "estimate", "eagl:steps=absmax", "graph.json", "--model", path, "--json")
    assert code == 0, err
    assert bitplan.Gains.from_json(out).options["steps"] == "absmax"


def test_a_checkpoint_of_a_zoo_model_is_planned_with_its_real_graph_and_learned_steps(run, tmp_path):
    model, example = bitplan.load_model("resnet20")
    graph = bitplan.trace(model, example, name="resnet20", rules=bitplan.Rules(narrow=0))
    start = bitplan.quantize(model, Plan.uniform(graph, "w4a4"))
    bitplan.calibrate_(start, [torch.rand(4, 3, 32, 32)])
    bitplan.save_checkpoint(start, tmp_path / "start", spec="resnet20")
    code, out, err = run("plan", "start", "--budget", "70%", "--rules", "narrow=0", "--json")
    assert code == 0, err
    gains = bitplan.estimate("auto", start, graph)
    assert Plan.from_json(out) == bitplan.select(graph, gains, bitplan.price("bmac", graph), budget="70%")


def test_diff(run, graph):
    save(Plan.uniform(graph, "w4a4"), "a.json")
    save(Plan.uniform(graph, "w2a2"), "b.json")
    code, out, _ = run("show", "diff", "a.json", "b.json")
    assert code == 0
    assert "4 of 6 layers differ" in out
    assert "fewer bits" in out
    assert json.loads(run("show", "diff", "a.json", "b.json", "--json")[1])["a"] == ["w4a4", "w2a2"]
    assert "the same precisions for all 6 layers" in run("show", "diff", "a.json", "a.json")[1]


def test_list(run):
    assert "uniform" in run("list", "gains")[1]
    names = json.loads(run("list", "models", "--json")[1])
    assert {"resnet50", "resnet20", "bert-base", "timm/vit_tiny_patch16_224"} <= set(names)
    assert set(json.loads(run("list", "costs", "--json")[1])) == {"bmac", "bops", "energy", "memory"}


def test_tables_of_gains_and_costs(run, graph, tmp_path):
    save(graph, "graph.json")
    (tmp_path / "gains.csv").write_text("layer,gain\na,5\nb,1\nc,1\n")
    (tmp_path / "latency.csv").write_text("layer,w2a2,w4a4\na,1,2\nside,1,2\nb,1,2\nc,1,2\n")
    words = ("--gain", "gains.csv", "--cost", "latency.csv", "--budget", "latency=75%", "--json")
    code, out, err = run("plan", "graph.json", *words)
    assert code == 0, err
    plan = Plan.from_json(out)
    assert str(plan.precisions["a"]) == "w4a4"
    assert plan.limits[0].cost_name == "latency"


def test_the_frontier_of_resnet50_has_the_papers_eight_budgets(run):
    code, out, _ = run("show", "frontier", "resnet50", "--gain", "uniform")
    assert code == 0
    assert "54 layers in 50 groups (4 links), 41 to choose" in out
    shown = [line.split()[0] for line in out.splitlines() if "×" in line]
    assert shown == [f"{percent}%" for percent in range(95, 59, -5)]


def test_every_kind_of_record_is_known_from_a_cold_start(tmp_path):
    trial = bitplan.Trial(task="t", model="m", start="s", method="eagl", choices=(2, 4), recipe=None, seed=0)
    made = [trial, bitplan.Result(trial=trial, plan="p", score=1.0, higher_is_better=True), bitplan.Recipe(steps=1)]
    paths = [str(save(record, tmp_path / f"{record.kind()}.json")) for record in made]
    words = [sys.executable, "-m", "bitplan", "show", "validate", *paths]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.count(", valid\n") == 3


def test_version_and_module_entry():
    done = subprocess.run([sys.executable, "-m", "bitplan", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"bitplan {bitplan.__version__}\n"


@pytest.mark.parametrize("name", ["bert-base", "timm/vit_tiny_patch16_224", "resnet18"])
def test_every_part_of_the_zoo_works_from_a_cold_start(name):
    done = subprocess.run(
        [sys.executable, "-m", "bitplan", "steps", "trace", name], capture_output=True, text=True, check=True
    )
    assert f"{name}: " in done.stdout


def test_a_reader_that_stops_early_is_no_error(run, tmp_path):
    done = subprocess.run(
        f"{sys.executable} -m bitplan list models | head -n 1", shell=True, capture_output=True, text=True, check=True
    )
    assert (len(done.stdout.splitlines()), done.stderr) == (1, "")
