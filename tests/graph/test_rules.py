import itertools

import pytest
from torch import empty, nn, save

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.precision import parse_choices
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
    sizes = {"stem": (200, 200), "early": (200, 10), "inner": (200, 200), "head": (200, 10)}
    net = Net(exits_early, **{name: nn.Linear(*size) for name, size in sizes.items()})
    graph = bitplan.trace(net, empty(1, 200))
    ruled = {layer.name: (layer.rule, layer.linked_to, layer.is_end) for layer in graph.layers}
    assert ruled == {
        "stem": ("first", "", True),
        "early": ("last", "", True),
        "inner": ("last", "early", False),
        "head": ("last", "", True),
    }


def exits_early(net, x):
    x = net.stem(x).relu()
    return net.early(x), net.head(net.inner(x).relu())


def ends(net, *example):
    graph = bitplan.trace(net, example, rules=bitplan.Rules(narrow=0))
    return [[layer.name for layer in graph.layers if layer.rule == rule] for rule in ("first", "last")]


def linears(forward, *names, **others):
    return Net(forward, **{name: nn.Linear(8, 8) for name in names}, **others)


def detects(net, x, sizes):
    x = net.stem(x).relu() + net.sizes(sizes.sigmoid() * 2)
    x = net.body(x) + x
    return {"boxes": net.box(net.inner(x)).sigmoid(), "labels": [net.label(x.relu()).softmax(-1)]}


def recurs(net, x):
    state = x.new_zeros(x.shape[0], 8)
    for _ in range(3):
        state = (net.read(x) + net.again(state)).tanh()
    return net.head(state)


def attends(net, x):
    x = net.stem(x) + x
    keys, values = net.keys(x), net.values(x)
    return net.out((net.queries(x) @ keys.transpose(0, 1)).softmax(-1) @ values), keys, values


def compares(net, x, other):
    return net.left(x) @ net.right(other).transpose(0, 1)


def looks_up(net, x, index):
    return net.out(net.stem(x) + net.table(index))


def repeats(net, x):
    for _ in range(3):
        x = net.inner(x).relu()
    return net.head(x.clone()), net.head(x + 1)


def changes_in_place(net, x):
    boxes = x.new_empty(2, 16)
    x = net.stem(x)
    boxes[:, :8] = net.box(x.relu())
    boxes[:, 8:] = net.label(x.tanh())
    return boxes


def residual(net, x):
    for layer in (net.one, net.two, net.three):
        x = x + layer(x.relu())
    return x


BATCH = empty(2, 8)


@pytest.mark.parametrize(
    ("net", "example", "first", "last"),
    [
        (linears(detects, "stem", "sizes", "body", "inner", "box", "label"), (BATCH, BATCH), "stem sizes", "box label"),
        (linears(recurs, "read", "again", "head"), (BATCH,), "read", "head"),
        (linears(attends, "stem", "keys", "values", "queries", "out"), (BATCH,), "stem", "out"),
        (linears(compares, "left", "right"), (BATCH, BATCH), "left right", ""),
        (linears(looks_up, "stem", "out", table=nn.Embedding(9, 8)), (BATCH, empty(2).long()), "stem", "out"),
        (linears(repeats, "inner", "head"), (BATCH,), "inner", "head"),
        (linears(changes_in_place, "stem", "box", "label"), (BATCH,), "stem", "box label"),
        (linears(residual, "one", "two", "three"), (BATCH,), "one", "three"),
    ],
)  # fmt: skip
def test_first_layers_read_the_input_and_no_layer_reads_the_heads(net, example, first, last):
    """A head may be called before other layers, and is one although its results are computed with afterwards."""
    assert ends(net, *example) == [first.split(), last.split()]


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
    assert list(map(str, (rules.first, rules.last, rules.embeddings))) == ["w8a16"] * 3
    highest = (choices.split(", ") if isinstance(choices, str) else choices)[-1]
    assert rules.narrow_at == bitplan.Precision.parse(highest)
    assert rules.products.left_alone


CHOICES = {
    "w2a2,w4a4": ("w8a8", "w4a4"),
    "w2a2,w3a3": ("w8a8", "w3a3"),
    "w8a8,w16a16": ("w8a8", "w16a16"),
    "w10a9,w12a12": ("w10a9", "w12a12"),
    "w4a4,w4a8,w8a8": ("w8a8", "w8a8"),
}


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("early", [True, False])
def test_no_rule_fixes_a_layer_below_what_others_may_have(choices, early):
    """Whether the choices are known when the rules are applied, or only when a plan is selected."""
    rules = bitplan.Rules().for_choices(choices) if early else None
    graph = traced(rules)
    gains, costs = bitplan.estimate("uniform", None, graph, choices=choices), bitplan.price("bops", graph, choices)
    plan = bitplan.select(graph, gains, costs, budget="100%")
    end, narrow = CHOICES[choices]
    fixed = {"stem": end, "narrow": narrow, "twin": narrow, "head": end}
    highest = choices.split(",")[-1]
    assert {name: str(precision) for name, precision in plan.precisions.items()} == {
        "more": highest, "wide": highest, **fixed,
    }  # fmt: skip
    assert all(costs.fixed[name] > 0 for name in fixed)


def test_what_somebody_wrote_stays_below_the_choices_too():
    graph = traced(bitplan.Rules.read(narrow_at="w4a4", last="w2a2").for_choices("w8a8,w16a16"))
    fixed = graph.fixed_beside(parse_choices("w8a8,w16a16"))
    assert {name: str(precision) for name, precision in fixed.items()} == {
        "stem": "w8a8", "narrow": "w4a4", "twin": "w4a4", "head": "w2a2",
    }  # fmt: skip


def test_one_precision_for_all_is_no_offer_of_it_to_narrow_layers_but_none_of_them_is_below():
    precisions = [bitplan.Plan.uniform(traced(None), bits).precisions["narrow"] for bits in ("w2a2", "w6a6")]
    assert list(map(str, precisions)) == ["w4a4", "w6a6"]


def test_a_plan_says_once_for_each_rule_what_it_fixed():
    graph = traced(bitplan.Rules.read(fix=["more=w3a3"]))
    gains, costs = bitplan.estimate("uniform", None, graph), bitplan.price("bmac", graph)
    lines = str(bitplan.select(graph, gains, costs, budget="100%")).splitlines()
    assert [line for line in lines if line.startswith("rule ")] == [
        "rule 'first' fixes stem at w8a8",
        "rule 'pattern' fixes more at w3a3",
        "rule 'narrow' fixes narrow, twin at w4a4",
        "rule 'last' fixes head at w8a8",
    ]
    uniform = str(bitplan.Plan.uniform(traced(bitplan.Rules.read(fix=["*=w3a3"], free=["head"])), "w2a2"))
    assert "rule 'pattern' fixes stem and 4 more at w3a3" in uniform.splitlines()


def test_the_layers_of_a_file_are_not_fixed_below_the_choices_either(tmp_path):
    sizes = ((200, 200), (200, 64), (64, 200), (200, 200), (200, 10))
    save(nn.Sequential(*(nn.Linear(*size) for size in sizes)).state_dict(), tmp_path / "net.pth")
    plan = bitplan.choose(tmp_path / "net.pth", budget="100%", choices="w8a8,w16a16", gain="uniform")
    assert list(map(str, plan.precisions.values())) == ["w8a8", "w16a16", "w16a16", "w16a16", "w8a8"]
    assert "rule 'narrow' fixes 2 at w16a16" in str(plan)


def test_what_was_said_and_what_quantizes_inputs_stays():
    usual = bitplan.Rules()
    assert usual.for_choices("w2a2,w4a4") == usual
    assert usual.for_choices("w2a2,w4a16") == usual.model_copy(update={"narrow_at": bitplan.Precision.parse("w4a16")})
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
    assert bitplan.Graph.from_json(silent.to_json()).notes == ()


def test_a_study_is_held_to_the_rule_that_it_does_not_write():
    """Its file is read again, and says 128 then."""
    settled = bitplan.Rules().settled((bitplan.Precision.parse("w2a2"), bitplan.Precision.parse("w4a4")))
    graph = bitplan.trace(*small(3, 8, 16), rules=settled)
    assert graph.selectable == ()
    assert settled == bitplan.Rules.model_validate(settled.model_dump(mode="json"))
