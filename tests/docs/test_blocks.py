"""Every block of Python in the README and in docs/ runs, or says why it cannot."""

import onnx
import pytest
from pages import PAGES, ROOT, Reader, blocks_of, name_of, runner_of
from setups import SETUPS, usual

TUTORIALS = [page for page in PAGES if page.parent.name == "tutorials"]
WITH_PYTHON = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]
RUN_HERE = [page for page in WITH_PYTHON if page not in TUTORIALS and not runner_of(page)]
NOT_RUN = [block for page in PAGES for block in blocks_of(page) if block.not_run]
MOST_NOT_RUN = 12


@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in libraries that pages show
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_block_of_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.setattr(onnx, "IR_VERSION", onnx.IR_VERSION)  # which a page sets
    reader = Reader(tmp_path, SETUPS.get(name_of(page), usual)(tmp_path))
    ran = [reader.follow(block) for block in blocks_of(page) if block.language == "python" and not block.not_run]
    assert ran or all(block.not_run for block in blocks_of(page) if block.language == "python")


def test_a_page_that_a_test_of_its_own_runs_is_named_there():
    named = {page: runner_of(page) for page in PAGES if runner_of(page)}
    assert {name_of(page) for page in named} == {"docs/extend.md", "docs/trainers.md", "docs/trainers/timm.md"}
    for page, test in named.items():
        assert name_of(page) in (ROOT / test).read_text()


def test_few_blocks_are_not_run_and_each_says_why():
    assert len(NOT_RUN) <= MOST_NOT_RUN, [f"{block}: {block.not_run}" for block in NOT_RUN]
    assert all(len(block.not_run.split()) >= 4 for block in NOT_RUN)


def test_a_block_that_is_wrong_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nx = 1\n```\n\n```python\nprint(x)\nbitplan.nonsense()\n```\n")
    right, wrong = ((block.language, block.code) for block in blocks_of(page))
    reader = Reader(tmp_path, usual(tmp_path))
    assert reader.run(right[1], "page") == ""
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        reader.run(wrong[1], "page")
    assert reader.names["x"] == 1


def test_every_page_of_set_ups_is_there():
    assert set(SETUPS) <= {name_of(page) for page in RUN_HERE}
