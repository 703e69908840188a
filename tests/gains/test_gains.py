import json
from dataclasses import dataclass

import pytest
from toys import Stripes, quantized

import bitplan
from bitplan.core.errors import FileError, InputError, UnknownName
from bitplan.core.method_facts import describe_method
from bitplan.core.registry import GAINS
from bitplan.gains.alps import Alps
from bitplan.gains.base import Context, Gain, LayerGains, make_gain
from bitplan.gains.baselines import FirstToLast
from bitplan.gains.eagl import Eagl


def rows(graph, method, **options):
    return bitplan.estimate(method, None, graph, **options).rows


def test_uniform_sums_over_links(graph):
    assert rows(graph, "uniform") == {"a": (0, 2), "b": (0, 1), "c": (0, 1)}
    assert rows(graph, "uniform", choices="w2a2,w4a4,w8a8")["b"] == (0, 1, 2)


def test_positions_belong_to_the_first_member_of_a_link(graph):
    assert rows(graph, "first_to_last") == {"a": (0, 1), "b": (0, 2), "c": (0, 3)}
    assert rows(graph, "last_to_first") == {"a": (0, 3), "b": (0, 2), "c": (0, 1)}


def test_random_repeats_for_a_seed(graph):
    drawn = [rows(graph, "random", context=Context(seed=seed)) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.csv", "layer,gain\na,1\nside,2\nb,3\nc,4\nstem,9", {"a": (0, 3), "b": (0, 3), "c": (0, 4)}),
        ("t.csv", "# by hand\nlayer,gain\na,1\nb,3\nc,4", {"a": (0, 1), "b": (0, 3), "c": (0, 4)}),
        ("t.csv", "layer,w2a2,w4a4\na,1,3\nb,0.5,0.75\nc,0,-1", {"a": (0, 2), "b": (0, 0.25), "c": (0, -1)}),
        ("t.json", {"a": 1, "b": {"w4a4": 2}, "c": {"w2a2": 1, "w4a4": 4}}, {"a": (0, 1), "b": (0, 2), "c": (0, 3)}),
    ],
)
def test_your_own_numbers_by_layer_or_group(graph, tmp_path, name, content, expected):
    gains = bitplan.estimate(write(tmp_path, name, content), None, graph)
    assert gains.rows == expected
    assert gains.method == "table"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("layer,gain\na,1\nb,3", "no gain for layer 'c'"),
        ("layer,gain\nside,1\nb,3\nc,1", "no gain for layer 'a'"),
        ("layer,gain\na,1\nb,3\nc,1\nd,1", "unknown layer in"),
        ("layer,gain\na,1\nb,nan\nc,1", "gain of 'b' at w4a4 is nan"),
        ("layer,gain\na,1\nb,inf\nc,1", "gain of 'b' at w4a4 is inf"),
        ("layer,w2a2\na,1\nb,1\nc,1", "no gain for 'a' at w4a4"),
    ],
)
def test_tables_that_do_not_fit_are_refused(graph, tmp_path, content, words):
    with pytest.raises(InputError) as caught:
        bitplan.estimate(write(tmp_path, "t.csv", content), None, graph)
    assert words in str(caught.value)


def test_one_number_is_not_enough_for_three_choices(graph, tmp_path):
    path = write(tmp_path, "t.csv", "layer,gain\na,1\nb,1\nc,1")
    with pytest.raises(FileError, match="one gain for 3 choices"):
        bitplan.estimate(path, None, graph, choices="w2a2,w4a4,w8a8")


def test_unknown_methods_and_options_suggest_near_ones(graph):
    with pytest.raises(UnknownName, match="did you mean uniform"):
        bitplan.estimate("unifrm", None, graph)
    with pytest.raises(UnknownName, match="unknown option of table 'pth'; did you mean path"):
        bitplan.estimate("table", None, graph, pth="x")
    with pytest.raises(InputError, match="table: .*path"):
        bitplan.estimate("table", None, graph)


def test_a_method_of_ones_own_is_an_object_with_one_function(graph):
    @dataclass(frozen=True)
    class Widths(Gain):
        power: float = 1.0

        def layer_gains(self, model, graph, choices, context):
            values = {layer.name: (0.0, layer.macs**self.power) for layer in graph.layers}
            return LayerGains(values, errors={name: (0.0, 3.0) for name in values}, counts={"samples": 7})

    gains = bitplan.estimate(Widths(), None, graph)
    assert gains.method == "widths"
    assert gains.options == {"power": 1.0}
    assert gains.rows["a"] == (0, 160)
    assert gains.errors["a"] == (0, pytest.approx(18**0.5))  # independent errors of two linked layers
    assert gains.counts == {"samples": 7}
    assert gains.seconds > 0


def test_a_method_that_is_not_derived_from_gain_is_told_how(graph):
    @dataclass(frozen=True)
    class Bare:
        def layer_gains(self, model, graph, choices, context):
            return LayerGains({})

    said = (
        "Bare is no gain, for it has no selector and no structural and no trainings: "
        r"derive it from bitplan\.gains\.base\.Gain \(docs/extend\.md\)"
    )
    with pytest.raises(InputError, match=said):
        bitplan.estimate(Bare(), None, graph)
    with GAINS.registered("bare", Bare), pytest.raises(InputError, match=said):
        bitplan.estimate("bare", None, graph)


def test_a_method_may_state_what_it_does_not_inherit(graph):
    @dataclass(frozen=True)
    class Stated:
        selector = "greedy"
        structural = True
        trainings = Gain.trainings

        def layer_gains(self, model, graph, choices, context):
            return LayerGains({layer.name: (0.0, 1.0) for layer in graph.layers})

    assert bitplan.estimate(Stated(), None, graph).selector == "greedy"


def test_a_method_goes_by_the_name_it_is_registered_under():
    gains = FirstToLast(), Alps(), Eagl()
    assert [make_gain(gain, {})[1] for gain in gains] == ["first_to_last", "alps", "eagl"]


def test_methods_that_train_can_tell_beforehand_what_they_take():
    foreseeing = {name for name in GAINS if GAINS.get(name).trainings is not Gain.trainings}
    assert foreseeing == {
        name for name in GAINS if describe_method(GAINS.get(name)) and describe_method(GAINS.get(name)).trains
    }
    assert Eagl().trainings(None, None, (), Context()) is None


def test_seconds_are_those_of_the_work_wherever_it_was_done(tmp_path):
    """An estimate that finds its jobs in the store says what they took, not how fast they were read."""
    model, graph = quantized(Stripes(slow=0.02), train=False)
    context = Context(task=Stripes(slow=0.02), store=tmp_path)
    first, again = (
        bitplan.estimate("drop", model, graph, context=context, samples=64, batch_size=16) for _ in range(2)
    )
    least = (1 + len(graph.selectable)) * 4 * 0.02
    assert first.seconds >= least
    assert again.seconds >= least
    assert again.id == first.id
