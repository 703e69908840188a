"""Rules read what people write, and are written as they were read."""

import json

import pytest

import bitplan
from bitplan.core.errors import RecordError
from bitplan.core.records import Layer

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


def test_rules_are_written_as_people_write_them():
    written = bitplan.Rules.read(first="free", fix=["stem.*=w8a8"]).model_dump(mode="json")
    assert written == {
        "first": "free", "last": "w8a8", "narrow": 128, "narrow_at": "w4a4", "embeddings": "w8a8", "products": "w8a8",
        "fix": ["stem.*=w8a8"], "free": [],
    }  # fmt: skip
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


@pytest.mark.parametrize("build", [bitplan.Rules.read, bitplan.Rules])
def test_a_refusal_says_once_of_what_it_is(build):
    with pytest.raises(RecordError, match=r"^Rules: fix: 'stem' is not PATTERN=PRECISION"):
        build(fix=["stem"])
