"""Integer copies of random transformers, drawn as for exporters."""

import torch
from hypothesis import given, settings
from test_random_transformers import SAMPLES, SLOW, quantized, transformers

from bitplan.plugins.integer import integer


@settings(SLOW, max_examples=25)
@given(drawn=transformers())
def test_integer_copies_of_random_transformers_answer_as_the_network_does(drawn):
    model, _, batch = quantized(*drawn)
    with torch.no_grad():
        expected, found = model(batch), integer(model)(batch)
    error = (expected - found).abs().flatten(1).amax(1) / expected.abs().max()
    assert int((error > 1e-4).sum()) <= SAMPLES // 4  # of these, values between two codes
