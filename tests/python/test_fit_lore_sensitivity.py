"""The curve of what replaced experts cost together (fit_lore_sensitivity)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from spice_moe.fit_lore_sensitivity import concave

numbers = st.floats(0, 10, width=16)


def test_the_points_that_the_curve_bends_at() -> None:
    assert concave([(0.25, 0.4), (0.5, 0.6), (1.0, 0.7)]) == [(0.25, 0.4), (0.5, 0.6), (1.0, 0.7)]
    assert concave([(0.25, 0.1), (0.5, 0.6), (1.0, 0.7)]) == [(0.5, 0.6), (1.0, 0.7)]  # under the line
    assert concave([(0.5, 0.6), (1.0, 0.5)]) == [(0.5, 0.6)]  # noise: it does not fall
    assert concave([(0.0, 0.0), (0.0, 0.1)]) == []  # nothing was replaced


@given(st.lists(st.tuples(numbers, numbers), max_size=6))
def test_it_lies_on_or_above_all_points_and_bends_down(points: list[tuple[float, float]]) -> None:
    curve = np.array([(0.0, 0.0), *concave(points)])
    assert set(map(tuple, curve[1:].tolist())) <= set(points)
    steps = np.diff(curve, axis=0)
    assert (steps > 0).all()
    assert (np.diff(steps[:, 1] / steps[:, 0]) < 1e-9).all()
    for x, y in points:
        if x > 0:
            assert np.interp(x, *curve.T) >= y - 1e-9
