"""The energy of computing and of reading weights, by a published table: for comparison, not for a particular chip.

Horowitz, *Computing's energy problem*, ISSCC 2014, for 45 nm at 0.9 V, in picojoules (read where others reproduce it):

integers   8 bits: multiply 0.2, add 0.03        floats   16 bits: multiply 1.1, add 0.4
           32 bits: multiply 3.1, add 0.1                 32 bits: multiply 3.7, add 0.9
memory     64 bits from DRAM: 1,300 to 2,600; from a cache of 8 kB: 10, of 32 kB: 20, of 1 MB: 100

What lies between, and below, is ours. A multiplier has about w·a full adders, so its energy is taken as a power of the
product of both bits, through both tabulated points: 0.2·(w·a/64)^0.989 pJ. For 2 and 4 bits that is an extrapolation.
"""

from __future__ import annotations

import math

from bitplan.core.precision import Precision
from bitplan.core.records import Layer
from bitplan.costs.base import measured_in

MULTIPLY_8, MULTIPLY_32 = 0.2, 3.1
ADD_32 = 0.1
"""Products are added up in 32 bits, whatever their own."""
FLOAT_MULTIPLY, FLOAT_ADD = 1.1, 0.4
"""Of 16 bits: where weights or inputs are left alone, both are multiplied as floats."""
READ_BIT = 1300 / 64
"""Of a weight's bit from DRAM, by the lower figure."""
POWER = math.log(MULTIPLY_32 / MULTIPLY_8) / math.log(32 * 32 / (8 * 8))
"""Of the product of both bits, by which multiplications grow."""


@measured_in("pJ")
def energy(layer: Layer, precision: Precision) -> int:
    """MACs · (one multiplication + one addition), and every weight read once from DRAM for the example.

    Activations are not in it: where they are kept differs most between chips, and a graph does not know their sizes.
    Neither are the few rows that an embedding reads.
    """
    read = 0.0 if layer.kind == "embedding" else layer.weights * precision.weight_bits * READ_BIT
    return round(layer.macs * mac(precision) + read)


def mac(precision: Precision) -> float:
    """One multiplication and one addition, in picojoules."""
    if not (precision.quantizes_weights and precision.quantizes_inputs):
        return FLOAT_MULTIPLY + FLOAT_ADD
    return MULTIPLY_8 * math.pow(precision.weight_bits * precision.act_bits / 64, POWER) + ADD_32
