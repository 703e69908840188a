"""Records in consoles, in notebooks, and read without saying what they are."""

import html.parser

import pytest

import bitplan
from bitplan.core.errors import FileError
from bitplan.core.jobs import Outcome
from bitplan.core.records import Costs, Gains, Graph, Layer, Link, Plan
from bitplan.core.trials import Recipe, Result, Trial

EVIL = "<script>alert(1)</script>\x1b[31m"


def layer(name, **more):
    return Layer(name=name, kind="linear", macs=1000, weights=100, in_features=10, **more)


def records(evil="conv"):
    graph = Graph(
        model=evil,
        layers=(layer("a", fixed="w8a8", rule="first", why=evil), layer(evil), layer("c")),
        links=(Link(layers=(evil, "c"), through=evil),),
        notes=(evil,),
    )
    gains = Gains(
        method=evil, choices=("w2a2", "w4a4"), rows={evil: (0.0, -1.5)}, errors={evil: (0.0, 0.1)}, graph=graph.id,
        notes=(evil,), options={"by": evil},
    )  # fmt: skip
    costs = Costs(
        name=evil, unit=evil, choices=gains.choices, rows={evil: (5, 10)}, fixed={"a": 3}, lacking=(), graph=graph.id
    )
    plan = Plan(
        model=evil, precisions={"a": "w8a8", evil: "w2a2", "c": "w2a2"}, links=((evil, "c"),), method=evil,
        selector="exact", notes=(evil,),
    )  # fmt: skip
    trial = Trial(task=evil, model=evil, start="s", method=evil, choices=gains.choices, recipe=None, seed=0)
    result = Result(
        trial=trial, plan=evil, score=91.5, metric=evil, higher_is_better=True, device=evil,
        log=({"loss": 2.0}, {"loss": 1.0}),
    )  # fmt: skip
    return [graph, gains, costs, plan, result]


class Tags(html.parser.HTMLParser):
    """The tags of a page, all of them closed in turn."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag != "polyline":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("place", range(5), ids=["graph", "gains", "costs", "plan", "result"])
def test_records_show_themselves_short_and_as_a_table_that_obeys_nothing(place):
    record = records(EVIL)[place]
    lines = str(record).splitlines()
    assert 1 <= len(lines) <= 4  # one to three, and a note
    assert "\x1b" not in str(record)
    assert repr(record) == f"<{lines[0]}>"
    page = record._repr_html_()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert "script" not in tags.seen
    assert "table" in tags.seen
    assert "\x1b" not in page
    assert not [name for name, value in tags.attributes if name.startswith("on") or "http" in (value or "")]


def test_consoles_say_what_matters():
    graph, gains, costs, plan, result = records()
    assert str(graph).startswith("Graph of conv: 3 layers in 2 groups (1 links), 1 to choose")
    assert "Gains by conv(by=conv) of 1 groups at w2a2, w4a4" in str(gains)
    assert "5 at w2a2, 10 at w4a4" in str(costs)
    assert "layers 2 at w2a2, 1 at w8a8" in str(plan)
    assert "conv 91.5 with plan conv" in str(result)
    assert str(Recipe(epochs=2, lr=0.1)) == "Recipe(epochs=2.0, lr=0.1)"
    assert str(plan).endswith("conv")  # the note
    other = Outcome(numbers={"divergences": (1.0,)})
    assert repr(other) == f"<Outcome {other.id}>"
    assert other._repr_html_() is None


def test_what_is_written_is_read_without_saying_what_it_is(tmp_path):
    for place, record in enumerate(records()):
        read = bitplan.load(bitplan.save(record, tmp_path / f"{place}.json"))
        assert read == record
        assert type(read) is type(record)
    outcome = Outcome(numbers={"divergences": (1.0,)})
    assert bitplan.load(bitplan.save(outcome, tmp_path / "job.json")) == outcome
    with pytest.raises(FileError, match="neither a checkpoint .* nor a run"):
        bitplan.load(tmp_path)
    with pytest.raises(FileError, match="this is a graph, where a plan is needed"):
        bitplan.load(tmp_path / "0.json", Plan)


def test_folders_are_read_as_what_they_are(tmp_path):
    from torch import nn, zeros

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    plan = Plan.uniform(bitplan.trace(net, zeros(1, 4)), "w4a4")
    bitplan.save_checkpoint(bitplan.quantize(net, plan), tmp_path / "own")
    assert bitplan.load(tmp_path / "own").plan == plan
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "study.json").write_text("{}")
    assert isinstance(bitplan.load(tmp_path / "run"), bitplan.RunFolder)
