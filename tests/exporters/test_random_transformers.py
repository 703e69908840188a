"""Random small transformers and plans through every form: files and the integer copy answer as the network does."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from networks import batch_like
from torch import nn

import bitplan
from bitplan.core.registry import EXPORTERS

WIDTH, TOKENS, VOCABULARY, SAMPLES = 16, 5, 2, 20  # `batch_like` draws words from two
FREE = bitplan.Rules(first=None, last=None, narrow=0, embeddings="w4a8", products="w8a8")
FORMS = {  # those of plugins where there are any
    "onnx": {"to": "onnx"},
    "narrow types": {"to": "onnx", "kernels": "float"},
    "older": {"to": "onnx", "opset": 21},
    **{to: {"to": to} for to in ("openvino",) if to in EXPORTERS},
}
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
ACTIVATIONS = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": lambda x: F.gelu(x, approximate="tanh")}


class Attention(nn.Module):
    """Attention as people write it: packed or apart, torch's function, products, or torch's module."""

    def __init__(self, kind, heads, bias):
        super().__init__()
        self.kind, self.heads = kind, heads
        if kind == "module":
            self.attend = nn.MultiheadAttention(WIDTH, heads, bias=bias, batch_first=True)
        else:
            self.packed, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        if self.kind == "module":
            return self.attend(x, x, x, need_weights=False)[0]
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.packed(x).chunk(3, -1))
        if self.kind == "function":
            mixed = F.scaled_dot_product_attention(q, k, v)
        elif self.kind == "causal":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two layers, each on a way around it, norms before or after."""

    def __init__(self, kind, heads, bias, norm, activation, before):
        super().__init__()
        self.attention, self.before, self.activation = Attention(kind, heads, bias), before, ACTIVATIONS[activation]
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=bias), nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.norms = nn.ModuleList(NORMS[norm](WIDTH) for _ in range(2))

    def forward(self, x):
        for norm, part in zip(self.norms, (self.attention, self.fed), strict=True):
            x = x + part(norm(x)) if self.before else norm(x + part(x))
        return x

    def fed(self, x):
        return self.down(self.activation(self.up(x)))


class Transformer(nn.Module):
    """Words or patches, some blocks, and a head on the mean or on every token."""

    def __init__(self, reads, blocks, pooled):
        super().__init__()
        self.enter = nn.Embedding(VOCABULARY, WIDTH) if reads == "words" else nn.Conv2d(3, WIDTH, 2, stride=2)
        self.reads, self.pooled = reads, pooled
        self.blocks = nn.Sequential(*(Block(**block) for block in blocks))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x):
        x = self.enter(x) if self.reads == "words" else self.enter(x).flatten(2).mT
        x = self.blocks(x)
        return self.head(x.mean(1) if self.pooled else x)


@st.composite
def transformers(draw):
    """How a network is built, and one precision after the other for its groups."""
    blocks = [
        {
            "kind": draw(st.sampled_from(["module", "function", "causal", "products"])),
            "heads": draw(st.sampled_from([1, 2, 4])),
            "bias": draw(st.booleans()),
            "norm": draw(st.sampled_from(sorted(NORMS))),
            "activation": draw(st.sampled_from(sorted(ACTIVATIONS))),
            "before": draw(st.booleans()),
        }
        for _ in range(draw(st.integers(1, 2)))
    ]
    network = {"reads": draw(st.sampled_from(["words", "patches"])), "blocks": blocks, "pooled": draw(st.booleans())}
    bits = st.builds("w{}a{}".format, st.integers(2, 8), st.integers(2, 8))
    kind = {"per_channel": draw(st.booleans()), "integer": draw(st.booleans())}
    return network, draw(st.lists(bits, min_size=3, max_size=6)), kind, draw(st.integers(0, 99))


def quantized(network, precisions, kind, seed):
    """The network by a plan that gives its groups these precisions in turn, calibrated, and data for it."""
    torch.manual_seed(seed)
    model = Transformer(**network).eval()
    words = torch.zeros(1, TOKENS, dtype=torch.long)
    example = words if network["reads"] == "words" else torch.empty(1, 3, 4, 4)
    graph = bitplan.trace(model, example, rules=FREE)
    plan = bitplan.Plan.uniform(graph, "w4a4")
    chosen = {
        layer.name: bitplan.Precision.parse(precisions[place % len(precisions)])
        for place, group in enumerate(graph.selectable)
        for layer in group.layers
    }
    made = bitplan.quantize(model, plan.model_copy(update={"precisions": plan.precisions | chosen}), **kind).eval()
    bitplan.calibrate_(made, [batch_like(example, 8, seed=seed)])
    return made, example, batch_like(example, SAMPLES, seed=seed + 1)


SLOW = settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.generate],
)


@pytest.mark.parametrize("form", FORMS)
@SLOW
@given(drawn=transformers())
def test_files_of_random_transformers_answer_as_the_network_does(tmp_path, form, drawn):
    model, example, batch = quantized(*drawn)
    path = bitplan.export(model, tmp_path / "net.onnx", example=example, force=True, **FORMS[form])
    verdict = bitplan.verify(path, model, [batch])
    assert verdict.codes_equal
    assert not verdict.unexplained
    assert verdict.close + verdict.ties == SAMPLES, verdict
    assert verdict.close >= SAMPLES // 2, verdict  # ties are rare in networks so small
