"""A contract that is broken says in one line which clause it is: one broken entry for each clause there is."""

import ast
import math
import re
from pathlib import Path

import broken_engines
import broken_exporters
import broken_gains
import broken_layers
import broken_models
import broken_quantizers
import broken_relaxations
import broken_searches
import broken_selectors
import broken_tasks
import pytest

import bitplan.testing
from bitplan.testing import BrokenContract, NeedsMore, check_gain, check_model, check_task
from bitplan.testing.contract import Contract

ROOMS = (
    broken_gains, broken_searches, broken_selectors, broken_models, broken_tasks, broken_exporters, broken_engines,
    broken_layers, broken_quantizers, broken_relaxations,
)  # fmt: skip
BROKEN = [(clause, try_it) for room in ROOMS for clause, try_it in room.BROKEN]


@pytest.mark.parametrize(("clause", "try_it"), BROKEN, ids=[clause for clause, _ in BROKEN])
def test_the_clause_is_said_in_one_line(clause, try_it):
    with pytest.raises(BrokenContract) as caught:
        try_it()
    said = str(caught.value)
    assert re.fullmatch(rf"[a-z ]+ \S+ breaks its contract: {re.escape(clause)}( \(.+\))?", said), said
    assert "\n" not in said


def clauses():
    """Every clause in the source, as far as it is written there: parts that are filled in are left open."""
    for path in Path(bitplan.testing.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                written = node.args[0] if node.func.attr in ("clause", "works") else None
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                written = node.value if node.targets[0].id == "clause" else None
            else:
                continue
            if isinstance(written, ast.Constant):
                yield re.escape(written.value)
            elif isinstance(written, ast.JoinedStr):
                yield "".join(re.escape(p.value) if isinstance(p, ast.Constant) else ".+" for p in written.values)


def test_every_clause_has_a_broken_entry():
    tried = {clause for clause, _ in BROKEN}
    missing = [clause for clause in sorted(set(clauses())) if not any(re.fullmatch(clause, one) for one in tried)]
    assert missing == []


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
