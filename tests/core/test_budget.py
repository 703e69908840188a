import pytest

from bitplan.core.budget import Budget
from bitplan.core.errors import BudgetError
from bitplan.core.units import Account


def account(highest=1000, unit="ns", **changes):
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
        ("123456", 7, 123456, "123456"),
        (123456, 7, 123456, "123456"),
        ("bops=5", 7, 5, "bops=5"),
        ("99.99%", 3, 2, "99.99%"),  # rounded down, never up
    ],
)
def test_budgets_are_read_exactly(written, reference, capacity, shown):
    budget = Budget.parse(written)
    assert budget.capacity(account(reference)) == capacity
    assert str(budget) == shown
    assert Budget.parse(shown) == budget


@pytest.mark.parametrize(
    "wrong", ["70 percent", "", "%", "-5%", "1.5", "memory=", "memory=2bpw", 70.0, 0.0, "1e3%", "nan%"]
)
def test_what_is_no_budget_is_refused_with_how_to_write_one(wrong):
    with pytest.raises(BudgetError) as caught:
        Budget.parse(wrong)
    assert "write" in str(caught.value)
