import json
import logging

import pytest

import bitplan
from bitplan.core.errors import FileError, InputError
from bitplan.core.precision import Precision
from bitplan.costs.standard import POWER, energy, mac_energy, total


def test_bmac_is_bits_times_macs_summed_over_links(graph):
    costs = bitplan.price("bmac", graph)
    assert costs.rows == {"a": (2 * 160, 4 * 160), "b": (600, 1200), "c": (160, 320)}
    assert costs.fixed == {"stem": 400, "head": 80}
    assert costs.unit == "bit-MACs"


def test_bops_is_the_product_of_both_precisions(graph):
    assert bitplan.price("bops", graph, "w2a4,w4a8").rows["b"] == (2 * 4 * 300, 4 * 8 * 300)


def test_memory_counts_weights_and_steps(graph):
    costs = bitplan.price("memory", graph, "w2a2,w4a16,w16a16")
    assert costs.rows["b"] == (20 * 2 + 64, 20 * 4 + 32, 20 * 16)
    assert costs.unit == "bits"


def test_bmac_refuses_unequal_precisions_and_names_what_to_use(graph):
    with pytest.raises(InputError, match="use bops .* or memory"):
        bitplan.price("bmac", graph, "w2a2,w4a8")


def test_any_function_of_layer_and_precision_is_a_cost(graph):
    costs = bitplan.price(lambda layer, precision: precision.weight_bits, graph)
    assert costs.rows["a"] == (4, 8)


@pytest.mark.parametrize("value", [-1, 1.5, True, None, float("nan")])
def test_a_cost_that_is_no_whole_number_is_refused(graph, value):
    with pytest.raises(InputError, match="a cost is a whole number ≥ 0"):
        bitplan.price(lambda layer, precision: value, graph)


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


ROWS = {
    "a": {"w2a2": 5, "w4a4": 9},
    "side": {"w2a2": 1, "w4a4": 2},
    "b": {"w2a2": 7, "w4a4": 8},
    "c": {"w2a2": 1, "w4a4": 1},
}


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_measured_costs_come_from_a_table(graph, tmp_path, kind):
    lines = ["layer,w2a2,w4a4", *(f"{name},{row['w2a2']},{row['w4a4']}" for name, row in ROWS.items())]
    text = json.dumps(ROWS) if kind == "json" else "\n".join(lines)
    costs = bitplan.price(write(tmp_path, f"latency.{kind}", text), graph)
    assert costs.name == "latency"
    assert costs.rows == {"a": (6, 11), "b": (7, 8), "c": (1, 1)}
    assert costs.fixed == {"stem": 0, "head": 0}  # not measured, and outside the budget


@pytest.mark.parametrize(
    ("kind", "head", "unit"),
    [
        ("csv", "# unit: ns", "ns"),
        ("csv", "# measured on a phone\n#unit = µs", "us"),
        ("csv", "# Unit: cycles of the core", "cycles of the core"),
        ("csv", '"# unit: nJ",,', "nJ"),  # as a spreadsheet saves it
        ("csv", "# units are not said here", ""),
        ("json", {"# unit": "ns"}, "ns"),
        ("json", {"#": "measured on a phone", "#unit": "bytes"}, "bytes"),
        ("json", {}, ""),
    ],
)
def test_a_table_says_what_its_numbers_count(graph, tmp_path, kind, head, unit):
    lines = ["layer,w2a2,w4a4", *(f"{name},{row['w2a2']},{row['w4a4']}" for name, row in ROWS.items())]
    text = json.dumps(head | ROWS) if kind == "json" else "\n".join([head, *lines])
    costs = bitplan.price(write(tmp_path, f"latency.{kind}", text), graph)
    assert costs.unit == unit
    assert costs.rows == {"a": (6, 11), "b": (7, 8), "c": (1, 1)}
    assert bitplan.Costs.from_json(costs.to_json()) == costs


def test_fixed_layers_that_were_not_measured_are_named(graph, tmp_path):
    partial = bitplan.price(write(tmp_path, "l.json", json.dumps(ROWS | {"head": {"w8a8": 3}})), graph)
    assert (partial.fixed, partial.lacking) == ({"stem": 0, "head": 3}, ("stem",))
    assert bitplan.Costs.from_json(partial.to_json()) == partial
    assert bitplan.price("bmac", graph).lacking == ()


def test_a_function_may_have_no_number_for_fixed_layers_only(graph):
    costs = bitplan.price(lambda layer, precision: None if layer.fixed else 1, graph)
    assert costs.lacking == ("stem", "head")
    with pytest.raises(InputError, match="of b at w2a2 is None; a cost is a whole number ≥ 0"):
        bitplan.price(lambda layer, precision: None if layer.name == "b" else 1, graph)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer,w2a2,w4a4\na,1,2\nside,1,2\nb,1,2", "no cost for layer 'c'"),
        ("layer,w2a2\na,1\nside,1\nb,1\nc,1", "no cost for 'a' at w4a4, only at w2a2"),
        ("layer,w2a2,w4a4\na,1,\nside,1,2\nb,1,2\nc,1,2", "no cost for 'a' at w4a4, only at w2a2"),
        ("layer,w2a2,w4a4\na,1,2.5", "the cost of 'a' at w4a4 is 2.5; a cost is a whole number"),
        ("layer,w2a2,w4a4\na,1,-2", "a whole number ≥ 0"),
        ("layer,w2a2,w4a4\na,1,nan", "a whole number ≥ 0"),
        ("layer,w2a2,w4a4\na,1,fast", "'fast' for layer 'a' is not a number"),
        ("layer,w2a2,w4a4\na,1", "1 values for 2 columns"),
        ("layer,w2a2,fast\na,1,2", "column 'fast' is not a precision"),
        ("layer,w2a2,w4a4\na,1,2\na,1,2", "'a' appears twice"),
        ("layer,w2a2,w4a4\n", "no rows"),
        ("", "first line must name the columns"),
        ("layer,cost\na,1", "name a precision"),
    ],
)
def test_tables_that_cannot_be_used_are_refused(graph, tmp_path, text, words):
    with pytest.raises(FileError) as caught:
        bitplan.price(write(tmp_path, "t.csv", text), graph)
    assert words in str(caught.value)


def test_a_record_is_no_table(graph, tmp_path):
    with pytest.raises(FileError, match="this is a graph, where a latency is needed"):
        bitplan.price(write(tmp_path, "g.json", graph.to_json()), graph)


def test_a_cost_that_falls_as_bits_rise_is_warned_of_and_still_solved(graph, tmp_path, caplog):
    rows = ROWS | {"b": {"w2a2": 8, "w4a4": 7}}
    with caplog.at_level(logging.WARNING):
        costs = bitplan.price(write(tmp_path, "l.json", json.dumps(rows)), graph)
    assert "l of b falls from 8 at w2a2 to 7 at w4a4" in caplog.text
    plan = bitplan.select(graph, bitplan.estimate("uniform", None, graph), costs, budget=str(6 + 7 + 1))
    assert str(plan.precisions["b"]) == "w4a4"


def test_totals_add_up_all_layers(graph):
    plan = bitplan.Plan.uniform(graph, "w2a2")
    figures = total(plan, graph)
    assert figures.bops_without_ends == 4 * (100 + 300 + 60 + 80)
    assert figures.bops == figures.bops_without_ends + 64 * 60
    assert figures.compression == pytest.approx(32 * 160 / (2 * 140 + 8 * 20))
    short = plan.model_copy(update={"precisions": {}})
    with pytest.raises(InputError, match="no precision for layer 'stem'"):
        total(short, graph)


def test_energy_goes_through_both_tabulated_widths_and_rises_with_every_bit(graph):
    """Horowitz 2014: an 8-bit multiplication 0.2 pJ, a 32-bit one 3.1 pJ, an addition in 32 bits 0.1 pJ."""
    layer = next(layer for layer in graph.layers if layer.name == "b").model_copy(update={"weights": 0, "macs": 10**9})
    assert energy(layer, Precision.parse("w8a8")) == 300_000_000
    at_32 = 0.2 * (32 * 32 / 64) ** POWER
    assert at_32 == pytest.approx(3.1)
    each = [[mac_energy(Precision(weight_bits=w, act_bits=a)) for a in range(2, 17)] for w in range(2, 17)]
    for row in (*each, *zip(*each, strict=True)):
        assert list(row) == sorted(row), "more bits never cost less, and floats cost the most"
    assert each[2][-1] == each[-1][-1] == 1.5, "where one of both is left alone, both are multiplied as floats"


def test_energy_reads_every_weight_once_from_dram_but_no_embedding(graph):
    layer = next(layer for layer in graph.layers if layer.name == "b").model_copy(update={"weights": 64, "macs": 0})
    assert energy(layer, Precision.parse("w2a2")) == 2 * 1300
    assert energy(layer.model_copy(update={"kind": "embedding"}), Precision.parse("w8a8")) == 0


def test_a_plan_within_joules_by_the_energy_cost():
    model, example = bitplan.load_model("digits_resnet")
    graph = bitplan.trace(model, example, name="digits_resnet", rules=bitplan.Rules(narrow=0))
    costs = bitplan.price("energy", graph)
    assert costs.unit == "pJ"
    low, high = (sum(row[at] for row in costs.rows.values()) + sum(costs.fixed.values()) for at in (0, 1))
    gains = bitplan.estimate("uniform", None, graph)
    plan = bitplan.select(graph, gains, costs, budget=f"{(low + high) / 2 / 1e3:.3f}nJ")
    spent = sum(energy(layer, plan.precisions[layer.name]) for layer in graph.layers)
    assert low < spent <= (low + high) / 2
