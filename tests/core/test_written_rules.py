"""Rules read what people write, and are written as they were read."""

import json

import pytest

import bitplan
from bitplan.core.errors import RecordError
from bitplan.core.records import Graph, Layer

EIGHT = bitplan.Precision.parse("w8a8")


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ({"first": "free"}, {"first": None}),
        ({"last": "w4a16", "narrow": 0}, {"last": bitplan.Precision.parse("w4a16"), "narrow": 0}),
        ({"embeddings": "free"}, {"embeddings": None}),
        ({"fix": ["stem.*=w8a8", "a=b=4"]}, {"fix": {"stem.*": EIGHT, "a=b": bitplan.Precision.parse(4)}}),
        ({"fix": {"stem.*": "w8a8"}, "free": ["fc"]}, {"fix": {"stem.*": EIGHT}, "free": ("fc",)}),
    ],
)
def test_rules_read_what_people_write_and_are_written_so_that_they_read_back(written, plain):
    rules = bitplan.Rules.read(**written)
    assert rules == bitplan.Rules(**plain)
    assert bitplan.Rules.model_validate(json.loads(json.dumps(rules.model_dump(mode="json")))) == rules


def test_rules_are_written_as_studies_always_wrote_them_so_that_ids_of_trials_stay():
    written = bitplan.Rules.read(first="free", fix=["stem.*=w8a8"]).model_dump(mode="json")
    assert written == {"first": "free", "last": "w8a8", "narrow": 128, "fix": ["stem.*=w8a8"], "free": []}
    assert bitplan.Rules(products="w4a4").model_dump(mode="json")["products"] == "w4a4"
    assert bitplan.Rules(first=None).model_dump(mode="json", exclude_defaults=True, exclude_none=True) == {
        "first": "free"
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"first": "freed"}, "first: a precision is written like w4a4"),
        ({"narrow": -1}, "narrow"),
        ({"fix": ["stem"]}, "fix: 'stem' is not PATTERN=PRECISION, such as"),
        ({"fix": ["stem=w8"]}, "fix.stem: a precision is written like"),
        ({"fix": "stem=w8a8"}, "fix: "),
        ({"narow": 3}, "did you mean narrow"),
    ],
)
def test_what_is_no_rule_is_one_line(wrong, words):
    with pytest.raises(RecordError) as caught:
        bitplan.Rules.read(**wrong)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def layer(name, **ruling):
    return {"name": name, "kind": "k", "macs": 1, "weights": 1, "in_features": 1, **ruling}


@pytest.mark.parametrize(
    ("ruling", "words"),
    [
        ({"fixed": "w8a8", "why": "first layer"}, "its rule and its reason go together"),
        ({"rule": "first"}, "go together"),
        ({"fixed": "w8a8", "rule": "first"}, "go together"),
        ({"linked_to": "b"}, "shares the rule of 'b' but is not fixed"),
        ({"fixed": "w8a8", "rule": "best", "why": "because"}, "rule: "),
    ],
)
def test_a_fixed_layer_has_a_rule_and_a_free_one_none(ruling, words):
    with pytest.raises(RecordError, match=words):
        Layer(**layer("a", **ruling))


OLD = """{"bitplan": "graph", "format": 1, "id": "ID", "model": "m", "layers": [
 {"name": "a", "kind": "k", "macs": 1, "weights": 1, "in_features": 1, "fixed": "w8a8", "why": "WHY"},
 {"name": "b", "kind": "k", "macs": 1, "weights": 1, "in_features": 1, "fixed": null, "why": ""}],
 "links": [], "unreached": []}"""


@pytest.mark.parametrize(
    ("why", "rule", "linked_to", "identity"),
    [
        ("first layer", "first", "", "28d721df060b"),
        ("last layer", "last", "", "50900d370269"),
        ("64 input features, fewer than 128", "narrow", "", "001c72a0a22a"),
        ("embedding", "embedding", "", "9d269201488c"),
        ("product of activations", "product", "", "48ae07157a1b"),
        ("matches 'first layer'", "pattern", "", "5ed5474c9537"),
        ("bmm is not quantized", "unquantized", "", "1a47559d4976"),
        ("recurrent layers are not quantized", "unquantized", "", "ea5b98de64e4"),
        ("linked to x.y (3 input features, fewer than 5)", "narrow", "x.y", "a8ee7cbf7721"),
        ("linked to x (matches 'x (1)')", "pattern", "x", "7055179df0ea"),
        ("I said so", "pattern", "", "c4b6295a8374"),
    ],
)
def test_a_graph_of_format_1_is_read_and_keeps_its_id(why, rule, linked_to, identity):
    graph = Graph.from_json(OLD.replace("WHY", why).replace("ID", identity))
    first, second = graph.layers
    assert (first.rule, first.linked_to, first.why) == (rule, linked_to, why)
    assert second.rule is None
    assert graph.id == identity  # or gains that were estimated of it would no longer belong to it
    again = Graph.from_json(graph.to_json())
    assert (again, again.id) == (graph, identity)
    assert json.loads(graph.to_json())["format"] == 2


@pytest.mark.parametrize("build", [bitplan.Rules.read, bitplan.Rules])
def test_a_refusal_says_once_of_what_it_is(build):
    with pytest.raises(RecordError, match=r"^Rules: fix: 'stem' is not PATTERN=PRECISION"):
        build(fix=["stem"])
