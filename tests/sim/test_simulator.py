"""What must hold for every strategy on every trace: bounds on misses and time, agreement with the replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spice_moe._core import policy, sim

CACHES = ["on-demand", "lru", "lfu", "least-stale"]
SLAB = 10.0


def machine(*, device: bool = True, chunk: float = 0.0, contention: float = 0.0) -> sim.Machine:
    m = sim.Machine()
    m.has_device = device
    m.host = sim.EngineSpec(20.0, 40.0, 0.1)
    m.device = sim.EngineSpec(100.0, 1e9, 0.02)
    m.link = sim.LinkSpec(10.0, 0.05, chunk)
    m.disk = sim.LinkSpec(8.0, 0.1, chunk)
    m.layer_call = 0.3
    m.contention = contention
    return m


def options(strategy: str, slots: int, **fields: Any) -> sim.SimOptions:
    o = sim.SimOptions()
    o.strategy, o.slots = strategy, slots
    for name, value in fields.items():
        setattr(o, name, value)
    return o


def play(ids: np.ndarray, lens: list[int], n_experts: int, m: sim.Machine, o: sim.SimOptions) -> dict:
    model = sim.Model([SLAB] * ids.shape[0], 5.0)
    return sim.simulate(ids, lens, n_experts=n_experts, machine=m, model=model, options=o)


@st.composite
def traces(draw: st.DrawFn) -> tuple[np.ndarray, list[int], int]:
    """(ids, lens, n_experts): a few short sequences, each token's experts distinct."""
    layers, n_experts = draw(st.integers(1, 4)), draw(st.integers(2, 7))
    top_k = draw(st.integers(1, min(3, n_experts)))
    lens = draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = rng.random((layers, n_experts)) ** draw(st.integers(0, 3))
    noise = rng.random((layers, sum(lens), n_experts))
    return np.argsort(-skew[:, None] * noise, axis=2)[..., :top_k].astype(np.int32), lens, n_experts


def least_misses(ids: np.ndarray, n_slots: int, batch: int, lens: list[int]) -> int:
    """The misses that no cache of that size avoids: Belady's rule, free not to keep what came."""
    uses: list[tuple[int, set[tuple[int, int]]]] = []
    at = 0
    for length in lens:
        for token in range(at, at + length, batch):
            for layer in range(ids.shape[0]):
                part = ids[layer, token : min(token + batch, at + length)]
                uses.append((layer, {(layer, int(e)) for e in part.ravel()}))
        at += length
    following: dict[tuple[int, int], list[int]] = {}
    for number, (_, slabs) in enumerate(uses):
        for slab in slabs:
            following.setdefault(slab, []).append(number)
    pool: set[tuple[int, int]] = set()
    misses = 0
    for number, (_, slabs) in enumerate(uses):
        misses += len(slabs - pool)
        pool |= slabs

        def next_use(slab: tuple[int, int], number: int = number) -> float:
            return next((n for n in following[slab] if n > number), float("inf"))

        while len(pool) > n_slots:
            pool.remove(max(pool, key=next_use))
    return misses


@settings(max_examples=60, deadline=None)
@given(trace=traces(), data=st.data())
def test_bounds_that_no_strategy_passes(trace: tuple, data: st.DataObject) -> None:
    ids, lens, n_experts = trace
    layers, tokens, top_k = ids.shape
    slots = data.draw(st.integers(layers, layers * n_experts))
    m = machine(
        device=data.draw(st.booleans()),
        chunk=data.draw(st.sampled_from([0.0, 3.0])),
        contention=data.draw(st.sampled_from([0.0, 0.2])),
    )
    batch = data.draw(st.sampled_from([1, 1, 3]))
    predictor = data.draw(st.sampled_from(["", "history", "replay"]))
    memory = data.draw(st.sampled_from([0, 0, 3, 8])) if m.has_device else 0
    least = least_misses(ids, slots, batch, lens)
    for name in [*sim.strategy_names(), *sim.belady_names()]:
        o = options(name, slots, batch=batch, predictor=predictor, memory_slots=memory)
        r = play(ids, lens, n_experts, m, o)
        uses = r["hits"] + r["late"] + r["misses"]
        assert r["tokens"] == tokens
        assert uses >= tokens * layers * top_k / batch
        # Whatever is not in the pool by itself was fetched, loaded ahead, or computed by the host.
        assert r["fetched"] + r["ahead"] + r["hosted"] >= least, name
        # Time: engines and links do one thing at a time; what began last may end after the run.
        disk = 0.1 + SLAB / 8.0  # seconds of one slab
        link = 0.05 + SLAB / 10.0 if m.has_device else disk
        assert r["total_seconds"] == pytest.approx(r["seconds"])
        assert r["seconds"] >= r["other_seconds"] + r["device_busy"] * (1 - 1e-12) - 1e-9, name
        assert r["seconds"] >= r["host_busy"] - 1e-9
        assert r["seconds"] >= r["link_busy"] - link - 1e-9
        assert r["seconds"] >= r["disk_busy"] - disk - 1e-9
        assert r["link_busy"] <= (r["fetched"] + r["ahead"]) * link + 1e-9
        assert r["ahead_used"] + r["ahead_wasted"] <= r["ahead"]
        assert r["misses"] >= r["fetched"]


@settings(max_examples=60, deadline=None)
@given(trace=traces(), data=st.data())
def test_caches_count_as_the_replay_does(trace: tuple, data: st.DataObject) -> None:
    ids, lens, n_experts = trace
    layers, _, top_k = ids.shape
    slots = data.draw(st.integers(min(2 * top_k, n_experts), layers * n_experts))
    keep = data.draw(st.booleans())
    device = data.draw(st.booleans())
    for name in [*CACHES, "belady"]:
        # In calls of several tokens the simulator fetches those with most rows first, the replay does not.
        batch = data.draw(st.sampled_from([1, 2])) if name == "belady" else 1
        o = options(name, slots, keep=keep, batch=batch)
        r = play(ids, lens, n_experts, machine(device=device), o)
        more = {"n_experts": n_experts, "keep": keep, "batch": batch}
        if name == "belady":
            expected = policy.belady(ids, lens, slots, **more)
        else:
            expected = policy.replay(ids, lens, slots, name, **more)
        assert (r["hits"], r["misses"]) == (expected["hits"], expected["misses"]), name
        assert r["fetched"] == r["misses"]


@settings(max_examples=40, deadline=None)
@given(trace=traces(), name=st.sampled_from(["lru", "belady"]))
def test_more_slots_never_cost_hits_or_time(trace: tuple, name: str) -> None:
    """LRU and Belady are stack algorithms."""
    ids, lens, n_experts = trace
    before, seconds = -1, float("inf")
    for slots in range(ids.shape[2], ids.shape[0] * n_experts + 1):
        r = play(ids, lens, n_experts, machine(device=False), options(name, slots))
        assert r["hits"] >= before
        assert r["seconds"] <= seconds + 1e-9
        before, seconds = r["hits"], r["seconds"]


@settings(max_examples=30, deadline=None)
@given(trace=traces())
def test_a_second_pass_over_everything_is_compute_alone(trace: tuple) -> None:
    ids, lens, n_experts = trace
    layers, tokens, top_k = ids.shape
    twice = np.concatenate([ids, ids], axis=1)
    everything = layers * n_experts
    for name in CACHES:
        once = play(ids, lens, n_experts, machine(), options(name, everything))
        both = play(twice, lens * 2, n_experts, machine(), options(name, everything))
        per_layer = 0.3 + 5.0 / layers / 100.0 + 0.02 + top_k * SLAB / 100.0
        assert both["seconds"] - once["seconds"] == pytest.approx(tokens * layers * per_layer)


@settings(max_examples=30, deadline=None)
@given(trace=traces())
def test_an_oracle_with_time_enough_hides_every_load_but_the_first(trace: tuple) -> None:
    ids, _, n_experts = trace
    layers, tokens, top_k = ids.shape
    m = machine()
    m.layer_call = 60.0  # all the loads of a few layers fit
    r = play(ids, [tokens], n_experts, m, options("promoe", layers * n_experts, predictor="replay"))
    assert r["late"] == 0
    assert r["misses"] == top_k  # the first layer of the first token


def test_prefetch_helps_where_the_link_idles_and_not_by_magic() -> None:
    rng = np.random.default_rng(1)
    ids = np.argsort(rng.random((6, 60, 16)), axis=2)[..., :2].astype(np.int32)
    slots = 40
    m = machine()
    m.layer_call = 3.0
    lru = play(ids, [60], 16, m, options("lru", slots))
    ahead = play(ids, [60], 16, m, options("specprefetch", slots, predictor="replay"))
    assert ahead["seconds"] < lru["seconds"]
    assert ahead["hits"] > lru["hits"]
    assert ahead["link_bytes"] >= 0.99 * (lru["link_bytes"] - 2 * slots * SLAB)
    blind = play(ids, [60], 16, m, options("specprefetch", slots, predictor="replay", recall=[0.3]))
    assert blind["seconds"] > ahead["seconds"]


def test_runs_repeat_themselves() -> None:
    rng = np.random.default_rng(2)
    ids = np.argsort(rng.random((4, 40, 8)), axis=2)[..., :2].astype(np.int32)
    for name in sim.strategy_names():
        o = options(name, 12, draft_seconds=0.2, draft=0)
        assert play(ids, [20, 20], 8, machine(), o) == play(ids, [20, 20], 8, machine(), o)


@pytest.mark.parametrize("name", sim.strategy_names())
def test_prompts_and_drafts(name: str) -> None:
    rng = np.random.default_rng(3)
    ids = np.argsort(rng.random((3, 50, 8)), axis=2)[..., :2].astype(np.int32)
    for device in (True, False):
        r = play(ids, [25, 25], 8, machine(device=device), options(name, 7, prefill=10))
        assert r["prefill_tokens"] == 20
        assert r["tokens"] == 30
        assert r["total_seconds"] == pytest.approx(r["seconds"] + r["prefill_seconds"])
        o = options(name, 7, draft=3, draft_seconds=0.1, acceptance=0.6)
        drafted = play(ids, [25, 25], 8, machine(device=device), o)
        assert drafted["tokens"] == 50
        assert drafted["steps"] < 50
        assert drafted["draft_seconds"] > 0
