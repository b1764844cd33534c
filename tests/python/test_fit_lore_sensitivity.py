"""The curve of what replaced experts cost together (fit_lore_sensitivity)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spice_moe.fit_lore_sensitivity import concave

numbers = st.floats(0, 8, width=16)


def test_points_that_bend_down_are_the_curve() -> None:
    points = [(0.25, 0.4), (0.5, 0.6), (1.0, 0.7)]
    np.testing.assert_allclose(concave(points), points, rtol=3e-3)


def test_noise_evens_out() -> None:
    curve = concave([(0.5, 0.6), (1.0, 0.4)])  # it does not fall: flat, between the two
    assert [x for x, _ in curve] == [0.5, 1.0]
    assert curve[0][1] == pytest.approx(curve[1][1], rel=2e-3)
    assert 0.4 < curve[0][1] < 0.6
    curve = concave([(0.25, 0.1), (0.5, 0.3), (1.0, 0.6)])  # it does not bend up: a line
    assert curve[0][1] / 0.25 == pytest.approx(curve[2][1], rel=3e-3)
    assert 0.1 < curve[0][1] < 0.15


def test_nothing_replaced_has_no_curve() -> None:
    assert concave([(0.0, 0.0), (0.0, 0.1), (0.5, 0.0)]) == []


@given(st.lists(st.tuples(numbers, numbers), max_size=5))
def test_it_grows_and_bends_down(points: list[tuple[float, float]]) -> None:
    curve = np.array([(0.0, 0.0), *concave(points)])
    steps = np.diff(curve, axis=0)
    assert (steps > 0).all()
    slopes = steps[:, 1] / steps[:, 0]
    assert (np.diff(slopes) < 0.02 * curve[-1, 1] / steps[1:, 0]).all() if len(slopes) > 1 else True
