from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitplan.core.budget import UNITS, WEIGHT_BITS, Account, Budget, Measured
from bitplan.core.errors import BudgetError


def account(highest=1000, unit="ns", **changes):
    """What a network costs; whatever is asked of it, of its own weight bits in the case of bits per weight."""
    fields = {"cost": "latency", "unit": unit, "top": "w4a4", "highest": highest, "weights": highest}
    return Account(**(fields | changes))


@pytest.mark.parametrize(
    ("written", "reference", "capacity", "shown"),
    [
        ("70%", 1000, 700, "70%"),
        (0.7, 1000, 700, "70%"),
        (1.0, 1000, 1000, "100%"),
        ("33.3%", 1000, 333, "33.3%"),
        ("0.1%", 10**18, 10**15, "0.1%"),
        (0.29, 100, 29, "29%"),  # 0.29 * 100 is below 29 in floating point
        ("memory=60%", 10, 6, "memory=60%"),
        ("3.2bpw", 1000, 3200, "3.2bpw"),
        ("123456", 7, 123456, "123456"),
        (123456, 7, 123456, "123456"),
        ("bops=5", 7, 5, "bops=5"),
        ("99.99%", 3, 2, "99.99%"),  # rounded down, never up
    ],
)
def test_budgets_are_read_exactly(written, reference, capacity, shown):
    budget = Budget.parse(written)
    whole = account(reference, cost=WEIGHT_BITS) if "bpw" in shown else account(reference)
    assert budget.capacity(whole) == capacity
    assert str(budget) == shown
    assert Budget.parse(shown) == budget


@pytest.mark.parametrize(
    "wrong",
    [
        "70 percent",
        "",
        "%",
        "-5%",
        "1.5",
        "memory=",
        "memory=2bpw",
        70.0,
        0.0,
        "1e3%",
        "nan%",
        "12msec",
        "2Mb",
        "=12ms",
        "12 m s",
        "ms",
        "12ms%",
        "9" * 5000,
        "9" * 5000 + "%",
        f"1.{'9' * 5000}bpw",
    ],
)
def test_what_is_no_budget_is_refused_with_how_to_write_one(wrong):
    with pytest.raises(BudgetError) as caught:
        Budget.parse(wrong)
    assert "write" in str(caught.value)


MEASURED = sorted({unit for unit in UNITS.values() if isinstance(unit, Measured)}, key=lambda unit: unit.written)
amounts = st.builds(lambda whole, places: Fraction(whole, 10**places), st.integers(0, 10**12), st.integers(0, 12))


@pytest.mark.parametrize(
    ("written", "unit", "fixed", "capacity", "shown"),
    [
        ("12ms", "ns", 2_000_000, 10_000_000, "12ms"),
        ("latency=12ms", "us", 500, 11_500, "latency=12ms"),
        ("1.5 us", "ns", 0, 1500, "1.5us"),
        ("12µs", "ns", 0, 12_000, "12us"),
        ("12μs", "ns", 0, 12_000, "12us"),
        ("0.00001s", "ns", 1, 9_999, "0.00001s"),
        ("7ns", "us", 0, 0, "7ns"),
        ("3ms", "ns", 4_000_000, -1_000_000, "3ms"),  # fixed layers alone take more
        ("2mJ", "nJ", 500_000, 1_500_000, "2mJ"),
        ("2MB", "bits", 1_000_000, 15_000_000, "2MB"),
        ("memory=1.5MiB", "bits", 0, 12_582_912, "memory=1.5MiB"),
        ("1KB", "bytes", 1, 999, "1kB"),
        ("64B", "bits", 0, 512, "64bytes"),
    ],
)
def test_time_energy_and_bytes_are_of_the_whole_network(written, unit, fixed, capacity, shown):
    budget = Budget.parse(written)
    assert budget.capacity(account(unit=unit, fixed=fixed)) == capacity
    assert str(budget) == shown
    assert Budget.parse(shown) == budget


@given(amounts, st.sampled_from(sorted(UNITS)), st.sampled_from(["", "latency="]))
def test_what_is_printed_is_read_back_equal(amount, unit, cost):
    if UNITS[unit].kind == "units":
        amount = Fraction(int(amount))
    if UNITS[unit].kind == "bits per weight":
        cost = ""
    budget = Budget(amount, UNITS[unit], cost.rstrip("=") or None)
    assert Budget.parse(str(budget)) == budget


@given(st.data(), st.integers(0, 10**12), st.integers(0, 10**9), st.integers(1, 10**12), st.booleans())
def test_what_is_told_as_enough_is_enough(data, spent, fixed, highest, fine):
    unit = data.draw(st.sampled_from(list(dict.fromkeys(UNITS.values()))))
    alike = [other.written for other in MEASURED if other.kind == unit.kind] or ["bit-MACs"]
    whole = account(highest, data.draw(st.sampled_from(alike)), cost=unit.usual or "latency", fixed=fixed)
    asked = Budget.parse(unit.enough(spent, whole, fine=fine))
    assert asked.unit == unit
    assert asked.capacity(whole) >= spent


@pytest.mark.parametrize(
    ("written", "unit", "words"),
    [
        ("12ms", "bit-MACs", "budget 12ms is an amount of time, and latency counts bit-MACs: ask for a share of it, "
                             "such as latency=70%, or for a whole number of bit-MACs"),
        ("2MB", "ns", "is an amount of memory, and latency counts ns: ask for an amount in ns, us, ms, s, or for a"),
        ("3mJ", "ns", "amount of energy"),
        ("12ms", "", "counts what its table does not say: say it in the table, such as `# unit: ns`"),
        ("3bpw", "ns", "amount of bits per weight"),
    ],
)  # fmt: skip
def test_an_amount_of_something_else_is_refused_with_what_fits(written, unit, words):
    with pytest.raises(BudgetError) as caught:
        Budget.parse(written).capacity(account(unit=unit))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_that_lacks_fixed_layers_cannot_carry_a_budget_for_the_whole_network():
    partial = account(lacking=("stem at w8a8", "head at w8a8"))
    assert Budget.parse("70%").capacity(partial) == 700
    assert Budget.parse("123").capacity(partial) == 123
    with pytest.raises(BudgetError, match=r"no number for 2 of its fixed layers \(stem at w8a8, head at w8a8\)"):
        Budget.parse("12ms").capacity(partial)


def test_budgets_of_one_kind_lie_on_one_axis():
    some = [Budget.parse(written) for written in ("800us", "0.001s", "1.2ms")]
    assert len({budget.axis for budget in some}) == 1
    assert [float(budget.place(UNITS["ms"])) for budget in some] == [0.8, 1.0, 1.2]
    assert Budget.parse("70%").place() == 70
    assert Budget.parse("70%").axis != Budget.parse("memory=70%").axis != Budget.parse("2MB").axis
