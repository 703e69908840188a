"""What methods that run a network say before they begin: how much is left, and about how long that takes."""

import time

import pytest

import bitplan
from bitplan.gains import time_estimate
from bitplan.gains.base import Context
from bitplan.gains.finetuning import Expected
from texts import language_task

CHOICES = "w2a16,w4a16"
RULES = bitplan.Rules(first="w16a16", last="w16a16", embeddings="w16a16", narrow=0).for_choices(CHOICES)
JOBS = {"drift": {"samples": 4}, "fisher": {"samples": 8, "part": 2}, "moments": {"samples": 4, "batch_size": 1}}
SIZES = {"drift": ("networks", 4), "fisher": ("parts", 2), "moments": ("batches", 1)}


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    """A small model, its folder, its task and its graph."""
    model, folder, task = language_task(tmp_path_factory.mktemp("foreseen"))
    return model, folder, task, bitplan.trace(model, task.example(), rules=RULES)


@pytest.fixture(autouse=True)
def everything_is_long(monkeypatch):
    monkeypatch.setattr(time_estimate, "LONG", 0.0)


def announced(language, method, store, *, streamed=False, **options) -> list[Expected]:
    model, folder, task, graph = language
    said: list[Expected] = []
    context = Context(task=task, quantizer="groups:size=16", store=store, announce=said.append)
    start = folder if streamed else model
    bitplan.estimate(method, start, graph, choices=CHOICES, context=context, **{**JOBS[method], **options})
    return said


@pytest.mark.parametrize("method", JOBS)
def test_what_is_kept_is_taken_off(language, method, tmp_path):
    (before,) = announced(language, method, tmp_path)
    called, samples = SIZES[method]
    groups = len(language[3].selectable)
    assert before.jobs == (groups * 2 if method == "drift" else 4)
    assert (before.done, before.called, before.samples) == (0, called, before.jobs * samples)
    assert before.seconds > 0
    kept = sorted(tmp_path.glob("*.json"))
    assert len(kept) == before.jobs
    kept[0].unlink()
    kept[1].unlink()
    (again,) = announced(language, method, tmp_path)
    assert (again.jobs, again.done, again.samples) == (before.jobs, before.jobs - 2, 2 * samples)
    assert announced(language, method, tmp_path) == []


def test_a_file_says_so_too(language, tmp_path):
    (before,) = announced(language, "moments", tmp_path, streamed=True)
    layers = sum(len(group.layers) for group in language[3].selectable)
    assert (before.jobs, before.done, before.called, before.samples) == (layers, 0, "layers", 4)
    next(tmp_path.glob("*.json")).unlink()
    (again,) = announced(language, "moments", tmp_path, streamed=True)
    assert again.done == layers - 1
    assert announced(language, "moments", tmp_path, streamed=True) == []


def test_seconds_are_those_of_what_is_run(language, tmp_path, monkeypatch):
    """By a pass of the network on this task: four batches, each once as it is and once for each choice."""
    task = language[2]
    forward = type(task).forward

    def slow(self, model, batch):
        time.sleep(0.05)
        return forward(self, model, batch)

    monkeypatch.setattr(type(task), "forward", slow)
    (told,) = announced(language, "moments", tmp_path)
    assert told.seconds >= 4 * 3 * 0.05


def test_little_work_is_not_announced(language, monkeypatch, tmp_path):
    monkeypatch.setattr(time_estimate, "LONG", 60.0)
    assert announced(language, "drift", tmp_path) == []


def test_in_words():
    assert str(Expected(360, 60, 0, 300, 700.0, "networks")) == (
        "360 networks (60 of them done), 300 samples left: about 12 minutes of one worker"
    )
