"""Tests of when Python looks for unreachable objects in a command."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from bitplan.cli.loading import begin_loading, end_loading
from bitplan.cli.progress import showing_progress


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Whatever a test sets is taken back."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_long_work_finds_what_is_usual() -> None:
    usual = gc.get_threshold()
    begin_loading()
    assert gc.get_threshold()[0] > usual[0]
    with showing_progress("working"):
        assert gc.get_threshold() == usual
    assert gc.get_freeze_count() > 0


def test_a_process_that_is_no_command_is_left_alone() -> None:
    gc.set_threshold(1234, 5, 6)
    end_loading()
    assert gc.get_threshold() == (1234, 5, 6)
    assert gc.get_freeze_count() == 0
