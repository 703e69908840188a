"""Tests of when Python looks for unreachable objects in a command."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from bitplan.cli.terminal import _USUAL, begin_loading, end_loading, showing_progress


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Each begins with what Python itself sets, whatever commands ran here before; what it sets is taken back."""
    before = gc.get_threshold()
    gc.set_threshold(*_USUAL)
    yield
    gc.set_threshold(*before)


def test_long_work_finds_what_is_usual() -> None:
    usual = gc.get_threshold()
    begin_loading()
    assert gc.get_threshold()[0] > usual[0]
    loaded = [object()]
    with showing_progress("working"):
        assert gc.get_threshold() == usual
        assert any(one is loaded for one in gc.get_objects(generation=2))


def test_what_is_unreachable_before_long_work_can_be_freed() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    begin_loading()
    seen = weakref.ref(Cycle())
    end_loading()
    gc.collect()
    assert seen() is None


def test_pythons_that_keep_no_third_threshold_find_what_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.14 gives 0 for it, whatever was set."""
    usual, told = gc.get_threshold(), gc.get_threshold
    monkeypatch.setattr(gc, "get_threshold", lambda: (*told()[:2], 0))
    begin_loading()
    end_loading()
    assert told() == usual


def test_a_process_that_is_no_command_is_left_alone() -> None:
    gc.set_threshold(1234, 5, 6)
    end_loading()
    assert gc.get_threshold() == (1234, 5, 6)
