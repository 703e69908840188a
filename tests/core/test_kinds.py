"""No kind of record can be forgotten: those in the files of core/ are those that `validate` knows."""

import ast
import subprocess
import sys
from pathlib import Path

import bitplan.core
from bitplan.store.record_types import HOMES, KINDS

SOURCES = sorted(Path(bitplan.core.__file__).parents[1].rglob("*.py"))


def record_classes():
    """Every class of the package that derives from Record, directly or not, by reading the files: {class: file}."""
    bases = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = ({base.id for base in node.bases if isinstance(base, ast.Name)}, path)
    records = {"Record"}
    while grown := {name for name, (above, _) in bases.items() if above & records} - records:
        records |= grown
    return {name: bases[name][1] for name in records - {"Record"} if not name.startswith("_")}


def test_every_kind_is_listed():
    found = record_classes()
    assert {kind.__name__ for kind in KINDS.values()} == set(found)
    assert {Path(home.__file__) for home in HOMES} == set(found.values())


def test_one_import_makes_all_of_them_known():
    code = "import bitplan.store.record_types, bitplan.core.record as r; print(' '.join(sorted(r.Record.kinds)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == set(KINDS)
    assert {"verdict", "probes", "powers", "probed", "eigenvalues", "checkpoint"} <= set(KINDS)
