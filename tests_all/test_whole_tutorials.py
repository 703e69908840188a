"""The tutorials as they stand, with what they show: the same words, and figures of their own."""

import sys

import pytest

from newcomer import ROOT

sys.path.insert(0, str(ROOT / "tests" / "docs"))

from pages import Reader, blocks_of, shape_of

TUTORIALS = sorted(path for path in (ROOT / "docs" / "tutorials").glob("*.md") if path.stem != "index")


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_it_says_what_the_page_shows(page, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # 15 unless said
    reader, said = Reader(tmp_path), ""
    for block in blocks_of(page):
        if block.language == "text":
            shown, real = shape_of(block.code), shape_of(said)
            assert len(shown) == len(real), f"{block}\n{said}"
            same = sum(one == other for one, other in zip(shown, real, strict=True))
            assert same >= 0.7 * len(shown), f"{block}\n{said}"
        elif not block.not_run and not block.code.startswith("pip "):
            said = reader.follow(block)
