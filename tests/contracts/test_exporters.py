"""The contract of exporters on random small networks and plans, and what each target of ours is known to hold."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bitplan
from bitplan.core.errors import InputError
from bitplan.core.registry import EXPORTERS
from bitplan.testing.exporters import check_file
from bitplan.testing.networks import blocks

PRECISIONS = ["w2a2", "w4a4", "w3a3", "w8a8", "w4a16", "w2a8"]
HOLDS = {
    "compressed-tensors": (range(2, 9), (8, 16)),
    "torchao": (range(2, 9), (8, 16)),
    "mlx": ((2, 3, 4, 5, 6, 8), (16,)),
    "llama.cpp": ((4, 5, 8), (16,)),  # k-quants want rows of 256
    "matmulnbits": (range(2, 16), (16,)),
}
"""Bits of weights and of inputs that an exporter which widens has for these networks' linear layers."""
OF_TRANSFORMERS = {"gguf", "vllm"}
"""They take networks of transformers' alone, which tests/plugins/llm/test_files_of_language_models.py gives them."""


@st.composite
def quantized(draw):
    kinds = draw(st.lists(st.sampled_from(["plain", "wide", "each"]), min_size=1, max_size=3))
    precisions = draw(st.lists(st.sampled_from(PRECISIONS), min_size=5, max_size=5))
    return blocks(kinds, precisions, flat=draw(st.booleans()), per_channel=draw(st.booleans()))


def unheld(name, plan, graph):
    """The layers that a target of ours does not have; those of a link count together, but here they are equal."""
    weights, inputs = HOLDS[name]
    kinds = {layer.name: layer.kind for layer in graph.layers}
    known = ("linear", "conv2d") if name == "matmulnbits" else ("linear",)
    return {
        layer
        for layer, planned in plan.precisions.items()
        if kinds[layer] not in known or planned.weight_bits not in weights or planned.act_bits not in inputs
    }


@pytest.mark.parametrize("name", list(EXPORTERS))
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(made=quantized())
def test_what_was_written_reads_back_equal(tmp_path, name, made):
    exporter, plan = EXPORTERS.get(name)(), bitplan.plan_of(made.model)
    for path in tmp_path.iterdir():
        path.unlink()
    wider = check_file(exporter, made, tmp_path / "file")
    if wider is None:  # there is nothing in the plan that a recipe could say
        assert name in OF_TRANSFORMERS or not exporter.needs_model
        assert name not in HOLDS or unheld(name, plan, made.graph) == plan.precisions.keys()
        assert not (tmp_path / "file").exists()
        return
    assert name not in OF_TRANSFORMERS
    if name in HOLDS:
        assert wider == unheld(name, plan, made.graph)
    source = made.model if exporter.needs_model else plan
    with pytest.raises(InputError, match="exists"):
        bitplan.export(source, tmp_path / "file", exporter, graph=made.graph, example=made.example)


def test_of_our_own_exporters_it_is_said_what_they_hold():
    own = {name: EXPORTERS.get(name) for name in EXPORTERS if EXPORTERS.get(name).__module__.startswith("bitplan.")}
    assert HOLDS.keys() | OF_TRANSFORMERS == {
        name for name, one in own.items() if "widen" in {f.name for f in dataclasses.fields(one)}
    }
