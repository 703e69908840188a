"""Of random networks, what a plan says is what runs: counted by an interpreter that knows nothing of our proofs."""

import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_networks import BLOCKS, TOKENS, WIDTH, Interpreter, Random

import bitplan

FREE = bitplan.Rules(first=None, last=None, narrow=0, embeddings=None, products="w3a3")
SLOW = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.generate],  # networks are small as drawn, and a smaller one takes minutes to find
)


@st.composite
def networks(draw):
    kinds = draw(st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=4))
    shortcuts = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    options = (tuple(kinds), tuple(shortcuts), draw(st.booleans()), draw(st.integers(0, 99)))
    bits = draw(st.lists(st.sampled_from(["w2a4", "w3a3", "w4a2", "w4a4", "w3a16", "w16a16"]), min_size=3, max_size=7))
    return options, bits


def made(options, bits):
    """A quantized network, groups at precisions in turn, and an input for it."""
    model = Random(*options).eval()
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(options[-1]))
    graph = bitplan.trace(model, x, rules=FREE)
    plan = bitplan.Plan.uniform(graph, "w3a3")
    precisions = dict(plan.precisions)
    for place, group in enumerate(graph.selectable):
        precisions |= {layer.name: bitplan.Precision.parse(bits[place % len(bits)]) for layer in group.layers}
    plan = plan.model_copy(update={"precisions": precisions})
    quantized = bitplan.quantize(model, plan)
    if any(precision.quantizes_inputs for precision in precisions.values()):
        bitplan.calibrate_(quantized, [x, x * 1.3])
    quantized.eval()
    with torch.no_grad():
        quantized(x)  # the first run is proven
    return quantized, x


@pytest.mark.parametrize("kind", sorted(BLOCKS))
def test_every_kind_of_block_is_executed_as_planned(kind):
    check_executed(*made(((kind,), (False,), False, 1), ["w3a3"]))


@given(networks())
@SLOW
def test_the_plan_is_what_an_interpreter_sees_executed(drawn):
    check_executed(*made(*drawn))


def check_executed(model, x):
    plan = bitplan.plan_of(model)
    seen = Interpreter(model, plan)
    with torch.no_grad(), seen:
        model(x)
    planned = {name for name, precision in plan.precisions.items() if not precision.left_alone}
    assert {name for name, count in seen.executed.items() if count} == planned
    if len(planned) == len(plan.precisions):  # where a layer is left alone its products are on no grid
        assert not seen.unexplained
    proof = bitplan.prove(model, x)
    assert not proof.in_float
    assert {name for name, count in proof.quantized.items() if count} == planned


@given(networks())
@settings(SLOW, max_examples=12)
def test_packed_and_onnx_files_compute_what_the_network_does(tmp_path_factory, drawn):
    model, x = made(*drawn)
    folder = tmp_path_factory.mktemp("files")
    with torch.no_grad():
        expected = model(x)
    packed = bitplan.export(model, folder / "net.packed", "packed")
    again = bitplan.load_packed(packed, Random(*drawn[0])).eval()
    with torch.no_grad():
        assert torch.equal(again(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = bitplan.export(model, folder / "net.onnx", "onnx", example=x)
    verdict = bitplan.verify(path, model, [x])
    assert verdict.codes_equal
    assert verdict.close + verdict.ties == verdict.samples, verdict  # two equal answers have no largest
