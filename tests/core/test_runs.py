"""A run's folder keeps records whole, checked, each for what it belongs to; looking at one looks at nothing else."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitplan.core.errors import FileError, WriteError
from bitplan.core.record import Record
from bitplan.core.records import Gains, Plan
from bitplan.core.studies import Agenda, Trained
from bitplan.store.record_store import RecordStore
from bitplan.store.run_folder import RunFolder, gains_file

ALIKE = ("é" * 90, "é" * 91, "a b", "a-b", "a_b", "a+b", "..", ".a", "%2Ea", "a/b")


def trained(number):
    return Trained(training=f"{number:012x}", score=number, higher_is_better=True, seconds=1.5)


@pytest.fixture
def run(tmp_path):
    made = RunFolder(tmp_path / "run")
    for number in range(3):
        made.trained.keep(trained(number).training, trained(number))
    return made


def test_what_is_kept_is_read_back_and_removed(run):
    shelf = run.trained
    assert shelf.ids() == {trained(number).training for number in range(3)}
    assert list(shelf.read_all().values()) == [trained(number) for number in range(3)]
    assert shelf.find("nothing") is None
    shelf.remove(trained(1).training)
    shelf.remove(trained(1).training)
    assert not shelf.has(trained(1).training)
    assert shelf.ids() == {trained(0).training, trained(2).training}


def test_what_is_there_already_is_not_written_again(run):
    path = run.trained.path(trained(0).training)
    before = path.stat()
    run.trained.keep(trained(0).training, trained(0))
    after = path.stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)


def test_of_some_the_sound_are_read_the_damaged_named_and_those_set_aside_meanwhile_left_out(run):
    names = [trained(number).training for number in range(3)]
    run.trained.path(names[1]).write_text("{")
    sound, damaged = run.trained.read_sound(names)
    assert (list(sound), list(damaged)) == ([names[0], names[2]], [names[1]])
    aside = run.trained.set_aside(names[1])
    assert run.trained.set_aside(names[1]) != aside, "somebody else was faster, and that is no error"
    assert run.trained.read_sound(names) == (sound, {})
    assert run.trained.lost() == {names[1]}
    assert aside.read_text() == "{"
    run.trained.keep(names[1], trained(1))
    assert run.trained.lost() == set()
    run.trained.path(names[1]).write_text("}")
    assert run.trained.set_aside(names[1]).name == f"{names[1]}.json.damaged.2"


def test_a_damaged_file_is_set_aside_before_it_is_written_again(run, caplog):
    path = run.trained.path(trained(0).training)
    path.write_text(damaged := path.read_text().replace("1.5", "1.6"))
    run.trained.keep(path.stem, trained(0))
    assert run.trained.read(path.stem) == trained(0)
    assert path.with_name(f"{path.name}.damaged").read_text() == damaged
    assert "it is made again, and the old one is kept as" in caplog.text


def test_two_files_that_were_exchanged_are_refused(run):
    first, second = (run.trained.path(trained(number).training) for number in (0, 1))
    one, other = first.read_text(), second.read_text()
    first.write_text(other)
    second.write_text(one)
    with pytest.raises(FileError, match=rf"{first.name}: the trained belongs to {second.stem}, not to {first.stem}"):
        run.trained.read(first.stem)


@pytest.mark.parametrize(
    "change",
    [
        ('"seconds": 1.5', '"seconds": 1.6'), ('"score": 0.0', '"score": 8.0'), ('"seconds": 1.5', '"seconds": NaN'),
        ('"seconds": 1.5', '"seconds": -1.5'), ('"higher_is', '"hifher_is'), ('"score": 0.0', '"score": 1e999'),
    ],
)  # fmt: skip
def test_a_changed_number_is_refused_also_where_no_id_depends_on_it(run, change):
    path = run.trained.path(trained(0).training)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(FileError, match=f"{path.name}.*edited by hand or damaged; delete it, and what made it"):
        run.trained.read(path.stem)


@pytest.mark.parametrize("line", ["id", "checksum"])
def test_in_a_run_nothing_is_taken_without_its_seal(run, line):
    path = run.trained.path(trained(0).training)
    content = json.loads(path.read_text())
    del content[line]
    path.write_text(json.dumps(content))
    with pytest.raises(FileError, match=f"{path.name}.*no checksum that fits"):
        run.trained.read(path.stem)


def test_a_job_of_another_kind_is_refused(tmp_path, graph):
    shelf = RecordStore.at(tmp_path)
    shelf.keep("a", graph)
    with pytest.raises(FileError, match="this is a graph, where a plan is needed"):
        shelf.holding(Plan).read("a")
    assert shelf.holding(type(graph)).read("a") == graph == shelf.holding(Record).read("a")


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1), unique=True))
def test_two_titles_never_share_a_file_and_none_leaves_its_folder(titles):
    files = [
        gains_file(title)
        for title in [*titles, "é" * 90, "é" * 91, "a b", "a-b", "a_b", "a+b", "..", ".a", "%2Ea", "a/b"]
    ]
    assert len(set(files)) == len(
        set(titles) | {"é" * 90, "é" * 91, "a b", "a-b", "a_b", "a+b", "..", ".a", "%2Ea", "a/b"}
    )
    for name in files:
        folder, _, rest = name.partition("/")
        assert folder == "gains"
        assert "/" not in rest
        assert len(rest.encode()) < 200
        assert not rest.startswith(".")


def test_gains_are_of_the_method_whose_title_they_carry(run, graph, tmp_path):
    made = Gains(method="mine", choices=("w2a2", "w4a4"), rows={"a": (0, 1.0)}, graph=graph.id)
    run.keep_gains("first", made)
    (run.path / gains_file("first")).rename(run.path / gains_file("second"))
    with pytest.raises(FileError, match="belongs to first, not to second"):
        _ = RunFolder(run.path).gains_of("second")


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "run").write_text("a file where a folder should be")
    with pytest.raises(WriteError, match="cannot write .*agenda.json"):
        RunFolder(tmp_path / "run").keep(Agenda(study="s", trials=()))


def test_looking_at_one_looks_at_nothing_else(run, monkeypatch):
    looked = itertools.count()
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: next(looked))
    monkeypatch.setattr("pathlib.Path.iterdir", lambda *_: next(looked))
    assert run.trained.has(trained(0).training)
    assert run.trained.read(trained(0).training) == trained(0)
    assert next(looked) == 0
