"""Damaged files of every kind: only bitplan's own errors come out (`python -m benchmarks.fuzz` does more of it)."""

import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.fuzz.driving import CORPUS, _tried, drive  # noqa: E402
from benchmarks.fuzz.readers import READERS, Reader  # noqa: E402

from bitplan.core.errors import FileError  # noqa: E402

SOUND = [path for path in sorted(CORPUS.glob("*/*")) if not path.name.startswith("found-")]


@pytest.mark.parametrize("path", SOUND, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_is_damaged_was_sound_before(tmp_path, path):
    """Else every damaged file would be refused for one reason, and nothing behind it be reached."""
    reader = READERS[path.parent.name]
    reader.beside(tmp_path)
    shutil.copy(path, tmp_path / reader.name)
    expected = (
        pytest.raises(FileError, match="log.jsonl is damaged") if path.name.startswith("sealed") else nullcontext()
    )
    with expected:  # the log of a sealed training is not beside it
        reader.read(tmp_path / reader.name)


def test_every_reader_has_files():
    assert {path.parent.name for path in SOUND} == set(READERS)
    assert sum(path.stat().st_size for path in CORPUS.glob("*/*")) < 300_000


@pytest.mark.parametrize(
    ("error", "words"),
    [(KeyError("x"), "KeyError"), (MemoryError(), "MemoryError"), (FileError("no"), "names no file")],
)
def test_what_is_no_error_of_ours_or_names_no_file_is_found(tmp_path, error, words):
    def read(path):
        raise error

    found, _ = _tried(Reader(read, "x"), tmp_path / "x")
    assert words in found


def test_damaged_files_of_all_kinds_are_refused_in_one_line_or_read(tmp_path):
    """Every file of the corpus once, then new ones: the same on every machine, however fast it is."""
    shutil.copytree(CORPUS, tmp_path / "corpus")
    done = drive(sorted(READERS), tmp_path / "corpus", seed=1, rounds=4 * len(READERS))
    assert [(one.reader, one.what) for one in done.found] == []
    for name in READERS:
        assert done.read[name] > len(list((CORPUS / name).glob("*")))
