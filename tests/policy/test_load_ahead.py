"""What is sent ahead to a device's pool: it can arrive in time, is worth more than what it pushes out, and is
bounded; what the next layers are predicted to use does not leave for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spice_moe import _core

policy = _core.policy
RULE = policy.to_device
N_GROUPS, N_EXPERTS = 5, 6


def f32(x: float) -> float:
    """As the core keeps chances."""
    return float(np.float32(x))


@dataclass(frozen=True)
class Coming:
    """A predicted layer, `horizon` = its place in the list."""

    group: int
    chances: Sequence[float]
    present: frozenset[int]


@st.composite
def coming(draw: st.DrawFn) -> list[Coming]:
    first = draw(st.integers(0, N_GROUPS - 1))
    chance = st.floats(0, 1, width=32)
    return [
        Coming(
            (first + d) % N_GROUPS,
            draw(st.lists(chance, min_size=N_EXPERTS, max_size=N_EXPERTS)),
            draw(st.frozensets(st.integers(0, N_EXPERTS - 1))),
        )
        for d in range(draw(st.integers(0, 4)))
    ]


def told(layers: list[Coming], layer_seconds: float = 1.0) -> policy.LoadAhead:
    ahead = policy.LoadAhead(n_groups=N_GROUPS, n_experts=N_EXPERTS, max_horizon=6)
    ahead.begin()
    for horizon, layer in enumerate(layers, 1):
        ahead.add(layer.group, horizon, horizon * layer_seconds, layer.chances, layer.present)
    return ahead


@given(
    coming(),
    st.floats(0.01, 3),
    st.floats(0, 5),
    st.integers(0, 10),
)
def test_what_is_planned_arrives_in_time_and_is_worth_its_place(
    layers: list[Coming], layer_seconds: float, queued: float, n_free: int
) -> None:
    plan = told(layers, layer_seconds).plan(
        bytes_per_second=1.0, queued_bytes=queued, slab_bytes=1.0, n_free=n_free
    )
    assert len(plan) <= RULE["max_queue"]
    by_group = {layer.group: layer for layer in layers}
    for place, load in enumerate(plan, 1):
        layer = by_group[load["group"]]
        assert load["expert"] not in layer.present
        assert load["chance"] == f32(layer.chances[load["expert"]]) >= f32(RULE["p_min"])
        # Sent one after the other, behind what the link has in hand.
        assert queued + place <= RULE["share"] * load["horizon"] * layer_seconds + 1e-6
    assert [load["horizon"] for load in plan] == sorted(load["horizon"] for load in plan)
    assert len({(load["group"], load["expert"]) for load in plan}) == len(plan)


@given(coming())
def test_what_is_predicted_does_not_leave_until_the_next_call(layers: list[Coming]) -> None:
    ahead = told(layers)
    expected = {
        (layer.group, e)
        for layer in layers
        for e, chance in enumerate(layer.chances)
        if f32(chance) >= f32(RULE["p_min"])
    }
    everything = [(g, e) for g in range(N_GROUPS) for e in range(N_EXPERTS)]
    assert {id for id in everything if ahead.needed(*id)} == expected
    ahead.begin()
    assert not any(ahead.needed(*id) for id in everything)
    assert ahead.plan(bytes_per_second=1e9, slab_bytes=1.0) == []


def test_the_plan_is_bounded_and_takes_the_likeliest() -> None:
    chances = np.linspace(0.3, 0.9, N_EXPERTS)
    layers = [Coming(g, [float(c) for c in chances], frozenset()) for g in range(4)]
    plan = told(layers).plan(bytes_per_second=1e9, slab_bytes=1.0)
    assert len(plan) == RULE["max_queue"]
    assert min(load["chance"] for load in plan) >= sorted([*chances] * 4)[-RULE["max_queue"]] - 1e-6


def test_a_link_that_is_too_slow_or_unknown_sends_nothing() -> None:
    layers = [Coming(0, [1.0] * N_EXPERTS, frozenset()), Coming(1, [1.0] * N_EXPERTS, frozenset())]
    assert told(layers).plan(bytes_per_second=0.0, slab_bytes=1.0) == []
    assert told(layers).plan(bytes_per_second=0.5, slab_bytes=1.0) == []
    assert [load["horizon"] for load in told(layers).plan(bytes_per_second=0.7, slab_bytes=1.0)] == [2]


def test_arguments_are_checked() -> None:
    ahead = policy.LoadAhead(n_groups=2, n_experts=2, max_horizon=1)
    for bad in ((2, 1, 1.0, [0.0, 0.0]), (0, 2, 1.0, [0.0, 0.0]), (0, 1, 1.0, [0.0])):
        with pytest.raises(ValueError):
            ahead.add(*bad)
    with pytest.raises(ValueError):
        ahead.needed(0, 2)
