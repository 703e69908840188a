"`bitplan run tables --which published`: one form, for people and for programs; what does not fit is one line."

import csv
import io
import json

import pytest


def test_it_is_printed_for_people_and_for_programs(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    code, shown, _ = run("run", "tables", "--which", "published", "--of", "resnet50")
    assert code == 0
    assert "101.1" in shown
    assert "486.1" in shown
    assert "note 1: which layers are lowered decides it" in shown
    assert "TernaryBERT" not in shown
    listed = json.loads(run("run", "tables", "--which", "published", "--of", "squad", "--format", "json")[1])["rows"]
    assert {row["network"] for row in listed} == {"bert-base"}
    assert all(row["source"] and row["known"] for row in listed)
    rows = list(csv.reader(io.StringIO(run("run", "tables", "--which", "published_times", "--format", "csv")[1])))
    assert ["the knapsack, one budget", "pspnet", "78", "one CPU, in Python", "section 3.1"] in rows
    assert "1,032 hours" in run("run", "tables", "--which", "published_times", "--of", "pspnet")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--which", "published", "--of", "resnet"), "unknown network or task 'resnet'"),
        (("--which", "published_times", "--of", "bert-base"), "unknown network 'bert-base'"),
        (("runs", "--which", "published"), "the table published does not use a run: remove runs"),
        (("--which", "published", "--budgets", "70%"), "does not use a run: remove --budgets"),
        (("--which", "frontier"), "the table frontier is of a run: bitplan run tables RUN --which frontier"),
        (("--which", "publishd"), "unknown table 'publishd'; did you mean published"),
        (("runs", "--of", "resnet50"), "--of is for what others published"),
    ],
)
def test_what_does_not_fit_is_one_line(run, words, message):
    code, out, err = run("run", "tables", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
