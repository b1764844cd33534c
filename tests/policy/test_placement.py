"""Placement: `spice` against every possible choice, on random calls; the others against their rules."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spice_moe import _core
from spice_moe._core import sim

INF = float("inf")


def costs(device: float, host: float, per_row: float, bandwidth: float, call: float) -> sim.PlacementCosts:
    c = sim.PlacementCosts()
    c.device = sim.ExpertCost(device, 0.01)
    c.host = sim.ExpertCost(host, per_row)
    c.link_bandwidth = bandwidth
    c.host_call = call
    return c


@st.composite
def calls(draw: st.DrawFn) -> dict:
    n = draw(st.integers(1, 7))
    seconds = st.floats(0.0, 4.0)
    return {
        "rows": draw(st.lists(st.integers(1, 6), min_size=n, max_size=n)),
        "on_device": draw(st.lists(st.sampled_from([0.0, 1.5, INF, INF, INF]), min_size=n, max_size=n)),
        "costs": costs(
            draw(st.floats(0.01, 2.0)),
            draw(seconds),
            draw(seconds),
            draw(st.floats(0.2, 4.0)),
            draw(st.floats(0.0, 1.0)),
        ),
        "slab_bytes": 2,
        "link_queued": draw(seconds),
    }


@settings(max_examples=200, deadline=None)
@given(call=calls(), prefetch_queued=st.sampled_from([0.0, 3.0]))
def test_spice_is_the_best_choice(call: dict, prefetch_queued: float) -> None:
    places = sim.place("spice", **call, prefetch_queued=prefetch_queued)
    mine = sim.finish_time(places, **call)
    choices = ["fh" if t == INF else "d" for t in call["on_device"]]
    best = min(sim.finish_time("".join(choice), **call) for choice in itertools.product(*choices))
    assert mine <= best + 1e-9
    fewest = min(
        choice.count("f")
        for choice in itertools.product(*choices)
        if sim.finish_time("".join(choice), **call) <= best
    )
    assert places.count("f") <= fewest or mine < best
    assert places.count("+") <= 1 or prefetch_queued < mine


@settings(max_examples=100, deadline=None)
@given(call=calls())
def test_every_strategy_keeps_the_contract(call: dict) -> None:
    times = {}
    for name in _core.placement_names():
        places = sim.place(name, **call)
        for letter, there in zip(places, call["on_device"], strict=True):
            assert letter in ("dh" if there < INF else "fh+")
        times[name] = sim.finish_time(places, **call)
    assert times["spice"] <= min(times[name] for name in ("static", "all-fetch", "fiddler")) + 1e-9


def test_wrong_arguments_are_named() -> None:
    good = {"rows": [1], "on_device": [INF], "costs": sim.PlacementCosts(), "slab_bytes": 1}
    with pytest.raises(ValueError, match="no placement is called 'x'"):
        sim.place("x", **good)
    with pytest.raises(ValueError, match="equal lengths"):
        sim.place("spice", **good | {"rows": [1, 2]})
    with pytest.raises(ValueError, match="letters"):
        sim.finish_time("x", **good)
