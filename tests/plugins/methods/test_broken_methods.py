"""The contracts that the plugin brings: one broken entry for each clause there is."""

from pathlib import Path

import broken_relaxations
import broken_searches
import pytest
from clauses import assert_said_in_one_line, untried

from bitplan.plugins import methods

ROOMS = broken_searches, broken_relaxations
BROKEN = [(clause, try_it) for room in ROOMS for clause, try_it in room.BROKEN]


@pytest.mark.parametrize(("clause", "try_it"), BROKEN, ids=[clause for clause, _ in BROKEN])
def test_the_clause_is_said_in_one_line(clause, try_it):
    assert_said_in_one_line(clause, try_it)


def test_every_clause_has_a_broken_entry():
    assert untried(Path(methods.__file__).parent.rglob("contract.py"), ROOMS) == []


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_right_passes(room):
    room.right()
