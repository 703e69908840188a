"""Files of runs carry a seal of their bytes: what it vouches for is read fast, all else as carefully as ever."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitplan.core.errors import Damaged, FileError, InputError
from bitplan.core.record import Record, is_intact, sealed
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
    content = shelf.path("a").read_bytes()
    assert content == sealed(result().to_json(of="a")).encode()
    assert is_intact(content, of="a")
    assert not is_intact(content, of="b")
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
    assert not is_intact(bytes(content), of="a")
    sound, damaged = shelf.look_at(["a"])
    assert (sound == {"a"}) == (not damaged)
    if sound:  # the seal itself, or a blank: the checksum vouches for what it says
        assert shelf.read("a") == result()


def test_files_that_were_exchanged_or_cut_are_refused_and_those_that_are_gone_are_not_there(shelf):
    shelf.keep("b", result(seed=1))
    shelf.path("c").write_bytes(shelf.path("b").read_bytes())
    shelf.path("d").write_bytes(shelf.path("b").read_bytes()[:-40])
    sound, damaged = shelf.look_at(["a", "b", "c", "d", "gone"])
    assert sound == {"a", "b"}
    assert set(damaged) == {"c", "d"}
    with pytest.raises(Damaged, match="belongs to b, not to c"):
        shelf.read("c")


def test_files_from_before_seals_are_read_and_not_written_over(shelf):
    plain = result().to_json(of="a")
    shelf.path("a").write_text(plain)
    assert shelf.look_at(["a"]) == ({"a"}, {})
    assert shelf.read("a") == result()
    shelf.keep("a", result())
    assert shelf.path("a").read_text() == plain


def test_a_seal_does_not_vouch_for_another_kind_or_a_format_to_come(shelf):
    run = RunFolder(shelf.folder.parent)
    run.trained.folder.mkdir()
    run.trained.path("a").write_bytes(shelf.path("a").read_bytes())
    with pytest.raises(FileError, match="this is a result, where a trained is needed"):
        run.trained.read("a")
    later = json.dumps(json.loads(result().to_json(of="a")) | {"format": 9}, indent=1)
    shelf.path("a").write_text(sealed(later))
    with pytest.raises(FileError, match="checksum|newer"):
        shelf.read("a")


@pytest.mark.parametrize(
    "rest",
    [
        '",', '"}', '",}', '", "a": 1', '", "bitplan": 5}', '", "bitplan": "graph"}', '"} {}',
        '", "x": NaN}', '", "x": 1e999}', f'", "x": {"9" * 5000}}}', f'", "x": {"[" * 5000}', '", "x": "\ud800"}',
    ],
)  # fmt: skip
def test_a_seal_that_a_stranger_made_breaks_nothing(rest):
    """Who makes a seal can make it of anything: only our own errors come out."""
    seal = hashlib.sha256(rest.encode(errors="replace")).hexdigest()[:32]
    with pytest.raises(InputError):
        Record.from_json(f'{{\n "seal": "{seal}{rest}')


@pytest.mark.parametrize("wrong", [None, 5, {}, "../../x", "0" * 13])
def test_no_seal_makes_an_id_of_what_is_none(graph, wrong):
    rest = json.loads(graph.to_json()) | {"id": wrong}
    with pytest.raises(InputError):
        Record.from_json(sealed(json.dumps(rest, indent=1)))
    assert Record.from_json(sealed(graph.to_json())) == graph


def test_a_log_is_left_out_where_the_seal_vouches_for_it(shelf):
    brief, whole = shelf.read("a", without="log"), shelf.read("a")
    assert brief.log == ()
    assert brief.model_copy(update={"log": LOG}) == whole
    assert brief.id == whole.id, "that of the file"


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_damage_in_a_log_that_is_left_out_is_noticed(tmp_path_factory, place, bit):
    shelf = RunFolder(tmp_path_factory.mktemp("run")).trials
    shelf.keep("a", result())
    content = bytearray(shelf.path("a").read_bytes())
    begin, end = content.index(b'"log"'), content.index(b'"seconds"')
    content[begin + int(place * (end - begin))] ^= 1 << bit
    shelf.path("a").write_bytes(content)
    try:
        brief = shelf.read("a", without="log")
    except Damaged:
        return
    assert brief == result(), "only a blank changed: the checksum vouches for what it says, and all of it is read"


@pytest.mark.parametrize("log", [(), LOG[:1], ({"losses": 1.0, "a ]\n ]": 2.0}, *LOG)])
def test_whatever_a_log_says_the_rest_is_read_as_it_is(tmp_path, log):
    shelf = RunFolder(tmp_path).trials
    told = result().model_copy(update={"log": log, "losses": (1.5, 2.5), "versions": {"log": "[\n ]"}})
    shelf.keep("a", told)
    assert shelf.read("a", without="log") == told.model_copy(update={"log": ()})
