"""The contract of quantizers: one broken quantizer for each clause there is."""

from pathlib import Path

import broken_quantizers
import pytest
from clauses import assert_said_in_one_line, untried

import bitplan.testing

BROKEN = broken_quantizers.BROKEN


@pytest.mark.parametrize(("clause", "try_it"), BROKEN, ids=[clause for clause, _ in BROKEN])
def test_the_clause_is_said_in_one_line(clause, try_it):
    assert_said_in_one_line(clause, try_it)


def test_every_clause_has_a_broken_entry():
    assert untried([Path(bitplan.testing.__file__).with_name("quantizers.py")], [broken_quantizers]) == []


def test_what_is_right_passes():
    broken_quantizers.right()
