import itertools

import pytest
from torch import empty, nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.graph.rules import amend
from nets import Net


def forward(net, x):
    x = net.wide(net.more(net.stem(x).relu()).relu()).relu()
    return net.head((net.narrow(x) + net.twin(x)).relu())


def traced(rules):
    sizes = {"stem": (200, 200), "more": (200, 200), "wide": (200, 64), "narrow": (64, 200), "twin": (64, 200)}
    sizes |= {"head": (200, 10)}
    net = Net(forward, **{name: nn.Linear(*size) for name, size in sizes.items()})
    return bitplan.trace(net, empty(1, 200), rules=rules)


def fixed(**rules):
    graph = traced(bitplan.Rules(**rules))
    return {layer.name: (str(layer.fixed), layer.why) for layer in graph.layers if layer.fixed}


NARROW = ("w4a4", "64 input features, fewer than 128")
PAIR = ("narrow", "twin")
ALL_BUT_WIDE = ("stem", "more", "narrow", "twin", "head")
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


def test_the_rule_is_a_field_and_a_linked_layer_says_whose_rule_it_shares():
    graph = traced(bitplan.Rules.read(fix=["twin=w8a8"]))
    ruled = {layer.name: (layer.rule, layer.linked_to, layer.is_end) for layer in graph.layers}
    assert ruled == {
        "stem": ("first", "", True),
        "more": (None, "", False),
        "wide": (None, "", False),
        "narrow": ("pattern", "twin", False),
        "twin": ("pattern", "", False),
        "head": ("last", "", True),
    }


def test_a_layer_that_is_linked_to_an_end_is_no_end():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.side, self.head = nn.Linear(200, 200), nn.Linear(200, 200), nn.Linear(200, 10)

        def forward(self, x):
            return self.head(self.stem(x) + self.side(x))

    graph = bitplan.trace(Twins(), empty(1, 200))
    assert [(layer.rule, layer.linked_to, layer.is_end) for layer in graph.layers[:2]] == [
        ("first", "", True),
        ("first", "stem", False),
    ]


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
        bitplan.Rules(fix=[wrong])


def test_reasons_are_worded_as_ever_since_the_ids_of_graphs_depend_on_them():
    model, example = bitplan.load_model("digits_resnet")
    graph = bitplan.trace(model, example, rules=bitplan.Rules(narrow=48), name="digits_resnet")
    assert graph.id == "5ee174712b29"  # as before rules were fields


AMENDMENTS = [{}, {"fix": ["wide=w2a8"]}, {"fix": ["twin=w8a8"]}, {"free": ["narrow"]}, {"free": ["narrow", "twin"]}]
AMENDMENTS += [{"fix": ["*=w4a4"], "free": ["head"]}, {"free": ["*"]}, {"fix": ["st*=w3a3", "wide=w2a2"]}]


@pytest.mark.parametrize("patterns", AMENDMENTS)
@pytest.mark.parametrize("before", [{}, {"narrow": 0}, {"fix": ["wide=w8a8"]}])
def test_patterns_on_a_graph_do_what_they_do_when_it_is_traced(before, patterns):
    """Those of the amendment come before the graph's own, as if they had been written first."""
    graph = traced(bitplan.Rules.read(**before))
    first, then = (bitplan.Rules.read(**one).fix for one in (patterns, before))
    own = first | {pattern: precision for pattern, precision in then.items() if pattern not in first}
    together = bitplan.Rules.read(**before | patterns | {"fix": own})
    assert amend(graph, bitplan.Rules.read(**patterns)) == traced(together)


def test_a_pattern_that_can_only_be_ignored_is_refused():
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(200, 200), nn.Linear(200, 10)

        def forward(self, x):
            x = self.stem(x)
            return self.head(x @ (x.transpose(0, 1) @ x))

    with pytest.raises(InputError, match=r"'mat\*' matches only matmul, which is not chosen for"):
        bitplan.trace(Products(), empty(4, 200), rules=bitplan.Rules(fix={"mat*": "w8a8"}))


@pytest.mark.parametrize("choices", ["w2a16, w4a16", ["w4a16"], ("w2a16", bitplan.Precision.parse("w3a16"))])
def test_beside_choices_that_leave_inputs_alone_rules_do_so_too(choices):
    rules = bitplan.Rules().for_choices(choices)
    assert list(map(str, (rules.first, rules.last, rules.narrow_at, rules.embeddings))) == ["w8a16"] * 2 + [
        "w4a16",
        "w8a16",
    ]
    assert rules.products.left_alone


def test_what_was_said_and_what_quantizes_inputs_stays():
    usual = bitplan.Rules()
    assert usual.for_choices("w2a2,w4a16") == usual
    said = bitplan.Rules.read(first="w8a8", last="free", fix=["stem=w4a4"]).for_choices("w2a16,w4a16")
    assert (str(said.first), said.last, str(said.fix["stem"]), str(said.narrow_at)) == ("w8a8", None, "w4a4", "w4a16")


def small(*channels):
    """Convolutions one after the other, then a linear layer."""
    layers = [nn.Conv2d(inputs, outputs, 1) for inputs, outputs in itertools.pairwise(channels)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels[-1], 10)), empty(1, channels[0], 1, 1)


@pytest.mark.parametrize(
    ("channels", "strict", "left_out"),
    [((3, 8, 16, 32), 0, True), ((3, 32, 128, 128), 1, True), ((3, 128, 128, 128), 2, False), ((3, 128), 0, False)],
)
def test_the_rule_on_narrow_layers_is_left_out_where_it_leaves_no_choice(channels, strict, left_out):
    """One group is no choice: the budget alone would decide. Where that rule takes nothing, it stays."""
    model, example = small(*channels)
    exact = bitplan.trace(model, example, rules=bitplan.Rules(narrow=128))
    assert len(exact.selectable) == strict
    assert exact.notes == ()
    graph = bitplan.trace(model, example)
    assert bool(graph.notes) == left_out
    expected = bitplan.trace(model, example, rules=bitplan.Rules(narrow=0 if left_out else 128))
    assert [layer.fixed for layer in graph.layers] == [layer.fixed for layer in expected.layers]
    if left_out:
        assert "fewer than 128 input features are not fixed here" in graph.notes[0]
        assert "--rules narrow=128" in graph.notes[0]
        assert bitplan.Plan.uniform(graph, "w2a2").precisions["1"] == bitplan.Precision.parse("w2a2")


def test_notes_are_read_again_and_change_no_id(tmp_path):
    graph = bitplan.trace(*small(3, 8, 16))
    read = bitplan.load(bitplan.save(graph, tmp_path / "graph.json"))
    assert read == graph
    assert read.notes == graph.notes != ()
    silent = graph.model_copy(update={"notes": ()})
    assert silent.id == graph.id
    assert "notes" not in silent.to_json()


def test_a_study_is_held_to_the_rule_that_it_does_not_write():
    """Its file is read again, and says 128 then."""
    settled = bitplan.Rules().settled((bitplan.Precision.parse("w2a2"), bitplan.Precision.parse("w4a4")))
    graph = bitplan.trace(*small(3, 8, 16), rules=settled)
    assert graph.selectable == ()
    assert settled == bitplan.Rules.model_validate(settled.model_dump(mode="json"))
