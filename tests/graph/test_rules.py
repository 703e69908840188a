import pytest
from torch import empty, nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.graph.rules import parse_fix
from nets import Net


def forward(net, x):
    x = net.wide(net.stem(x).relu()).relu()
    return net.head((net.narrow(x) + net.twin(x)).relu())


def fixed(**rules):
    sizes = {"stem": (200, 200), "wide": (200, 64), "narrow": (64, 200), "twin": (64, 200), "head": (200, 10)}
    net = Net(forward, **{name: nn.Linear(*size) for name, size in sizes.items()})
    graph = bitplan.trace(net, empty(1, 200), rules=bitplan.Rules(**rules))
    return {layer.name: (str(layer.fixed), layer.why) for layer in graph.layers if layer.fixed}


NARROW = ("w4a4", "64 input features, fewer than 128")
PAIR = ("narrow", "twin")
ALL_BUT_WIDE = ("stem", "narrow", "twin", "head")
ENDS = {"stem": ("w8a8", "first layer"), "head": ("w8a8", "last layer")}


def test_the_rules_of_the_paper_are_the_default():
    assert fixed() == ENDS | {"narrow": NARROW, "twin": NARROW}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({"narrow": 0}, ENDS),
        ({"narrow": 64}, ENDS),
        ({"narrow": 65, "narrow_at": "w3a3"}, ENDS | {name: ("w3a3", f"{NARROW[1][:-3]}65") for name in PAIR}),
        ({"narrow": 0, "first": None}, {"head": ENDS["head"]}),
        ({"narrow": 0, "first": None, "last": "w4a4"}, {"head": ("w4a4", "last layer")}),
        ({"narrow": 0, "free": ["stem", "h*"]}, {}),
        ({"narrow": 0, "fix": {"w*": "w2a8"}}, ENDS | {"wide": ("w2a8", "matches 'w*'")}),
        ({"narrow": 0, "fix": {"*": "w4a4"}, "free": ["wide"]}, dict.fromkeys(ALL_BUT_WIDE, ("w4a4", "matches '*'"))),
    ],
)  # fmt: skip
def test_each_rule_is_an_option(rules, expected):
    assert fixed(**rules) == expected


def test_a_link_is_fixed_as_a_whole_at_the_highest_precision_of_its_members():
    found = fixed(fix={"twin": "w8a8"})
    assert found["twin"] == ("w8a8", "matches 'twin'")
    assert found["narrow"] == ("w8a8", "linked to twin (matches 'twin')")


def test_a_freed_member_stays_fixed_with_the_rest_of_its_link():
    assert fixed(free=["twin"])["twin"] == ("w4a4", "linked to narrow (64 input features, fewer than 128)")


def test_a_pattern_that_matches_nothing_lists_near_names():
    with pytest.raises(InputError, match="'narow' matches no layer; did you mean narrow"):
        fixed(fix={"narow": "w8a8"})
    with pytest.raises(InputError, match=r"'x\*' matches no layer"):
        fixed(free=["x*"])


@pytest.mark.parametrize("wrong", ["stem", "=w8a8", "stem=", "stem=w8"])
def test_what_is_no_pattern_is_refused(wrong):
    with pytest.raises(InputError):
        parse_fix([wrong])
