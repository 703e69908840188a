"""Small files of data sets that claim to be large are refused by name, before memory or time is taken."""

from pathlib import Path

import pytest
from bombs import assert_refused
from data_bombs import BOMBS

PROGRAM = Path(__file__).with_name("data_bombs.py")


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_and_takes_little(tmp_path, name):
    assert_refused(PROGRAM, BOMBS, name, tmp_path, most=500 if name == "rows" else 250)
