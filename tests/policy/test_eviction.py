"""The eviction strategies against plain references, on random calls; what each must never do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import REFERENCES, Options, Spice, best_possible, replay
from spice_moe._core import policy

NAMES = policy.eviction_names()
EXACT = [name for name in NAMES if name != "spice"]


@st.composite
def routings(draw: st.DrawFn, tokens: int = 12, layers: int = 3, experts: int = 6) -> tuple:
    """(ids, lens, n_experts): a few short sequences, each token's experts distinct."""
    n_layers = draw(st.integers(1, layers))
    n_experts = draw(st.integers(2, experts))
    top_k = draw(st.integers(1, min(3, n_experts)))
    lens = draw(st.lists(st.integers(0, tokens // 2), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = rng.random((n_layers, n_experts)) ** draw(st.integers(0, 3))
    ids = np.empty((n_layers, sum(lens), top_k), np.int16)
    for layer in range(n_layers):
        for token in range(sum(lens)):
            ids[layer, token] = np.argsort(-skew[layer] * rng.random(n_experts))[:top_k]
    return ids, lens, n_experts


@st.composite
def option_sets(draw: st.DrawFn, slots: int = 18) -> Options:
    return Options(
        n_slots=draw(st.integers(1, slots)),
        batch=draw(st.integers(1, 4)),
        prefill=draw(st.sampled_from([0, 0, -1, 3])),
        wave=draw(st.sampled_from([0, 0, 1, 2, 5])),
        keep=draw(st.booleans()),
    )


def run(ids: np.ndarray, lens: list[int], options: Options, n_experts: int, name: str) -> dict:
    return policy.replay(ids, lens, strategy=name, n_experts=n_experts, **vars(options))


def belady(ids: np.ndarray, lens: list[int], options: Options, n_experts: int, **more: bool) -> dict:
    return policy.belady(ids, lens, n_experts=n_experts, **vars(options), **more)


def hits(result: dict) -> int:
    return result["hits"] + result["prefill_hits"]


def test_the_default_comes_first() -> None:
    assert NAMES[0] == "spice"
    assert set(NAMES) == set(REFERENCES)


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=150, deadline=None)
@given(routing=routings(), options=option_sets())
def test_equals_its_reference(name: str, routing: tuple, options: Options) -> None:
    ids, lens, n_experts = routing
    got = run(ids, lens, options, n_experts, name)
    expected = replay(ids, lens, options, lambda: REFERENCES[name](ids.shape[0], n_experts, ids.shape[2]))
    for which, (of_hits, of_misses) in enumerate([("hits", "misses"), ("prefill_hits", "prefill_misses")]):
        assert got[f"layer_{of_hits}"].tolist() == expected[0][:, which].tolist()
        assert got[f"layer_{of_misses}"].tolist() == expected[1][:, which].tolist()
        assert got[of_hits] == expected[0][:, which].sum()


class Twin:
    """Drives ``spice`` and its reference; each victim must be one that the reference allows."""

    def __init__(self, n_groups: int, n_experts: int, n_slots: int, top_k: int) -> None:
        shape = {"n_groups": n_groups, "n_experts": n_experts, "n_slots": n_slots, "top_k": top_k}
        self.real = policy.Eviction("spice", **shape)
        self.reference = Spice(n_groups, n_experts, top_k, n_slots=n_slots)

    def begin_call(self, *args: object) -> None:
        self.real.begin_call(*args)
        self.reference.begin_call(*args)

    def on_load(self, *slab: int) -> None:
        self.real.on_load(*slab)
        self.reference.on_load(*slab)

    def on_evict(self, *slab: int) -> None:
        self.real.on_evict(*slab)
        self.reference.on_evict(*slab)

    def victim(self, evictable) -> tuple[int, int] | None:
        victim = self.real.victim(evictable)
        allowed = self.reference.victims(evictable)
        assert victim in allowed if allowed else victim is None
        return victim


@settings(max_examples=300, deadline=None)
@given(routing=routings(tokens=40, experts=12), options=option_sets(), tell=st.booleans())
def test_spice_equals_its_reference(routing: tuple, options: Options, tell: bool) -> None:
    ids, lens, n_experts = routing
    top_k = ids.shape[2] if tell else 0
    expected = replay(ids, lens, options, lambda: Twin(ids.shape[0], n_experts, options.n_slots, top_k))
    if tell:
        again = replay(
            ids,
            lens,
            options,
            lambda: policy.Eviction(
                "spice", n_groups=ids.shape[0], n_experts=n_experts, n_slots=options.n_slots, top_k=top_k
            ),
        )
        got = run(ids, lens, options, n_experts, "spice")
        for one in (expected, again):
            assert got["layer_hits"].tolist() == one[0][:, 0].tolist()
            assert got["layer_prefill_hits"].tolist() == one[0][:, 1].tolist()


def test_spice_halves_full_count_rows() -> None:
    twin = Twin(1, 8, 3, 1)
    resident: set[int] = set()
    for step in range(1200):
        expert = (step * step // 7) % 5 if step % 3 else 0
        twin.begin_call(0, [expert])
        if expert not in resident:
            if len(resident) == 3:
                out = twin.victim(lambda g, e, pinned=expert: e != pinned)
                twin.on_evict(*out)
                resident.remove(out[1])
            twin.on_load(0, expert)
            resident.add(expert)
    assert twin.reference.rows.max() > 128


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_victims_are_resident_and_evictable(name: str, data: st.DataObject) -> None:
    """Calls, loads and evictions in any order, as prefetches and failed reads make them."""
    groups, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    strategy = policy.Eviction(name, n_groups=groups, n_experts=experts, n_slots=groups * experts)
    twin = policy.Eviction(name, n_groups=groups, n_experts=experts, n_slots=groups * experts)
    everything = [(g, e) for g in range(groups) for e in range(experts)]
    resident: set[tuple[int, int]] = set()
    for _ in range(data.draw(st.integers(0, 25))):
        action = data.draw(st.sampled_from(["call", "load", "evict", "victim"]))
        if action == "call":
            group = data.draw(st.integers(0, groups - 1))
            routed = data.draw(st.lists(st.integers(0, experts - 1), unique=True))
            weights = data.draw(
                st.one_of(
                    st.just([]),
                    st.lists(
                        st.sampled_from([0.0, 0.5, 1.0, -1.0, float("inf"), float("nan")]),
                        min_size=len(routed),
                        max_size=len(routed),
                    ),
                )
            )
            strategy.begin_call(group, routed, weights)
            twin.begin_call(group, routed, weights)
        elif action == "load" and len(resident) < len(everything):
            slab = data.draw(st.sampled_from([s for s in everything if s not in resident]))
            strategy.on_load(*slab)
            twin.on_load(*slab)
            resident.add(slab)
        elif action == "evict" and resident:
            slab = data.draw(st.sampled_from(sorted(resident)))
            strategy.on_evict(*slab)
            twin.on_evict(*slab)
            resident.remove(slab)
        elif action == "victim":
            allowed = data.draw(st.sets(st.sampled_from(everything)))
            victim = strategy.victim(lambda g, e, allowed=allowed: (g, e) in allowed)
            assert victim in resident & allowed if resident & allowed else victim is None
            again = strategy.victim(lambda g, e, allowed=allowed: (g, e) in allowed)
            assert again == victim, "asking changes nothing"
            if victim is not None and data.draw(st.booleans()):
                strategy.on_evict(*victim)
                assert twin.victim(lambda g, e, allowed=allowed: (g, e) in allowed) == victim, "deterministic"
                twin.on_evict(*victim)
                resident.remove(victim)


def calls_are_whole(ids: np.ndarray, options: Options, n_experts: int) -> bool:
    """No call is computed in waves, because it is asked for or routes to more experts than there are slots:
    what leaves between waves can cost a hit later that Belady's rule does not see."""
    rows = max(options.batch, ids.shape[1] if options.prefill < 0 else options.prefill)
    return options.wave == 0 and min(n_experts, rows * ids.shape[2]) <= options.n_slots


@settings(max_examples=150, deadline=None)
@given(routing=routings(tokens=6, layers=2, experts=4), options=option_sets(slots=4))
def test_belady_equals_exhaustive_search(routing: tuple, options: Options) -> None:
    ids, lens, n_experts = routing
    found, best = hits(belady(ids, lens, options, n_experts)), best_possible(ids, lens, options)
    assert found == best if calls_are_whole(ids, options, n_experts) else found <= best


@settings(max_examples=150, deadline=None)
@given(routing=routings(tokens=24), options=option_sets())
def test_nothing_beats_belady(routing: tuple, options: Options) -> None:
    ids, lens, n_experts = routing
    best = belady(ids, lens, options, n_experts)
    per_layer = belady(ids, lens, options, n_experts, per_layer=True)
    total = best["misses"] + best["prefill_misses"] + hits(best)
    for name in NAMES:
        one = run(ids, lens, options, n_experts, name)
        assert hits(one) <= hits(best) or not calls_are_whole(ids, options, n_experts)
        assert hits(one) + one["misses"] + one["prefill_misses"] == total
    if options.wave == 0:  # a part of the pool is narrower than the pool, so its waves are others
        small = max(options.batch, ids.shape[1]) * ids.shape[2] <= options.n_slots // ids.shape[0]
        assert not small or hits(per_layer) <= hits(best)


@settings(max_examples=100, deadline=None)
@given(routing=routings(tokens=24), keep=st.booleans(), name=st.sampled_from(["lru", "belady"]))
def test_more_slots_never_cost_hits(routing: tuple, keep: bool, name: str) -> None:
    """LRU and Belady are stack algorithms."""
    ids, lens, n_experts = routing
    before = 0
    for n_slots in range(ids.shape[2], ids.shape[0] * n_experts + 1):
        options = Options(n_slots, keep=keep)
        one = (
            belady(ids, lens, options, n_experts)
            if name == "belady"
            else run(ids, lens, options, n_experts, name)
        )
        assert one["hits"] >= before
        before = one["hits"]


@pytest.mark.parametrize("name", NAMES)
def test_everything_fits(name: str) -> None:
    ids = np.random.default_rng(3).permuted(np.tile(np.arange(8), (4, 50, 1)), axis=2)[:, :, :2]
    one = policy.replay(ids, [50], 32, name, n_experts=8)
    assert one["misses"] == sum(len(np.unique(layer)) for layer in ids)
    assert one["misses"] == policy.belady(ids, [50], 32, n_experts=8)["misses"]
    assert one["calls"] == 200


def sticky(n_layers: int, n_experts: int, top_k: int, tokens: int, seed: int) -> np.ndarray:
    """Synthetic routing about as local as real models': slowly changing popular experts, and stickiness."""
    rng = np.random.default_rng(seed)
    ids = np.empty((n_layers, tokens, top_k), np.int32)
    for layer in range(n_layers):
        logits = rng.normal(0, 1.0, n_experts)
        last = np.zeros(n_experts)
        for token in range(tokens):
            score = logits + 1.2 * last + rng.gumbel(size=n_experts)
            ids[layer, token] = np.argsort(-score)[:top_k]
            last[:] = 0
            last[ids[layer, token]] = 1
            logits = 0.985 * logits + rng.normal(0, 0.17, n_experts)
    return ids


def test_below_the_working_set_lru_has_nothing_and_spice_has() -> None:
    ids = sticky(12, 32, 4, 200, seed=1)
    # Every layer uses four experts per token. At best a slab is used by two tokens in a row, and then the 44
    # slabs of the other layers come between.
    for n_slots in (8, 12, 24, 44):
        assert policy.replay(ids, [200], n_slots, "lru", n_experts=32)["hits"] == 0
        assert policy.replay(ids, [200], n_slots, "on-demand", n_experts=32)["hits"] == 0
        spice = policy.replay(ids, [200], n_slots, "spice", n_experts=32)["hits"]
        best = policy.belady(ids, [200], n_slots, n_experts=32)["hits"]
        assert spice > 0.4 * best


def test_a_cyclic_scan() -> None:
    """The same experts for every token: what is evicted must be what was just used."""
    ids = np.tile(np.arange(2), (10, 100, 1))
    assert policy.replay(ids, [100], 18, "lru", n_experts=4)["hits"] == 0
    best = policy.belady(ids, [100], 12, n_experts=4)["hits"]
    assert policy.replay(ids, [100], 12, "spice", n_experts=4)["hits"] > 0.9 * best


@pytest.mark.parametrize("slots", [20, 60, 120, 200, 300])
def test_spice_has_fewer_misses_than_the_others(slots: int) -> None:
    ids = sticky(12, 32, 4, 300, seed=2)
    misses = {name: policy.replay(ids, [300], slots, name, n_experts=32)["misses"] for name in NAMES}
    assert misses["spice"] <= 1.02 * min(misses.values()), misses


def test_spice_is_monotonic_over_a_sweep_of_budgets() -> None:
    ids = sticky(12, 32, 4, 300, seed=4)
    sweep = [policy.replay(ids, [300], n, "spice", n_experts=32)["hits"] for n in range(8, 385, 8)]
    assert all(a <= b for a, b in itertools.pairwise(sweep)), sweep


def test_prompts_leave_every_layer_an_equal_share() -> None:
    """Whichever layers were full before, a scan of a pool that holds half of all ends level."""
    n_groups, n_experts, n_slots = 6, 8, 24
    strategy = policy.Eviction("spice", n_groups=n_groups, n_experts=n_experts, n_slots=n_slots, top_k=2)
    pool = {(group, expert) for group in range(3) for expert in range(n_experts)}
    for slab in pool:
        strategy.on_load(*slab)
    for _ in range(2):
        for group in range(n_groups):
            strategy.begin_call(group, list(range(n_experts)), [1.0] * n_experts)
            for expert in range(n_experts):
                if (group, expert) not in pool:
                    out = strategy.victim(lambda g, e, group=group: g != group)
                    strategy.on_evict(*out)
                    pool.remove(out)
                    strategy.on_load(group, expert)
                    pool.add((group, expert))
    shares = [sum(slab[0] == group for slab in pool) for group in range(n_groups)]
    assert shares[-1] == n_experts, "the last layer has just been used"
    assert max(shares[:-1]) - min(shares[:-1]) <= 1, shares


def test_a_long_prompt_does_not_flush_what_decode_needs() -> None:
    """Decode, then a call of 64 tokens that touches nearly all experts, then decode on the same experts."""
    ids = sticky(12, 32, 4, 300, seed=5)
    prompt = np.random.default_rng(6).permuted(np.tile(np.arange(32), (12, 64, 1)), axis=2)[:, :, :4]
    after = {}
    for name in NAMES:
        total = {}
        for tokens in (0, 64):
            # One pool over three sequences: only the second starts with a call of many tokens.
            parts = [ids[:, :150], prompt[:, :tokens], ids[:, 150:180]]
            strategy = policy.Eviction(name, n_groups=12, n_experts=32, n_slots=120, top_k=4)
            total[tokens] = decode_prompt_decode(strategy, parts, n_slots=120)
        after[name] = total[64] / total[0]
    assert after["spice"] > 0.9, after
    assert after["spice"] >= after["lru"], after


def decode_prompt_decode(strategy, parts: list[np.ndarray], n_slots: int) -> int:
    """Hits of the last part."""
    pool: set[tuple[int, int]] = set()
    found = 0
    for which, part in enumerate(parts):
        step = max(part.shape[1], 1) if which == 1 else 1
        for at in range(0, part.shape[1], step):
            for group in range(part.shape[0]):
                flat = part[group, at : at + step].ravel().tolist()
                experts = sorted(set(flat))
                strategy.begin_call(group, experts, [float(flat.count(e)) for e in experts])
                for e in experts:
                    if (group, e) in pool:
                        found += which == 2
                        continue
                    if len(pool) == n_slots:
                        # A call of many tokens goes in waves of eight.
                        out = strategy.victim(
                            lambda g, x, group=group, e=e, experts=experts: (
                                g != group or (x not in experts if len(experts) <= 8 else x // 8 != e // 8)
                            )
                        )
                        strategy.on_evict(*out)
                        pool.remove(out)
                    strategy.on_load(group, e)
                    pool.add((group, e))
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "best"}, "no eviction strategy is called 'best'; there are spice"),
        ({"n_slots": 0}, "n_slots"),
        ({"batch": 0}, "batch"),
        ({"prefill": -2}, "prefill"),
        ({"wave": -1}, "wave"),
        ({"n_experts": 3}, "expert id 3 is outside 0 .. 2"),
        ({"n_experts": 0}, "n_experts"),
        ({"lens": [3]}, "the sequences have 3 tokens, ids have 4"),
        ({"lens": [5, -1]}, "negative"),
        ({"ids": np.zeros((4, 2), int)}, "shape"),
        ({"ids": np.full((1, 4, 1), -1)}, "expert id -1"),
        ({"weights": np.ones((1, 4, 2), np.float32)}, "weights"),
    ],
)
def test_wrong_arguments_are_named(change: dict, message: str) -> None:
    good = {
        "ids": np.arange(4).reshape(1, 4, 1),
        "lens": [4],
        "n_slots": 2,
        "strategy": "lru",
        "n_experts": 4,
    }
    policy.replay(**good)
    with pytest.raises(ValueError, match=message):
        policy.replay(**good | change)


def test_no_tokens() -> None:
    nothing = np.zeros((2, 0, 1), int)
    assert policy.replay(nothing, [], 2, "spice", n_experts=4)["calls"] == 0
    assert policy.belady(nothing, [0, 0], 2, n_experts=4)["hits"] == 0
