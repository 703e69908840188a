"""A small study in a file, and one run of it that tests only read."""

from pathlib import Path

import pytest
from tiny import STUDY

from bitplan.study.spec import read_study
from bitplan.study.sweep import sweep

BESIDE_THE_NETWORK = Path(__file__).parent


@pytest.fixture(autouse=True)
def beside_the_network(monkeypatch):
    """`tiny:network` is found from here, also by processes that are started."""
    monkeypatch.chdir(BESIDE_THE_NETWORK)


@pytest.fixture
def write(tmp_path):
    """Write a study, changed by replacing texts; gives its path."""

    def make(*changes, name="study.toml"):
        text = STUDY
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return make


@pytest.fixture
def study(write):
    return read_study(write())


@pytest.fixture(scope="session")
def swept(tmp_path_factory):
    """The folder of a finished run; do not write to it."""
    home = tmp_path_factory.mktemp("swept")
    (home / "study.toml").write_text(STUDY)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(BESIDE_THE_NETWORK)
        summary = sweep(read_study(home / "study.toml"), home / "run", trust=True)
    assert (summary.done, summary.failed) == (18, ())
    return home / "run"
