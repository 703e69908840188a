"""Without its data a study ends in one line: which public file, and where to put it."""

from pathlib import Path

import pytest

STUDIES = Path(__file__).parents[3] / "studies"
OWN = ("digits", "stories")  # those need nothing, and this names code of its own, which comes first
NEED = sorted(path for path in STUDIES.glob("*.toml") if not any(name in path.stem for name in OWN))
assert len(NEED) >= 8


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """The folder of data, in which there is nothing."""
    monkeypatch.setenv("BITPLAN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("BITPLAN_START", str(tmp_path / "w4a4"))
    monkeypatch.setenv("BITPLAN_MINILM", str(tmp_path / "minilm"))
    return tmp_path


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=["sweep", "dry-run"])
@pytest.mark.parametrize("path", NEED, ids=lambda path: path.stem)
def test_one_line_names_the_public_file_and_its_place(run, empty, path, options):
    code, out, err = run("sweep", path, "--run", empty / "run", *options)
    assert (code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert err.splitlines()[-1] == line
    assert "https://" in line
    assert str(empty) in line


def test_a_start_that_has_to_be_made_says_from_what(run, empty):
    _, _, err = run("sweep", STUDIES / "cifar_methods.toml", "--run", empty / "run")
    assert f"the start's checkpoint {empty}/w4a4: No such file or directory; make it from https://github.com/" in err
    assert f"resnet20-12fca82f.th in {empty}/data/weights with the commands at the top of" in err
