"`bitplan run data`: what is there, what is missing, and where it is to be had."

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from bitplan.cli.app import app
from bitplan.core.registry import TASKS
from bitplan.tasks.data_check import PUBLISHED, check_data


def run(*words):
    return CliRunner().invoke(app, ["run", "data", *map(str, words)])


@pytest.fixture
def cifar(tmp_path):
    """The training part of a small CIFAR-10 as published."""
    for number in range(1, 6):
        content = {b"data": np.zeros((4, 3072), np.uint8), b"labels": [0, 1, 2, 3]}
        (tmp_path / f"data_batch_{number}").write_bytes(pickle.dumps(content, protocol=2))
    return tmp_path


def test_what_is_whole_is_counted():
    found = run("digits")
    assert found.exit_code == 0
    assert found.output.splitlines() == ["train: 1,437 samples", "test: 360 samples"]


def test_each_split_is_looked_for_by_itself(cifar):
    found = run("cifar10", cifar)
    assert found.exit_code == 1
    train, test = found.output.splitlines()
    assert train == "train: 20 samples of the 50,000 published"
    assert re.match(r"test: .*test_batch", test)


def test_what_is_missing_says_where_it_is_to_be_had(tmp_path):
    found = run("squad", tmp_path, "--json")
    assert found.exit_code == 1
    told = json.loads(found.output)
    assert [one["split"] for one in told] == ["train", "test"]
    assert all("download https://" in one["missing"] for one in told)


def test_bad_input_is_one_line():
    from bitplan.core.errors import UnknownName

    assert isinstance(run("cifar11").exception, UnknownName)
    assert "unknown option of" in str(run("digits", "here").exception)


def test_the_page_has_every_task_and_its_numbers():
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    for name in TASKS:
        row = re.search(rf"^\| `{name}`.*$", page, re.MULTILINE)
        assert row, f"docs/data.md has no row of {name}"
        assert all(f"{count:,}" in row[0] for count in PUBLISHED.get(name, {}).values())
    assert [str(one) for one in check_data("digits")] == re.findall(r"^(?:train|test): .*samples$", page, re.MULTILINE)
