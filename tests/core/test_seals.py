"""Files carry a checksum of their bytes: what it vouches for is read fast, all else is refused or read with care."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitplan.core.errors import Damaged, FileError, InputError
from bitplan.core.record import Record, with_checksum
from bitplan.core.trials import Recipe, Result, Trial
from bitplan.store.run_folder import RunFolder

LOG = tuple({"step": step, "epoch": step / 7, "loss": 1 / (step + 3), "score": None, "lr": 1e-300} for step in range(5))


def result(seed=0, score=0.1 + 0.2):
    trial = Trial(
        task="digits", model="m", start="s", method="eagl", choices=("w2a2", "w4a4"), recipe=Recipe(steps=3), seed=seed
    )  # fmt: skip
    return Result(trial=trial, plan="p", score=score, higher_is_better=True, log=LOG, seconds=1.5)


@pytest.fixture
def shelf(tmp_path):
    made = RunFolder(tmp_path).trials
    made.keep("a", result())
    return made


def test_what_is_kept_is_sealed_and_reads_back_as_it_was(shelf):
    assert shelf.path("a").read_text() == result().to_json(of="a")
    again = shelf.read("a")
    assert again == result()
    assert again.id == result().id
    assert again.log == LOG
    assert [type(value) for value in again.log[1].values()] == [type(value) for value in LOG[1].values()]


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_changed_bit_passes_for_what_was_written(tmp_path_factory, place, bit):
    shelf = RunFolder(tmp_path_factory.mktemp("run")).trials
    shelf.keep("a", result())
    content = bytearray(shelf.path("a").read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    shelf.path("a").write_bytes(content)
    sound, damaged = shelf.read_sound(["a"])
    assert bool(sound) != bool(damaged)
    if sound:  # one blank became another
        assert sound["a"] == result()


def test_files_that_were_exchanged_or_cut_are_refused_and_those_that_are_gone_are_not_there(shelf):
    shelf.keep("b", result(seed=1))
    shelf.path("c").write_bytes(shelf.path("b").read_bytes())
    shelf.path("d").write_bytes(shelf.path("b").read_bytes()[:-40])
    sound, damaged = shelf.read_sound(["a", "b", "c", "d", "gone"])
    assert set(sound) == {"a", "b"}
    assert set(damaged) == {"c", "d"}
    with pytest.raises(Damaged, match="belongs to b, not to c"):
        shelf.read("c")


def test_a_seal_does_not_vouch_for_another_kind_or_a_format_to_come(shelf):
    run = RunFolder(shelf.folder.parent)
    run.trained.folder.mkdir()
    run.trained.path("a").write_bytes(shelf.path("a").read_bytes())
    with pytest.raises(FileError, match="this is a result, where a trained is needed"):
        run.trained.read("a")
    later = json.loads(result().to_json(of="a")) | {"format": 9}
    del later["checksum"]
    shelf.path("a").write_text(with_checksum(json.dumps(later, indent=1)))
    with pytest.raises(FileError, match="newer"):
        shelf.read("a")


@pytest.mark.parametrize(
    "rest",
    [
        '",', '"}', '",}', '", "a": 1', '", "bitplan": 5}', '", "bitplan": "graph"}', '"} {}',
        '", "x": NaN}', '", "x": 1e999}', f'", "x": {"9" * 5000}}}', f'", "x": {"[" * 5000}', '", "x": "\ud800"}',
    ],
)  # fmt: skip
def test_a_checksum_that_a_stranger_made_breaks_nothing(rest):
    """Anyone can make a checksum of anything: only our own errors come out."""
    checked = rest[1:].encode(errors="replace").translate(None, b" ")
    checksum = hashlib.sha256(checked).hexdigest()[:32]
    with pytest.raises(InputError):
        Record.from_json(f'{{\n "checksum": "{checksum}{rest}')


@pytest.mark.parametrize("indent", [None, 4])
def test_a_file_may_be_laid_out_anew(graph, indent):
    assert Record.from_json(json.dumps(json.loads(graph.to_json()), indent=indent)) == graph
    assert Record.from_json(graph.to_json().replace("\n", "\r\n")) == graph
