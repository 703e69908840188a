"""What a proof sees that names alone do not tell."""

import torch
from torch import nn

import bitplan
from nets import Net


def test_rows_looked_up_by_constants_are_seen_to_be_quantized():
    model = Net(
        lambda self, words: self.head(self.words(words) + self.places(self.ids[:, : words.shape[1]])),
        words=nn.Embedding(20, 16),
        places=nn.Embedding(8, 16),
        head=nn.Linear(16, 4),
    )
    model.register_buffer("ids", torch.arange(8)[None])
    words = torch.randint(0, 20, (2, 5))
    graph = bitplan.trace(model, words, rules=bitplan.Rules(narrow=0))
    quantized = bitplan.quantize(model, bitplan.Plan.uniform(graph, "w4a4"))
    proof = bitplan.prove(quantized, words)
    assert proof.quantized == {"words": 1, "places": 1, "head": 1}
    assert proof.in_float == {}
    bitplan.calibrate_(quantized, [words])
