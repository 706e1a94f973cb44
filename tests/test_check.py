"""Exercise checks: right, wrong with its cause, and not answered; never an exception for a wrong answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nbkit import check
from nbkit.errors import InputError


@pytest.mark.parametrize(("got", "want"), [
    (0.5, 0.5 + 1e-9), ([1, 2], np.array([1, 2])), (torch.ones(2), [1, 1]), ("a", "a"), ({"x": 1}, {"x": 1}), (np.nan, np.nan), ([], []),
    (np.bool_(True), True),
])
def test_right(got, want):
    card = check.expect("x", got, want)
    assert card and card.state == "right"


@pytest.mark.parametrize(("got", "want", "text"), [
    ([1, 2, 3], [1, 2], "the shape is (3,), expected (2,)"),
    ([1.0, 2.5], [1.0, 2.0], "1 of 2 values differ; the largest difference is 0.5 at index (1,)"),
    (2, 1, "the largest difference is 1 (allowed"),
    ([1.0, np.nan], [1.0, 2.0], "1 of 2 values are NaN"),
    (np.inf, 1.0, "largest difference is inf"),
    ("one", 1.0, "got str 'one', expected numbers"),
    ([[1], [2, 3]], [1, 2], "got list"),
    ("b", "a", "got 'b', which is not the expected str"),
    (torch.tensor([True, False]), [True, True], "1 of 2 values differ"),
])
def test_wrong_says_how(got, want, text):
    card = check.expect("x", got, want)
    assert card.state == "wrong" and text in card.message


@pytest.mark.parametrize("got", [None, ...])
def test_open(got):
    card = check.expect("x", got, 1.0)
    assert card.state == "open" and not card


def test_first_reason_that_holds_is_told():
    why = {lambda x: x["no"]: "raises, so it does not hold", lambda x: x > 10: "too big", lambda x: x == 2: "twice", lambda x: True: "any"}
    assert check.expect("x", 2.0, 1.0, why=why).message == "twice"
    assert check.expect("x", 1.0, 1.0, why=why).state == "right"


def test_close_with_known_wrong_answers():
    hints = [(np.array([3.0, 4.0]), "not normalised"), ([0.8, 0.6], "the order is reversed")]
    assert check.close([0.8, 0.6], [0.6, 0.8], hints=hints).message == "the order is reversed"
    assert check.close([3, 4], [0.6, 0.8], hints=hints).message == "not normalised"
    assert "differ" in check.close([0, 0], [0.6, 0.8], hints=hints).message


def test_negative_tolerance_is_refused():
    with pytest.raises(InputError, match="atol: got -1"):
        check.expect("x", 1, 1, atol=-1)


def test_card_html_is_escaped():
    html = check.expect("<b>", "<i>", "x")._repr_html_()
    assert "&lt;b&gt;" in html and "<i>" not in html and "nbkit-check" in html
