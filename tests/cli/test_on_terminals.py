"""Tables as they stand on a terminal: whole, aligned, with the best marked, and plain where there is no colour."""

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from bitplan.cli import show, terminal
from bitplan.core.records import Plan
from bitplan.reports.formats import Column, Table, numbers
from bitplan.store.files import save

BUDGETS = ("90%", "80%", "70%", "60%")
ROWS = (
    ("float", "98.33", None, None, None, None, None),
    ("a method with a name", None, "88.51 ± 0.18", "87.83 ± 0.35", "84.80 ± 0.54", "82.96 ± 0.09", "86.12 ± 0.30"),
    ("uniform", None, "90.25 ± 0.34", "89.03 ± 0.20", "86.25 ± 0.39", "82.15 ± 0.20", "87.16 ± 0.30"),
)
WIDE = Table(
    "frontier",
    (Column("method"), *numbers("no budget", *BUDGETS, "area")),
    ROWS,
    ("a note",),
    frozenset({(2, 2)}),
)


@pytest.fixture
def screen(monkeypatch):
    """Show something on a terminal of some width; gives the lines."""

    def make(width, act, *given, colour=False, **options):
        out = io.StringIO()
        made = Console(file=out, width=width, force_terminal=colour, color_system="standard" if colour else None)
        monkeypatch.setattr(show, "console", lambda: made)
        act(*given, **options)
        return out.getvalue().splitlines()

    return make


def test_a_table_that_fits_stands_in_one_piece(screen):
    lines = screen(160, show.show_table, WIDE)
    assert sum("method" in line.split()[:1] for line in lines) == 1
    ends = [
        lines[row].index(text) + len(text) for row, text in ((1, "90%"), (3, "88.51 ± 0.18"), (4, "* 90.25 ± 0.34"))
    ]
    assert len(set(ends)) == 1, "numbers are flush with their heading"
    assert "  * the best of its column" in lines


@pytest.mark.parametrize("width", [48, 64, 80])
def test_a_wide_table_goes_on_below_and_loses_nothing(screen, width):
    lines = screen(width, show.show_table, WIDE)
    assert all(len(line.rstrip()) <= width for line in lines)
    text = "\n".join(lines)
    for row in ROWS:
        assert row[0] in text
        assert all(value in text for value in row if value)
    assert text.count("a method with a name") == sum(line.startswith("method ") for line in lines) > 1
    assert text.count("float") == 1, "a row that has nothing to say below is left out there"


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_headings_and_texts_are_folded_before_numbers_are_cut(screen, width):
    columns = (Column("method"), Column("budget"), *numbers("GBOPs without ends", "times smaller"), Column("so"))
    said = "cannot be significant: p is at least 0.1 with 3 and 3 seeds"
    table = Table("t", columns, (("last_to_first", "85%", "0.05161", "1,234,567.89", said),))
    text = "\n".join(screen(width, show.show_table, table))
    for value in ("last_to_first", "85%", "0.05161", "1,234,567.89"):
        assert value in text
    for word in [*said.split(), *(word for column in columns for word in column.name.split())]:
        assert word in text


def test_colour_and_bold_are_for_terminals(screen):
    assert any("\x1b[" in line for line in screen(80, show.show_table, WIDE, colour=True))
    assert not any("\x1b" in line for line in screen(80, show.show_table, WIDE))


@pytest.mark.parametrize("width", [60, 80, 160])
def test_names_of_layers_stay_whole(screen, graph, width):
    plan = Plan.uniform(graph, 4)
    lines = screen(width, lambda: show.console().print(show._bars(plan, graph)))
    for layer in graph.layers:
        assert sum(line.split()[:1] == [layer.name] for line in lines) == 1
    assert any("████" in line for line in lines)


@pytest.mark.parametrize("words", [("--explain",), ()], ids=["explain", "bars"])
def test_through_a_pipe_lines_fit_the_screen_and_none_is_blank(run, graph, monkeypatch, words):
    """A line that is padded beyond the screen is folded there, and leaves a blank one."""
    monkeypatch.setenv("COLUMNS", "80")
    save(graph, "graph.json")
    code, out, _ = run("plan", "graph.json", "--gain", "uniform", "--budget", "70%", *words)
    assert code == 0
    lines = out.split("\n")
    assert max(map(cell_len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []
    table = lines[next(place for place, line in enumerate(lines) if line.startswith("layer ")) :]
    assert all(table[: len(graph.layers) + 1])


def test_a_file_gets_wide_lines_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert show.console().width == 160
    for told, width in (("100", 100), ("0", 160), ("wide", 160)):
        monkeypatch.setenv("COLUMNS", told)
        assert show.console().width == width


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(terminal, "time", clock)
    return clock


def test_through_a_pipe_progress_is_a_line_now_and_then_with_one_time_left(time, capsys):
    with terminal.showing_progress("training") as tell:
        for step in range(1, 1601):
            time.now += 0.125
            tell(step, 1600, f"loss {step}")
    lines = capsys.readouterr().err.splitlines()
    assert 10 <= len(lines) <= 30
    assert lines[0] == "    0:05  40/1,600  loss 40 · about 3:15 left"
    assert all(line.count("left") == 1 for line in lines)


def test_short_work_is_not_told_and_every_event_is_where_asked_for(time, capsys):
    for every, count in ((False, 0), (True, 3)):
        with terminal.showing_progress("sweeping", every_event=every) as tell:
            for step in (1, 2, 3):
                time.now += 1
                tell(step, 3, "trial done")
        assert capsys.readouterr().err.count("trial done") == count


def test_the_time_left_is_of_the_work_at_hand(time):
    rest = terminal.TimeLeft()
    assert rest.describe(50, 100) == ""  # where a killed run goes on: nothing is known of its pace
    time.now += 10
    assert rest.describe(60, 100) == " · about 0:40 left"
    assert rest.describe(0, 10) == "", "another kind of work"
    time.now += 3
    assert rest.describe(1, 10) == " · about 0:27 left"
    rest.describe(0, 117)
    time.now += 60
    assert rest.describe(11, 117) == "", "the first of many may be slower than the rest"
    assert rest.describe(12, 117) == " · about 8:45 left"
    assert rest.describe(10, 10) == ""
