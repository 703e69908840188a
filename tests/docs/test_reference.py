"""Every public name is in the reference, once, and on its first page."""

import ast
import re
from importlib.metadata import entry_points

import pytest
from pages import ROOT

import bitplan
import bitplan.testing
from bitplan.plugins import integer

TRAINERS = ("plugins.trainers.transformers", "plugins.trainers.lightning")
REFERENCE = sorted((ROOT / "docs" / "api").glob("*.md"))
SHOWN = [name for page in REFERENCE for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]


def defined(module):
    """The public functions and classes of a file."""
    tree = ast.parse((ROOT / "src" / "bitplan" / f"{module.replace('.', '/')}.py").read_text())
    kinds = ast.FunctionDef | ast.ClassDef
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


PUBLIC = [
    *(f"bitplan.{name}" for name in bitplan.__all__),
    *(f"bitplan.testing.{name}" for name in bitplan.testing.__all__),
    *(f"bitplan.{module}.{name}" for module in TRAINERS for name in defined(module)),
    *(point.value.replace(":", ".") for point in entry_points(group="bitplan.contracts")),
    "bitplan.plugins.runtimes.latency.measure",
    "bitplan.core.latencies.Latency",
    "bitplan.plugins.ptq.blockwise_tuning.tune_",
    *(f"bitplan.plugins.integer.{name}" for name in integer.__all__),
]


def test_the_reference_has_every_public_name_once():
    assert sorted(SHOWN) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_first_page_leads_to_it(name):
    assert f"[`{name.rpartition('.')[2]}`][{name}]" in (ROOT / "docs" / "api" / "index.md").read_text()
