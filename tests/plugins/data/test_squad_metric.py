"""F1 and exact match on cases worked out by hand, as the official script of SQuAD v1.1 defines them."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bitplan.adapters.torchvision import torchvision
from bitplan.plugins.data.squad import exact_match, f1, normalize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat's\tpyjamas!\n", "cats pyjamas"),
        ("an apple a day", "apple day"),
        ("A", ""),
        ("", ""),
        ("U.S.A.", "usa"),
        ("the-cat", "thecat"),  # punctuation goes first, so this is no article
        ("a.n", ""),  # and this becomes one
        ("Theatre another", "theatre another"),
        ("1,000.5 km²", "10005 km²"),
        ("Zürich – ÉCOLE", "zürich – école"),  # only ASCII's punctuation is removed, accents stay
        ("東京、", "東京、"),
        ("“the” name", "“ ” name"),
        ("no\u00a0break", "no break"),
    ],
)
def test_normalized(text, expected):
    assert normalize(text) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "expected_f1", "expected_match"),
    [
        ("Denver Broncos", ["Denver Broncos"], 1, 1),
        ("the Denver Broncos.", ["denver  broncos"], 1, 1),
        ("the big red fox", ["a red fox"], 4 / 5, 0),  # 2 of 3 words right, 2 of 2 found
        ("fox", ["a red fox"], 2 / 3, 0),  # 1 of 1, 1 of 2
        ("fox red", ["red fox"], 1, 0),  # F1 knows no order
        ("New New York", ["New York"], 4 / 5, 0),  # a word counts as often as both have it
        ("New York", ["New New York"], 4 / 5, 0),
        ("in 1990", ["1991", "1990", "year 1990 or so"], 2 / 3, 0),  # the best of several: 1 of 2, 1 of 1
        ("1990", ["1991", "the 1990"], 1, 1),
        ("", ["something"], 0, 0),
        ("the", ["something"], 0, 0),
        ("a", ["The"], 0, 1),  # both are nothing: they match, and share no word
        ("Beyonce", ["Beyoncé"], 0, 0),
        ("BEYONCÉ", ["Beyoncé"], 1, 1),
        ("well-known", ["well known"], 0, 0),
        ("$5", ["5"], 1, 1),
    ],
)
def test_scores_by_hand(prediction, answers, expected_f1, expected_match):
    assert f1(prediction, answers) == pytest.approx(expected_f1, abs=1e-12)
    assert exact_match(prediction, answers) == expected_match


TEXTS = st.lists(st.sampled_from(["the", "A", "red", "fox", "Fox", "fox's", "–", "é", ",", "1,5"]), max_size=6).map(
    " ".join
)


@given(prediction=TEXTS, answers=st.lists(TEXTS, min_size=1, max_size=3))
def test_scores_equal_those_of_torchmetrics(prediction, answers):
    torchvision()  # torchmetrics imports it, and it may need help
    from torchmetrics.functional.text import squad

    assume(all(map(normalize, [prediction, *answers])))  # there it follows version 2 where nothing is left
    found = squad(
        {"prediction_text": prediction, "id": "q"},
        {"answers": {"answer_start": [0] * len(answers), "text": answers}, "id": "q"},
    )
    assert 100 * f1(prediction, answers) == pytest.approx(float(found["f1"]), rel=1e-5)
    assert 100 * exact_match(prediction, answers) == float(found["exact_match"])
