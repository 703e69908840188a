"""Every engine: all items get an outcome, and nothing that happens to one of them harms the others."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from errands import Errand, Parameters, Square, Squared, always_dies, threads_of

from bitplan.adapters.transformers import bert_for_question_answering
from bitplan.core.errors import InputError, UnknownName
from bitplan.core.registry import ENGINES
from bitplan.store.engines import Failure, Local, keep_workers, make_engine

OPTIONS = {"local": [{}, {"workers": 2}], "cluster": [{"cpus": 1}]}
OTHERS = [("local", {"workers": 2}), ("cluster", {})]


@pytest.fixture(scope="module", autouse=True)
def paths():
    """Workers of a cluster find this folder as our own do."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *([before] if before else [])])
    yield
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


def run(name, options, work, numbers):
    return {errand.number: outcome for errand, outcome in make_engine(name, options).run(work, map_errands(numbers))}


def map_errands(numbers):
    return [Errand(number=number) for number in numbers]


def test_all_engines_are_tried():
    assert set(OPTIONS) == set(ENGINES)


@pytest.mark.parametrize(("name", "options"), [(name, one) for name, many in OPTIONS.items() for one in many])
def test_every_item_gets_its_outcome_and_a_failing_one_stops_no_other(tmp_path, name, options):
    found = run(name, options, Square(tmp_path, fails=frozenset({3})), range(7))
    assert {n: o.value for n, o in found.items() if n != 3} == {n: n * n for n in range(7) if n != 3}
    assert isinstance(found[3], Failure)
    assert found[3].error == "ValueError: no square for 3"
    assert "errands.py" in found[3].traceback
    assert run(name, options, Square(tmp_path), []) == {}


@pytest.mark.parametrize(("name", "options"), OTHERS)
def test_an_item_whose_worker_is_killed_is_done_by_another(tmp_path, name, options):
    work = Square(tmp_path, dies=frozenset({2}))
    assert run(name, options, work, range(5)) == {n: Squared(value=n * n) for n in range(5)}
    assert [work.times(n) for n in range(5)] == [1, 1, 2, 1, 1]


def test_an_item_that_kills_every_worker_fails_and_says_how_often():
    outcomes = dict(Local(workers=1, retries=1).run(always_dies, [1]))
    assert outcomes[1] == Failure("its worker died (killed by SIGKILL), 2 times in all", fault="worker")


def test_a_cluster_gives_up_too():
    outcome = dict(make_engine("cluster", {"retries": 0}).run(always_dies, [1]))[1]
    assert isinstance(outcome, Failure)
    assert "WorkerCrashed" in outcome.error


def test_workers_have_the_threads_they_were_given():
    assert dict(Local(workers=1, threads=1).run(threads_of, [0])) == {0: 1}


def test_work_that_cannot_be_sent_is_refused():
    with pytest.raises(InputError, match="cannot be sent to another process"):
        list(Local(workers=1).run(lambda item: item, [1]))


def workers_of(folder):
    """The processes that left a line in a diary."""
    return {int(line.name.split("-")[1]) for line in folder.iterdir()}


def squares(folder, numbers, **options):
    folder.mkdir(exist_ok=True)
    return run("local", {"workers": 2}, Square(folder, **options), numbers)


def test_workers_that_are_kept_do_round_after_round_and_end_with_the_block(tmp_path):
    with keep_workers():
        for _ in range(3):
            assert squares(tmp_path / "one", range(2), seconds=0.2) == {n: Squared(value=n * n) for n in range(2)}
        assert len(workers_of(tmp_path / "one")) <= 2
        with keep_workers():
            squares(tmp_path / "other", range(4))  # other work for the same processes
        squares(tmp_path / "one", range(2), seconds=0.2)
        known = workers_of(tmp_path / "one")
        assert len(known) <= 2
        assert workers_of(tmp_path / "other") <= known
        assert all(map(is_there, known))
    assert not any(map(is_there, known))
    squares(tmp_path / "alone", range(2))
    assert workers_of(tmp_path / "alone").isdisjoint(known)


def test_a_kept_worker_that_dies_is_replaced_and_one_round_may_run_inside_another(tmp_path):
    with keep_workers():
        assert squares(tmp_path / "dying", range(3), dies=frozenset({0, 1})) == {
            n: Squared(value=n * n) for n in range(3)
        }
        (tmp_path / "outer").mkdir()
        outer = Local(workers=1).run(Square(tmp_path / "outer"), map_errands(range(3)))
        next(outer)
        assert squares(tmp_path / "inner", range(2)) == {n: Squared(value=n * n) for n in range(2)}
        assert [outcome.value for _, outcome in outer] == [1, 4]
        assert workers_of(tmp_path / "inner").isdisjoint(workers_of(tmp_path / "outer"))


def test_a_round_that_nobody_waits_for_leaves_no_answer_to_the_next(tmp_path):
    with keep_workers():
        (tmp_path / "left").mkdir()
        left = Local(workers=2).run(Square(tmp_path / "left", seconds=0.3), map_errands(range(5, 9)))
        next(left)
        left.close()
        assert squares(tmp_path / "next", range(4)) == {n: Squared(value=n * n) for n in range(4)}


def test_workers_end_with_the_process_that_started_them(tmp_path):
    (tmp_path / "diary").mkdir()
    driver = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "drive.py"), str(tmp_path), "2", "600", "local", "workers=2"]
    )
    try:
        waited_for(lambda: len(workers_of(tmp_path / "diary")) == 2)
    finally:
        driver.kill()
        driver.wait()
    waited_for(lambda: not any(map(is_there, workers_of(tmp_path / "diary"))))


def waited_for(event, seconds=60):
    until = time.monotonic() + seconds
    while not event():
        assert time.monotonic() < until
        time.sleep(0.05)


def is_there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_bad_options_are_one_line():
    with pytest.raises(UnknownName, match="did you mean workers"):
        make_engine("local", {"worker": 2})
    with pytest.raises(InputError, match="at least 0"):
        make_engine("local", {"workers": -1})
    with pytest.raises(InputError, match="no node of the cluster has 999 CPUs"):
        list(make_engine("cluster", {"cpus": 999}).run(threads_of, [1]))


def test_engines_can_be_sent_along():
    for name in ENGINES:
        assert pickle.loads(pickle.dumps(make_engine(name, {}))) == make_engine(name, {})


@pytest.mark.parametrize(("name", "options"), OTHERS)
def test_networks_of_other_libraries_arrive(name, options):
    """Their classes are imported as they are unpickled, which may take what was done here before they were."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = bert_for_question_answering(vocab_size=8, max_position_embeddings=8, **sizes)
    expected = sum(one.numel() for one in model.parameters())
    assert run(name, options, Parameters(model), [1]) == {1: Squared(value=expected + 1)}
