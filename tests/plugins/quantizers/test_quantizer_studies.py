"""Quantizers compared at one plan: the same float network, recipe and seeds, and nothing that chooses."""

import csv
import io
import json
from pathlib import Path

import pytest
from small_study import BESIDE_THE_NETWORK, beside_the_network  # noqa: F401
from tiny import STUDY
from typer.testing import CliRunner

import bitplan
from bitplan.cli.app import app
from bitplan.core.errors import FileError, InputError
from bitplan.core.records import Plan
from bitplan.core.registry import QUANTIZERS
from bitplan.quant.convert import plan_of
from bitplan.reports.tables import make
from bitplan.stats.compare import compare_quantizers, quantizer_cells
from bitplan.store.run_folder import RunFolder
from bitplan.study.clean import find_waste
from bitplan.study.forecast import forecast
from bitplan.study.networks import trained_network
from bitplan.study.spec import read_study
from bitplan.study.status import check
from bitplan.study.sweep import sweep
from bitplan.study.trials import starts, trials

HEAD = STUDY.split("[[methods]]")[0].replace('budgets = ["85%", "70%"]\n', "")
THREE = """
[[quantizers]]
name = "lsq"
[[quantizers]]
name = "pact:decay=0.0002"
label = "pact"
at = ["w4a4", "PLAN"]
[[quantizers]]
name = "ternary"
at = ["w2a2"]
"""


def written(path, quantizers, head=HEAD):
    path.write_text(head + quantizers)
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    home = tmp_path_factory.mktemp("quantizers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(BESIDE_THE_NETWORK)
        path = written(home / "study.toml", THREE.replace("PLAN", str(home / "mixed.json")))
        tiny = bitplan.load_model("tiny:network")[0]
        graph = bitplan.trace(tiny, bitplan.load_task("digits").example(), rules=bitplan.Rules(narrow=0))
        plan = Plan.uniform(graph, "w4a4")
        first = graph.selectable[0].name
        mixed = plan.model_copy(update={"precisions": plan.precisions | {first: plan.precisions[first].parse("w3a3")}})
        (home / "mixed.json").write_text(mixed.to_json())
        study = read_study(path)
        assert len(forecast(study, home / "run", trust=True).lines) == 1 + 2 * 5
        summary = sweep(study, home / "run", trust=True)
    assert (summary.failed, summary.done, summary.total) == ((), 11, 11)
    return study, RunFolder(home / "run"), mixed


def test_all_begin_with_the_float_network_and_share_the_recipe(compared):
    study, run, mixed = compared
    found = [trial for trial in trials(study) if trial.role == "quantizer"]
    assert {trial.start for trial in found} == {starts(study).floating.id}
    assert {trial.recipe for trial in found} == {study.recipe}
    assert [(trial.method, trial.at, trial.seed) for trial in found[:6]] == [
        ("lsq", "w2a2", 0), ("lsq", "w2a2", 1), ("lsq", "w4a4", 0), ("lsq", "w4a4", 1),
        ("pact:decay=0.0002", "w4a4", 0), ("pact:decay=0.0002", "w4a4", 1),
    ]  # fmt: skip
    assert study.words(found[6]) == f"pact mixed {mixed.id} seed 0"
    by_plan = {trial.at: run.trials.read(trial.id).plan for trial in found}
    assert run.plans[by_plan[f"mixed {mixed.id}"]].precisions == mixed.precisions


def test_the_networks_are_quantized_as_they_say(compared, monkeypatch):
    study, run, mixed = compared
    results = {study.words(result.trial): result for result in run.results}
    network = trained_network(run, results[f"pact mixed {mixed.id} seed 0"], trust=True)
    assert network.as_recorded
    assert plan_of(network.model).precisions == mixed.precisions
    assert "Pact" in repr(network.model)


def test_a_table_compares_them(compared):
    study, run, mixed = compared
    cells = {(cell.title, cell.budget): cell for cell in quantizer_cells(study, run.results)}
    assert set(cells) == {("lsq", "w2a2"), ("lsq", "w4a4"), ("pact", "w4a4"), ("pact", f"mixed {mixed.id}"),
                          ("ternary", "w2a2")}  # fmt: skip
    assert {len(cell.scores) for cell in cells.values()} == {2}
    (test,) = [one for one in compare_quantizers(study, run.results, "lsq") if one.second == "pact"]
    assert test.difference == pytest.approx(cells["lsq", "w4a4"].mean - cells["pact", "w4a4"].mean)
    table = make("quantizers", run, plain=False)
    assert [column.name for column in table.columns][:3] == ["quantizer", "all at w2a2", "all at w4a4"]
    assert [row[0] for row in table.rows] == ["lsq", "pact", "ternary"]
    assert table.rows[2][1] == cells["ternary", "w2a2"].spread
    assert table.rows[2][2] is None
    rows = list(
        csv.reader(io.StringIO(run_command("run", "tables", run.path, "--which", "quantizers", "--format", "csv")))
    )
    assert rows[0] == ["quantizer", "plan", "seeds", "mean", "sd"]
    assert len(rows) == 1 + 5


def run_command(*words, code=0):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "160"})
    assert done.exit_code == code, done.output
    return done.output


def test_the_commands_take_such_a_run(compared):
    study, run, _ = compared
    said = run_command("compare", run.path)
    assert "quantizers at the same plans" in said
    assert "lsq against the other quantizers" in said
    assert "pact against the other quantizers" in run_command("compare", run.path, "--against", "pact")
    assert list(json.loads(run_command("compare", run.path, "--json"))) == ["quantizers"]
    assert "ternary" in run_command("run", "status", run.path)
    assert check(run.path).wrong == ()
    assert {path.parent.name for path in find_waste(run.path, [study]).paths} <= {"networks", "running"}
    assert sweep(study, run.path, trust=True).trained == 0
    with pytest.raises(InputError, match="compares quantizers and no methods"):
        make("frontier", run, plain=False)


def test_a_study_may_compare_both_and_methods_keep_their_ids(tmp_path):
    alone = read_study(written(tmp_path / "alone.toml", "", STUDY))
    both = read_study(written(tmp_path / "both.toml", '[[quantizers]]\nname = "sawb"\n', STUDY))
    mine, theirs = ([trial.id for trial in trials(study)] for study in (alone, both))
    assert theirs[: len(mine)] == mine
    assert len(theirs) == len(mine) + 2 * 2


WRONG = [
    ('[[quantizers]]\nname = "pactt"', r"\[\[quantizers\]\] pactt: .*pactt.*did you mean pact"),
    ('[[quantizers]]\nname = "ternary"', r"ternary has no 4 bits for weights, which w4a4 asks for.*at = \[\"w2a2\"\]"),
    ('[[quantizers]]\nname = "lsq"\nat = ["w2"]', r"\[\[quantizers\]\] lsq: .*w2"),
    ('[[quantizers]]\nname = "lsq"\nat = ["none.json"]', r"none.json"),
    ('[[quantizers]]\nname = "pact:dekay=1"', "dekay.*did you mean decay"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[said[:20] for _, said in WRONG])
def test_what_cannot_be_is_one_line(tmp_path, text, said):
    study = read_study(written(tmp_path / "study.toml", text))
    with pytest.raises(InputError, match=said) as caught:
        trials(study)
    assert "\n" not in str(caught.value)


REFUSED = [
    ("", "does not say its budgets"),
    ('[[quantizers]]\nname = "lsq"\n[[quantizers]]\nname = "lsq"\nlabel = "LSQ"', "look alike"),
    ('[[quantizers]]\nname = "lsq"\nat = "w2a2"', "at is a list"),
    ('[[quantizers]]\nname = "lsq"\nplan = "x"', "unknown key 'plan'"),
    ('[[quantizers]]\nname = "lsq"\n[[methods]]\nname = "eagl"', "does not say its budgets"),
]


@pytest.mark.parametrize(("text", "said"), REFUSED, ids=[said[:20] for _, said in REFUSED])
def test_a_file_that_says_too_little_is_refused(tmp_path, text, said):
    with pytest.raises(FileError, match=said):
        read_study(written(tmp_path / "study.toml", text))


def test_there_must_be_a_float_network(tmp_path):
    checkpoint = HEAD.split("[start]")[0].replace("distill = 0.5\n", "") + '[start]\ncheckpoint = "w4a4"\n'
    study = read_study(written(tmp_path / "study.toml", '[[quantizers]]\nname = "lsq"', checkpoint))
    (tmp_path / "w4a4").mkdir()
    with pytest.raises(InputError, match="quantizers are compared from the float network"):
        trials(study)


def test_fixed_layers_must_be_within_its_bits_before_anything_is_trained(tmp_path):
    head = HEAD.replace("narrow = 0", 'narrow = 0\nfirst = "w5a5"')
    study = read_study(written(tmp_path / "study.toml", '[[quantizers]]\nname = "ternary"\nat = ["w2a2"]', head))
    with pytest.raises(InputError, match=r"\[\[quantizers\]\] ternary at w2a2: ternary has no 5 bits"):
        sweep(study, tmp_path / "run", trust=True)
    assert not list((tmp_path / "run").glob("trials/*"))


def test_the_study_of_ours_has_every_quantizer():
    study = read_study(Path(__file__).parents[3] / "studies" / "cifar_quantizers.toml")
    named = {one.name.partition(":")[0] for one in study.quantizers}
    assert named == set(QUANTIZERS) - {"groups", "gguf"}  # which are for weights whose inputs stay float
    for one in study.quantizers:
        bits = QUANTIZERS.get(one.name.partition(":")[0]).weight_bits
        assert one.at == tuple(at for at in ("w2a2", "w4a4") if int(at[1]) in bits)
