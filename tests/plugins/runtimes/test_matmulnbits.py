"""matmulnbits: weights in blocks of 4 bits, with the same codes and answers."""

import onnx
import pytest
import torch
from networks import IDS, Words, assert_holds_the_codes, batch_like, made
from torch import nn

import bitplan
from bitplan.core.errors import InputError
from bitplan.plugins.runtimes.matmulnbits import MatMulNBits


class Deep(nn.Module):
    """A linear layer, one whose weight is (in, out), one of a size that fills no block, an embedding."""

    def __init__(self):
        super().__init__()
        self.words = Words()
        self.odd = nn.Linear(4, 40)
        self.turned = nn.Parameter(torch.randn(40, 24) / 6)

    def forward(self, ids):
        return torch.matmul(self.odd(self.words(ids)).relu(), self.turned)


@pytest.mark.parametrize("per_channel", [False, True])
def test_weight_only_products_keep_the_codes_and_the_answers(tmp_path, per_channel):
    precisions = {"words.linear": "w2a16", "words.head": "w3a16", "odd": "w8a16"}
    model = made(Deep(), IDS, precisions, per_channel=per_channel)
    with pytest.raises(InputError, match=r"quantizes the input of .* choose w…a16, or give --widen"):
        bitplan.export(model, tmp_path / "n.onnx", "matmulnbits", example=IDS)
    path = bitplan.export(model, tmp_path / "n.onnx", "matmulnbits", example=IDS, widen=True, block_size=16)
    assert_holds_the_codes(MatMulNBits(), path, model, inputs=False)
    assert "MatMulNBits" in {node.op_type for node in onnx.load(path).graph.node}
    verdict = bitplan.verify(path, model, [batch_like(IDS, 6)])
    assert verdict.passed
    assert verdict.close == 6


@pytest.mark.parametrize("options", [{"block_size": 24}, {"block_size": 8}, {"accuracy_level": 9}])
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(InputError, match="not"):
        MatMulNBits(**options)
