"""The tutorials in their short versions: every block runs, every command ends well. `make test-all` runs them whole."""

import os

import pytest
from pages import Reader, blocks_of, name_of
from test_blocks import TUTORIALS

FOLLOWED = [page for page in TUTORIALS if page.stem != "index"]


@pytest.mark.parametrize("page", FOLLOWED, ids=name_of)
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_a_reader_gets_to_the_end(page, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # 15 unless said
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    reader = Reader(tmp_path, short=True)
    for block in blocks_of(page):
        if not block.not_run and block.language != "text" and not block.code.startswith("pip "):
            reader.follow(block)


def test_the_first_page_names_all_of_them():
    (index,) = (page for page in TUTORIALS if page.stem == "index")
    assert len(FOLLOWED) == 4
    assert all(f"({page.name})" in index.read_text() for page in FOLLOWED)
