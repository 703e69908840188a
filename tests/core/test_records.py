import copy
import json
import pickle

import pytest

import bitplan
from bitplan.core.errors import FileError, InputError, RecordError
from bitplan.core.record import Record, Value
from bitplan.core.records import Costs, Gains, Graph, Layer, Limit, Link, Plan
from bitplan.core.trials import Recipe, Result, Trial
from bitplan.store.files import load, save
from bitplan.testing.networks import hand_made_graph

CHOICES = ("w2a2", "w4a4")


def gains(**changes):
    return Gains(**({"method": "mine", "choices": CHOICES, "rows": {"a": (0, 1.5)}, "graph": "g"} | changes))


def costs(**changes):
    return Costs(**({"name": "mine", "unit": "u", "choices": CHOICES, "rows": {"a": (1, 2)}, "graph": "g"} | changes))


def trial(**changes):
    recipe = Recipe(epochs=1)
    fields = {
        "task": "t",
        "model": "m",
        "start": "s",
        "method": "eagl",
        "choices": CHOICES,
        "recipe": recipe,
        "seed": 0,
    }
    return Trial(**(fields | changes))


def every_kind(graph):
    plan = Plan.uniform(graph, 4)
    result = Result(trial=trial(), plan=plan.id, score=0.5, higher_is_better=True, seconds=3.0)
    return [graph, gains(), costs(), plan, Recipe(steps=10), trial(), result]


def test_every_record_reads_back_equal(graph, tmp_path):
    for record in every_kind(graph):
        path = save(record, tmp_path / f"{record.kind()}.json")
        again = load(path, type(record))
        assert again == record
        assert again.id == record.id
        assert load(path, Record) == record


def test_ids_follow_the_content_and_nothing_else(graph):
    assert gains().id == gains(seconds=99.0).id
    assert gains().id != gains(rows={"a": (0, 1.6)}).id
    assert trial().id != trial(seed=1).id
    assert len(graph.id) == 12
    assert graph.id == Graph.from_json(graph.to_json()).id


def test_records_are_frozen(graph):
    with pytest.raises(Exception, match="frozen"):
        graph.model = "other"


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: gains(rows={"a": (0, float("nan"))}), "gain of 'a' at w4a4 is nan"),
        (lambda: gains(rows={"a": (0, float("inf"))}), "gain of 'a' at w4a4 is inf"),
        (lambda: gains(rows={"a": (1, 2)}), "lowest choice must be 0"),
        (lambda: gains(rows={"a": (0, 1, 2)}), "3 values for 2 choices"),
        (lambda: gains(choices=("w4a4", "w2a2")), "must ascend"),
        (lambda: gains(choices=("w4a4",)), "at least two"),
        (lambda: gains(choices=("w2a4", "w4a2")), "must ascend"),
        (lambda: gains(errors={"b": (0, 1)}), "'b', which has no gain"),
        (lambda: gains(errors={"a": (0, -1)}), "finite and ≥ 0"),
        (lambda: costs(rows={"a": (1, 2.5)}), "valid integer"),
        (lambda: costs(rows={"a": (-1, 2)}), "greater than or equal to 0"),
        (lambda: costs(rows={"a": (True, 2)}), "valid integer"),
        (lambda: Graph(model="m", layers=(layer("a"), layer("a"))), "'a' appears twice"),
        (lambda: Graph(model="m", layers=()), "at least 1"),
        (lambda: Graph(model="m", layers=(layer("a"),), links=(link("a", "b"),)), "'b' does not exist"),
        (
            lambda: Graph(model="m", layers=tuple(map(layer, "abc")), links=(link("a", "b"), link("b", "c"))),
            "two links",
        ),
        (lambda: Layer(name="a", kind="k", macs=1, weights=1, in_features=1, why="because"), "go together"),
        (lambda: Layer(name="a", kind="k", macs=1, weights=1, in_features=1, macz=1), "unknown key; did you mean macs"),
        (lambda: Layer(name="a", kind="k", weights=1, in_features=1), "macs: is missing"),
        (
            lambda: Plan(model="m", precisions={"a": 4, "b": 2}, links=(("a", "b"),), method="", selector=""),
            "different",
        ),
        (lambda: Limit(budget="1", cost_name="c", capacity=1, cost=2), "over its capacity"),
        (lambda: Recipe(), "epochs or as steps"),
        (lambda: Recipe(epochs=1, steps=1), "epochs or as steps"),
        (lambda: Recipe(epochs=1, learning_rate=1), "unknown key"),
        (lambda: bitplan.Precision(weight_bits=1, act_bits=4), "greater than or equal to 2"),
    ],
)
def test_impossible_values_are_refused_in_one_clear_line(build, words):
    with pytest.raises(RecordError) as caught:
        build()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_without_a_rate_gets_one_that_does_no_harm_and_one_with_a_rate_is_as_before():
    plain = Recipe(steps=3, lr=0.01)
    assert (plain.warmup, plain.move_limit, plain.held_out) == (0.0, 0.0, 0.0)
    harmless = Recipe(steps=3)
    assert (harmless.lr, harmless.warmup, harmless.move_limit) == (0.01, 0.1, 0.001)
    assert Recipe(steps=3, optimizer="adamw").lr == 1e-4
    assert Recipe(steps=3, warmup=0.0, move_limit=0.5) == Recipe(steps=3, lr=0.01, warmup=0.0, move_limit=0.5)
    for recipe in (plain, harmless, Recipe(steps=3, held_out=0.1)):
        assert Recipe.from_json(recipe.to_json()) == recipe


def layer(name):
    return Layer(name=name, kind="k", macs=1, weights=1, in_features=1)


def link(*names):
    return Link(layers=names, through="x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "cut off"),
        (lambda text: "", "cut off"),
        (lambda text: text[1:], "not JSON"),
        (lambda text: "[1, 2]", "JSON list"),
        (lambda text: '"graph"', "JSON str"),
        (lambda text: "{}", "not a bitplan record"),
        (lambda text: text.replace('"bitplan": "graph"', '"bitplan": "grap"'), "did you mean graph"),
        (lambda text: text.replace('"format": 1', '"format": 3'), "newer than this bitplan reads"),
        (lambda text: text.replace('"format": 1', '"format": 0'), "no longer read"),
        (lambda text: text.replace('"format": 1', '"format": "two"'), "no format version"),
        (lambda text: text.replace('"macs": 300', '"macs": 301'), "edited by hand"),
        (lambda text: text.replace('"macs": 300', '"macs": NaN'), "the number NaN is not finite"),
        (lambda text: "[" * 100_000, "not JSON"),
    ],
)
def test_wrong_files_are_refused_by_name(graph, tmp_path, change, words):
    path = tmp_path / "record.json"
    path.write_text(change(graph.to_json()))
    with pytest.raises(FileError, match="record.json") as caught:
        load(path, Graph)
    assert words in str(caught.value)


def test_a_record_of_another_kind_is_refused(graph, tmp_path):
    with pytest.raises(FileError, match="this is a graph, where a plan is needed"):
        load(save(graph, tmp_path / "x.json"), Plan)


def test_a_file_edited_on_purpose_loads_without_its_id(graph, tmp_path):
    content = json.loads(graph.to_json())
    del content["id"]
    content["model"] = "renamed"
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    assert load(path, Graph).model == "renamed"


def test_groups_are_links_and_single_layers_in_order(graph):
    assert [[layer.name for layer in group.layers] for group in graph.groups] == [
        ["stem"], ["a", "side"], ["b"], ["c"], ["head"],
    ]  # fmt: skip
    assert [group.name for group in graph.selectable] == ["a", "b", "c"]


def test_a_uniform_plan_keeps_fixed_layers(graph):
    plan = Plan.uniform(graph, "w2a2")
    assert {str(plan.precisions[name]) for name in "abc"} == {"w2a2"}
    assert str(plan.precisions["stem"]) == "w8a8"


def test_precisions_are_written_and_read():
    parse = bitplan.Precision.parse
    assert str(parse(4)) == str(parse("4")) == str(parse("w4a4")) == "w4a4"
    assert parse("w4a16").act_bits == 16
    assert parse("w4a8").above(parse("w4a4"))
    assert not parse("w4a8").above(parse("w8a4"))
    for wrong in ("w4", "4x4", "", "w99a4", None, True, "w4a4 "):
        with pytest.raises(InputError):
            parse(wrong)


def held_in(value):
    """Everything that a record holds, at every depth."""
    yield value
    if isinstance(value, Value):
        inner = vars(value).values()
    else:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in inner:
        yield from held_in(item)


def records_with_mappings():
    graph = hand_made_graph()
    gains = bitplan.estimate("uniform", None, graph)
    gains = gains.model_copy(update={"options": {"rows": [1, {"deep": [2]}]}})
    plan = bitplan.select(graph, gains, bitplan.price("bmac", graph), budget="70%")
    return [graph, gains, bitplan.price("bmac", graph), plan, bitplan.Rules(fix={"stem": "w8a8"})]


@pytest.mark.parametrize("place", range(5))
def test_nothing_that_a_record_holds_can_be_changed(place):
    record = records_with_mappings()[place]
    again = type(record).model_validate(record.model_dump(mode="json"))
    for same in (record, copy.deepcopy(record), pickle.loads(pickle.dumps(record)), again):
        assert same == record
        for held in held_in(same):
            assert type(held) not in (dict, list, set), held
            if isinstance(held, dict):
                with pytest.raises(TypeError, match="a record does not change"):
                    held["stem"] = None
                with pytest.raises(TypeError, match="a record does not change"):
                    held.update(stem=None)
            if isinstance(held, list):
                with pytest.raises(TypeError, match="a record does not change"):
                    held.append(1)


def test_what_is_held_reads_like_a_plain_mapping_and_leaves_that_of_the_caller_alone():
    given = {"stem": "w8a8"}
    rules = bitplan.Rules(fix=given)
    given["head"] = "w2a2"
    assert rules.fix == {"stem": bitplan.Precision.parse("w8a8")}
    wider = rules.fix | {"head": 1}
    wider["more"] = 2
    assert (type(wider), len(rules.fix)) == (dict, 1)
    options = records_with_mappings()[1].options
    assert json.loads(json.dumps(options)) == {"rows": [1, {"deep": [2]}]}
    with pytest.raises(TypeError, match="a record does not change"):
        options["rows"][1]["deep"] += [3]
