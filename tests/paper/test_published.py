"""What others published, as data: as the paper prints it, and equal to what follows from structure alone."""

import pytest

import bitplan
from bitplan.cli.runs import _trace_structure
from bitplan.core.errors import RecordError
from bitplan.reports.published import Literature, derive_figures, list_networks, literature, select_figures

# As the paper's tables print them: the drop, then compression and GBOPs, or compression alone.
TABLE_1 = {
    "ALPS": (-0.22, 10.31, 34), "EAGL": (-0.17, 10.31, 34), "HAQ": (0.67, 10.57, 520),
    "Chen et al. 2021": (0.85, 12.24, None), "HAWQ-v3": (0.99, None, 154), "HAWQ-v2": (1.63, 12.24, None),
    "HAWQ": (1.91, 12.28, None), "AutoQ": (2.29, 10.26, None), "SSPS": (0.93, 8.00, None),
    "BP-NAS": (1.85, 11.03, None), "OMPQ": (1.52, None, 141), "PACT": (0.20, None, 101),
    "RVQuant": (0.32, None, 101), "LQ-Nets": (1.32, None, 486),
}  # fmt: skip
TABLE_2 = {
    ("EAGL", "2 and 4"): (-0.09, 8.40), ("ALPS", "2 and 4"): (-0.06, 8.74), ("TernaryBERT", "2"): (1.02, 14.90),
    ("Q8BERT", "6"): (3.21, 5.20), ("Q8BERT", "4"): (64.87, 8.00), ("KDLSQ-BERT", "4"): (-0.52, 7.70),
    ("KDLSQ-BERT", "2"): (0.24, 14.90), ("Wang et al. 2022", "8"): (0.34, 4.00),
    ("Wang et al. 2022", "4"): (0.83, 8.00),
}  # fmt: skip


@pytest.fixture(scope="module")
def traced():
    return {name: _trace_structure(name) for name in list_networks(select_figures(None))}


def of_table(number):
    return [row for row in literature().figures if row.known == "paper" and row.source.startswith(f"table {number}")]


def test_every_method_of_both_tables_is_there_with_its_figures():
    assert {row.method: (round(row.drop, 2), row.compression, row.gbops) for row in of_table(1)} == TABLE_1
    assert {(row.method, row.weights): (round(row.drop, 2), row.compression) for row in of_table(2)} == TABLE_2
    assert len(of_table(1)) == 14
    assert len(of_table(2)) == 9


def unit_of_last_digit(published):
    """Of what is published in whole numbers 1, with one decimal 0.1 …: rounded or cut off, a figure is as near."""
    return 10.0 ** -len(f"{published:.10g}".partition(".")[2])


@pytest.mark.parametrize("row", literature().figures, ids=lambda row: f"{row.method} {row.network} {row.weights}")
def test_it_follows_from_structure_or_the_reason_is_said(row, traced):
    found = derive_figures(row.structure, traced[row.structure.network]) if row.structure else None
    for published, by_structure in (
        (row.gbops, found and found.gbops),
        (row.compression, found and found.compression),
    ):
        if published is None:
            continue
        follows = by_structure is not None and abs(by_structure - published) < unit_of_last_digit(published)
        if not follows:
            assert row.why, "neither does it follow, nor is it said why"
    if row.why == "hawq":
        assert found.gbops == pytest.approx(156.9, abs=0.05)
        one_more = next(layer for layer in traced["resnet50_v1"].graph.layers if layer.name == "layer3.5.conv3")
        assert round(found.gbops - one_more.macs * (64 - 16) / 1e9) == 154


def test_the_two_costs_that_identify_the_network(traced):
    """5/5 and 4/32 bits with the ends at 8: 101.1 and 486.1 of v1; torchvision's v1.5 gives neither."""
    v1, later = traced["resnet50_v1"], traced["resnet50"]
    assert sum(layer.macs for layer in v1.graph.layers) == 3_857_973_248
    by_method = {row.method: row.structure for row in of_table(1)}
    for method, published, exact in (("PACT", 101, 101.1), ("LQ-Nets", 486, 486.1)):
        assert derive_figures(by_method[method], v1).gbops == pytest.approx(exact, abs=0.05)
        assert abs(derive_figures(by_method[method], later).gbops - published) > 5


def test_v1_has_the_weights_of_torchvision_and_its_stride_in_the_first_convolution(traced):
    model, example = bitplan.load_model("resnet50_v1", weightless=True)
    plain, _ = bitplan.load_model("resnet50", weightless=True)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    assert model.layer2[0].conv1.stride == (2, 2)
    assert model.layer2[0].conv2.stride == (1, 1)
    assert model.conv1.stride == (2, 2)
    assert model(example).shape == (1, 1000)


def test_the_encoders_lattice_misses_both_compressions(traced):
    """8.40 and 8.74: every set of lowered BERT groups is a multiple of 768² weights, and none gives them."""
    graph = traced["bert-base"].graph
    unit, encoder = 768**2, sum(group.weights for group in graph.selectable)
    assert all(group.weights % unit == 0 for group in graph.selectable)
    reached = [32 * encoder / (4 * encoder - 2 * unit * lowered) for lowered in range(encoder // unit + 1)]
    near = {target: sorted(reached, key=lambda one: abs(one - target))[:2] for target in (8.40, 8.74)}
    assert {target: sorted(round(one, 2) for one in two) for target, two in near.items()} == {
        8.40: [8.38, 8.41], 8.74: [8.73, 8.76],
    }  # fmt: skip
    fixed = sum(layer.weights * layer.fixed.weight_bits for layer in graph.layers if layer.fixed)
    whole = sum(layer.weights for layer in graph.layers)
    ours = {round(32 * whole / (4 * encoder - 2 * unit * lowered + fixed), 2) for lowered in range(145)}
    assert 8.74 in ours, "with embeddings and ends at 8 bits, as bitplan counts, one of both is reached"
    assert 8.40 not in ours


def test_a_reason_that_is_not_there_is_refused():
    row = literature().figures[0].model_copy(update={"why": "nonsense"})
    with pytest.raises(RecordError, match="ALPS: there is no reason 'nonsense'"):
        Literature(reasons={}, figures=(row,), times=())
