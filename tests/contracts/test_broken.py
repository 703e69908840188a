"""A contract that is broken says in one line which clause it is: one broken entry for each clause there is."""

import math
from pathlib import Path

import broken_engines
import broken_exporters
import broken_gains
import broken_layers
import broken_models
import broken_selectors
import broken_tasks
import pytest
from clauses import assert_said_in_one_line, untried

import bitplan.testing
from bitplan.testing import BrokenContract, NeedsMore, check_gain, check_model, check_task
from bitplan.testing.contract import Contract

ROOMS = (
    broken_gains, broken_selectors, broken_models, broken_tasks, broken_exporters, broken_engines,
    broken_layers,
)  # fmt: skip
BROKEN = [(clause, try_it) for room in ROOMS for clause, try_it in room.BROKEN]


@pytest.mark.parametrize(("clause", "try_it"), BROKEN, ids=[clause for clause, _ in BROKEN])
def test_the_clause_is_said_in_one_line(clause, try_it):
    assert_said_in_one_line(clause, try_it)


def test_every_clause_has_a_broken_entry():
    paths = Path(bitplan.testing.__file__).parent.glob("*.py")
    assert untried([path for path in paths if path.stem != "quantizers"], ROOMS) == []  # tests/plugins/quantizers


def test_what_only_the_author_can_give_is_asked_for():
    with pytest.raises(NeedsMore, match=r"is no classification of tensors: check_task\(task, model=…\)"):
        check_task(broken_tasks.Pairs())
    with pytest.raises(NeedsMore, match=r"gives no example of its input: check_model\(factory, example=…\)"):
        check_model(broken_models.alone)
    check_model(broken_models.alone, example=broken_models.EXAMPLE)
    check_task(broken_tasks.Pairs(), model=broken_tasks.both())


def test_a_long_and_torn_finding_is_one_line():
    with pytest.raises(BrokenContract) as caught:
        Contract("gain mine").clause("it is short", False, "x\n" * 1000)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_what_is_right_passes():
    for room in ROOMS:
        room.right()
    with pytest.raises(BrokenContract, match="every value is a finite number"):
        check_gain(broken_gains.valued(lambda layer, choices: (0.0, *[math.nan] * (len(choices) - 1))))
