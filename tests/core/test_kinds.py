"""No kind of record can be forgotten: those in the files of core/ are those that `validate` knows."""

import ast
import subprocess
import sys
from pathlib import Path

import bitplan.core
from bitplan.core.record import Record, import_all_kinds

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
    import_all_kinds()
    in_package = {kind.__name__ for kind in Record.kinds.values() if kind.__module__.startswith("bitplan.")}
    assert in_package == set(record_classes())


def test_one_import_makes_all_of_them_known():
    code = "import bitplan.core.record as r; r.import_all_kinds(); print(' '.join(sorted(r.Record.kinds)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {name.lower() for name in record_classes()}
    assert {"verdict", "job", "outcome", "checkpoint"} <= set(done.stdout.split())
