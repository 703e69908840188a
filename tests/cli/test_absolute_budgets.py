"""`--budget 12ms`: a measured table whose unit is time, from the command line to the page."""

import json
import re
from pathlib import Path

import pytest

import bitplan
from bitplan.core.records import Plan
from bitplan.store.files import save
from bitplan.store.run_folder import RunFolder

ROWS = {  # of the fixture `graph`, in nanoseconds
    "stem": {"w8a8": 2_500_000},
    "a": {"w2a2": 1_000_000, "w4a4": 3_000_000},
    "b": {"w2a2": 2_000_000, "w4a4": 5_000_000},
    "side": {"w2a2": 400_000, "w4a4": 600_000},
    "c": {"w2a2": 1_000_000, "w4a4": 2_000_000},
    "head": {"w8a8": 500_000},
}
WHOLE = ("plan", "graph.json", "--gain", "gains.csv")


@pytest.fixture(autouse=True)
def files(graph, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(graph, "graph.json")
    (tmp_path / "gains.csv").write_text("layer,gain\na,5\nb,4\nc,1\n")
    names = ("w2a2", "w4a4", "w8a8")
    lines = [",".join([layer, *(str(row.get(name, "")) for name in names)]) for layer, row in ROWS.items()]
    heads = ["# measured on one core, mean of 100 runs", "# unit: ns", "layer,w2a2,w4a4,w8a8"]
    (tmp_path / "latency.csv").write_text("\n".join([*heads, *lines]))
    (tmp_path / "latency.json").write_text(json.dumps({"# unit": "ns", **ROWS}))
    (tmp_path / "partial.csv").write_text("\n".join([heads[1], heads[2], *lines[1:-1]]))
    (tmp_path / "unsaid.csv").write_text("\n".join([heads[2], *lines]))


def planned(run, *words):
    code, out, err = run(*WHOLE, *words, "--json")
    assert code == 0, err
    return Plan.from_json(out)


@pytest.mark.parametrize("table", ["latency.csv", "latency.json"])
def test_a_time_is_of_the_whole_network(run, table):
    plan = planned(run, "--cost", table, "--budget", "12ms")
    (limit,) = plan.limits
    assert (limit.budget, limit.cost_name, limit.capacity, limit.fixed) == ("12ms", "latency", 9_000_000, 3_000_000)
    same = planned(run, "--cost", table, "--budget", "9000000")  # bare numbers are of the choosable layers
    assert plan.precisions == same.precisions
    for written in ("12000us", "12000µs", "0.012s", "latency=12ms", "latency=12000000ns"):
        assert planned(run, "--cost", table, "--budget", written).precisions == plan.precisions


def test_the_answer_says_that_fixed_layers_are_included(run):
    code, out, _ = run(*WHOLE, "--cost", "latency.csv", "--budget", "12ms", "--explain")
    assert code == 0
    assert out.splitlines()[1].startswith(
        "12ms of latency, whole network: 10.6ms used, 3ms of it by fixed layers, 1.4ms left; one more percent would"
    )
    assert "2,500,000" in next(line for line in out.splitlines() if line.startswith("stem"))


def test_several_budgets_of_different_kinds_hold_at_once(run):
    words = ("--cost", "latency.csv", "--budget", "12ms", "--budget", "memory=0.12kB", "--budget", "latency=95%")
    plan = planned(run, *words)
    assert [limit.cost_name for limit in plan.limits] == ["latency", "memory", "latency"]
    assert [limit.fixed is None for limit in plan.limits] == [False, False, True]
    assert plan.limits[1].cost + plan.limits[1].fixed <= 960
    code, out, _ = run(*WHOLE, *words)
    assert code == 0
    assert "0.12kB of memory, whole network: " in out


def test_bytes_bring_the_memory_cost_with_them(run):
    plan = planned(run, "--budget", "120bytes")
    (limit,) = plan.limits
    assert (limit.budget, limit.cost_name) == ("120bytes", "memory")
    assert limit.capacity + limit.fixed == 960
    assert planned(run, "--budget", "memory=120B").precisions == plan.precisions
    weights_only = planned(run, "--budget", "120bytes", "--bits", "w2a16,w4a16")  # of which bmac would want no part
    assert weights_only.limits[0].cost_name == "memory"


def test_the_frontier_is_shown_for_times(run):
    words = (
        "show",
        "frontier",
        "graph.json",
        "--gain",
        "gains.csv",
        "--cost",
        "latency.csv",
        "--budgets",
        "13.6ms,12ms,8ms",
    )
    code, out, err = run(*words)
    assert code == 0, err
    rows = {line.split()[0]: line.split()[1] for line in out.splitlines() if "×" in line}
    assert rows == {"13.6ms": "13.6ms", "12ms": "10.6ms", "8ms": "7.4ms"}
    assert "those of the whole network" in out.splitlines()[-1]


def test_the_verbs_one_by_one_carry_the_unit(run, graph):
    assert run("steps", "price", "latency.csv", "graph.json", "-o", "costs.json")[0] == 0
    assert run("steps", "estimate", "gains.csv", "graph.json", "-o", "gains.json")[0] == 0
    costs = bitplan.load("costs.json", bitplan.Costs)
    assert (costs.unit, costs.fixed, costs.lacking) == ("ns", {"stem": 2_500_000, "head": 500_000}, ())
    limits = ("--budget", "12ms", "--budget", "memory=0.12kB")
    code, out, err = run("steps", "select", "graph.json", "costs.json", "gains.json", *limits, "--json")
    assert code == 0, err
    assert [limit.fixed for limit in Plan.from_json(out).limits] == [3_000_000, 288]


def test_the_page_of_a_plan_is_in_milliseconds(run, graph, tmp_path):
    code, _, err = run(*WHOLE, "--cost", "latency.csv", "--budget", "12ms", "-o", "plan.html", "-o", "plan.json")
    assert code == 0, err
    block = re.search(r'id="data">(.*?)</script>', (tmp_path / "plan.html").read_text(), re.DOTALL)[1]
    data = json.loads(block)
    assert data["answer"]["under"] == "12ms of latency, whole network"
    assert data["answer"]["used"] == "10.6ms"
    assert (data["track"]["axis"], data["track"]["fixed"]) == ("budget, ms of latency, whole network", "3ms")
    costs = bitplan.price("latency.csv", graph)
    gains = bitplan.estimate("gains.csv", None, graph)
    for index, (label, place, capacity) in enumerate(data["track"]["stops"]):
        assert label.endswith("ms")
        assert place == pytest.approx((capacity + 3_000_000) / 1e6)
        plan = bitplan.select(graph, gains, costs, budget=label)
        ride = data["rides"][0]
        assert ride["cost"][ride["at"][index]] == plan.limits[0].cost


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--cost", "latency.csv", "--budget", "7ms"),
         "latency of the whole network is 7.4ms, 3ms of it for the 2 fixed layers. Raise the budget to at least 7.4ms"),
        (("--cost", "latency.csv", "--budget", "2ms"), "cannot be met"),
        (("--cost", "partial.csv", "--budget", "12ms"),
         "partial has no number for 2 of its fixed layers (stem at w8a8, head at w8a8): measure them and add them to "
         "the table, or ask for a share of the choosable layers, such as 70%"),
        (("--cost", "unsaid.csv", "--budget", "12ms"), "no cost counts that (unsaid counts what it does not say)"),
        (("--cost", "unsaid.csv", "--budget", "unsaid=12ms"), "such as `# unit: ns`"),
        (("--budget", "12ms"), "no cost counts that (bmac counts bit-MACs): price one that does, such as a measured"),
        (("--budget", "bmac=12ms"), "bmac counts bit-MACs: ask for a share of it, such as bmac=70%"),
        (("--cost", "latency.csv", "--budget", "latency=2MB"), "latency counts ns: ask for an amount in ns, us, ms, s"),
        (("--cost", "latency.csv", "--budget", "3mJ"), "amount of energy, and no cost counts that (latency counts ns)"),
        (("--cost", "latency.csv", "--budget", "12msec"), "'msec' is none of the units %, bpw, ns, us, ms"),
        (("--cost", "twice.csv", "--budget", "12ms"), "twice.csv must say its unit once"),
        (("--cost", "number.json", "--budget", "12ms"), "number.json must say its unit once"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(run, tmp_path, words, said):
    table = (tmp_path / "latency.csv").read_text()
    (tmp_path / "twice.csv").write_text(f"# unit: us\n{table}")
    (tmp_path / "number.json").write_text(json.dumps({"# unit": 3, **ROWS}))
    code, out, err = run(*WHOLE, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_partial_table_still_carries_shares_and_says_what_it_lacks(run):
    plan = planned(run, "--cost", "partial.csv", "--budget", "80%")
    assert plan.limits[0].fixed is None
    _, out, _ = run(*WHOLE, "--cost", "partial.csv", "--budget", "80%", "--explain")
    assert "not measured" in next(line for line in out.splitlines() if line.startswith("stem"))


def test_a_study_with_times_from_the_sweep_to_the_page(run, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "study"))
    import tiny

    rows = [f"{layer},{low},{high},{end}" for layer, low, high, end in (
        (1, "", "", 900), (4, 100, 300, ""), (7, 200, 300, ""), (10, 100, 200, ""), (13, "", "", 100),
    )]  # fmt: skip
    (tmp_path / "time.csv").write_text("\n".join(["# unit: us", "layer,w2a2,w4a4,w8a8", *rows]))
    budgets = 'budgets = ["1.7ms", "1500us"]\ncost = "time.csv"'
    (tmp_path / "study.toml").write_text(tiny.STUDY.replace('budgets = ["85%", "70%"]', budgets))
    code, out, err = run("sweep", "study.toml", "--run", "run", "--trust")
    assert code == 0, err
    assert "1.7ms" in out
    found = RunFolder(Path("run"))
    assert {limit.fixed for plan in found.plans.values() for limit in plan.limits} == {1000}
    assert all(limit.cost + limit.fixed <= 1700 for plan in found.plans.values() for limit in plan.limits)
    for words in (("compare", "run"), ("run", "tables", "run", "--which", "layers", "--budgets", "1.6ms"),
                  ("report", "run", "-o", "page.html", "--budget", "1.6ms"),
                  ("export", "run", "--format", "mlx", "-o", "recipe.json", "--widen", "--budget",
                   "1.7ms")):  # fmt: skip
        code, _, err = run(*words)
        assert code == 0, err
    assert "1.6ms of time, whole network" in (tmp_path / "page.html").read_text()
