"""The clauses of contracts, as they are written in their source, and how one that does not hold is said."""

import ast
import re

import pytest

from bitplan.testing import BrokenContract


def clauses(paths):
    """Every clause in the source, as far as it is written there: parts that are filled in are left open."""
    for path in paths:
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


def assert_said_in_one_line(clause, try_it):
    with pytest.raises(BrokenContract) as caught:
        try_it()
    said = str(caught.value)
    assert re.fullmatch(rf"[a-z ]+ \S+ breaks its contract: {re.escape(clause)}( \(.+\))?", said), said
    assert "\n" not in said


def untried(paths, rooms):
    """Return the clauses in these files that nothing in these modules breaks."""
    tried = {clause for room in rooms for clause, _ in room.BROKEN}
    return [clause for clause in sorted(set(clauses(paths))) if not any(re.fullmatch(clause, one) for one in tried)]
