"""The eviction strategies and the replay once more, as plainly as possible: what the C++ is compared with.

Every reference strategy keeps whole histories and looks at every resident for each victim. They have the
interface of ``spice_moe._core.policy.Eviction``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

Slab = tuple[int, int]
Evictable = Callable[[int, int], bool]
f32 = np.float32


class Reference:
    """What all share: who is resident. A subclass ranks slabs; the smallest rank leaves."""

    def __init__(self, n_groups: int, n_experts: int, top_k: int = 0) -> None:
        self.n_groups, self.n_experts, self.top_k = n_groups, n_experts, top_k
        self.residents: set[Slab] = set()
        self.stamp = 0
        self.last: dict[Slab, int] = {}

    def begin_call(self, group: int, experts: Sequence[int], weights: Sequence[float] = ()) -> None:
        for expert in experts:
            self.stamp += 1
            self.last[group, expert] = self.stamp

    def on_load(self, group: int, expert: int) -> None:
        self.stamp += 1
        self.last[group, expert] = self.stamp
        self.residents.add((group, expert))

    def on_evict(self, group: int, expert: int) -> None:
        self.residents.remove((group, expert))

    def rank(self, slab: Slab) -> tuple:
        raise NotImplementedError

    def candidates(self, evictable: Evictable) -> list[Slab]:
        return sorted(slab for slab in self.residents if evictable(*slab))

    def victim(self, evictable: Evictable) -> Slab | None:
        return min(self.candidates(evictable), key=self.rank, default=None)


class Lru(Reference):
    def rank(self, slab: Slab) -> tuple:
        return (self.last[slab],)


class OnDemand(Reference):
    def begin_call(self, group: int, experts: Sequence[int], weights: Sequence[float] = ()) -> None:
        pass

    def rank(self, slab: Slab) -> tuple:
        return (self.last[slab],)


class Lfu(Reference):
    def __init__(self, n_groups: int, n_experts: int, top_k: int = 0) -> None:
        super().__init__(n_groups, n_experts, top_k)
        self.uses: list[Slab] = []

    def begin_call(self, group: int, experts: Sequence[int], weights: Sequence[float] = ()) -> None:
        super().begin_call(group, experts, weights)
        self.uses += [(group, expert) for expert in experts]

    def rank(self, slab: Slab) -> tuple:
        return self.uses.count(slab), self.last[slab]


class LeastStale(Reference):
    def __init__(self, n_groups: int, n_experts: int, top_k: int = 0) -> None:
        super().__init__(n_groups, n_experts, top_k)
        self.group = -1
        self.before = 0  # the last stamp before this pass

    def begin_call(self, group: int, experts: Sequence[int], weights: Sequence[float] = ()) -> None:
        if group <= self.group:
            self.before = self.stamp
        self.group = group
        residents = [expert for expert in experts if (group, expert) in self.residents]
        super().begin_call(group, residents, weights)

    def rank(self, slab: Slab) -> tuple:
        group = slab[0]
        if group < self.group and self.last[slab] <= self.before:
            return 0, self.last[slab]
        wait = (group - self.group - 1) % self.n_groups + 1 if self.group >= 0 else group + 1
        return 1, -wait, self.last[slab]


class Spice(Reference):
    """In double precision: ``victims`` names all slabs that rounding may choose."""

    def __init__(self, n_groups: int, n_experts: int, top_k: int = 0, *, n_slots: int) -> None:
        super().__init__(n_groups, n_experts, top_k)
        self.n_slots, self.scan = n_slots, False
        start = min(1.0, max(top_k, 1) / n_experts)
        self.group = -1
        self.fast = np.full((n_groups, n_experts), start)
        self.slow = self.fast.copy()
        self.keep = self.fast * 2.3
        self.after = np.zeros((n_groups, n_experts, n_experts))
        self.rows = np.zeros((n_groups, n_experts))
        self.before: list[list[int]] = [[] for _ in range(n_groups)]

    def begin_call(self, group: int, experts: Sequence[int], weights: Sequence[float] = ()) -> None:
        self.group, self.scan = group, False
        if not experts:
            return
        if self.top_k <= 0 or len(experts) < self.top_k:
            self.top_k = len(experts)
        wide = len(experts) > self.top_k and 2 * len(experts) >= self.n_experts
        self.scan = wide and len(experts) * self.n_groups > self.n_slots
        many = len(experts) > self.top_k
        use, alpha = np.zeros(self.n_experts), 0.03
        use[list(experts)] = self.top_k / len(experts)
        if many and len(weights) == len(experts) and sum(weights) > 0:
            share = self.top_k * np.array(weights, np.float64) / sum(weights)
            use[list(experts)] = np.clip(share, 0.0, 1.0)
            alpha = min(alpha * len(experts) / self.top_k, 0.5)
        self.fast[group] += 0.6 * (use - self.fast[group])
        self.slow[group] += alpha * (use - self.slow[group])

        after, rows = self.after[group], self.rows[group]
        few = len(experts) <= max(self.n_experts // 4, 1)
        if few:
            for a in self.before[group]:
                if rows[a] == 255:
                    rows[a] //= 2
                    after[a] //= 2
                rows[a] += 1
                after[a, list(experts)] += 1
        self.before[group] = list(experts) if few else []
        follow = self.slow[group]
        if few:
            follow = np.mean([(after[a] + 2 * self.slow[group]) / (rows[a] + 2) for a in experts], axis=0)
        self.keep[group] = 0.3 * self.fast[group] + self.slow[group] + follow

    def density(self, slab: Slab) -> float:
        wait = (slab[0] - self.group - 1) % self.n_groups + 1 if self.group >= 0 else slab[0] + 1
        return float(self.keep[slab]) / wait

    def victims(self, evictable: Evictable) -> set[Slab]:
        candidates = self.candidates(evictable)
        if self.scan:  # from the fullest group, the present one last; of equals all that rounding may choose

            def residents(group: int) -> int:
                return 0 if group == self.group else sum(slab[0] == group for slab in self.residents)

            most = max((residents(group) for group, _ in candidates), default=0)
            candidates = [slab for slab in candidates if residents(slab[0]) == most]
        of = {slab: self.density(slab) for slab in candidates}
        return {slab for slab, density in of.items() if density <= min(of.values()) * (1 + 1e-4)}


REFERENCES: dict[str, type[Reference]] = {
    "on-demand": OnDemand,
    "lru": Lru,
    "lfu": Lfu,
    "least-stale": LeastStale,
    "spice": Spice,
}


@dataclass
class Options:
    n_slots: int
    batch: int = 1
    prefill: int = 0
    wave: int = 0
    keep: bool = False


@dataclass
class Call:
    group: int
    experts: list[int]
    weights: list[float]
    prefill: bool
    first: bool  # of a pool's life


def calls(ids: np.ndarray, lens: Sequence[int], options: Options) -> Iterator[Call]:
    """The layer calls of a trace; weights are counts of tokens."""
    start, fresh = 0, True
    for length in lens:
        end, at = start + length, start
        fresh = fresh or not options.keep
        while at < end:
            prefill = options.prefill != 0 and at == start
            n = options.batch if not prefill else length if options.prefill < 0 else options.prefill
            to = min(end, at + n)
            for group in range(ids.shape[0]):
                flat = [int(x) for x in ids[group, at:to].ravel()]
                experts = list(dict.fromkeys(flat))
                yield Call(group, experts, [float(flat.count(e)) for e in experts], prefill, fresh)
                fresh = False
            at = to
        start = end


def replay(
    ids: np.ndarray, lens: Sequence[int], options: Options, make: Callable[[], object]
) -> tuple[np.ndarray, np.ndarray]:
    """Hits and misses by [layer, prefill], any object with the strategies' interface."""
    hits, misses = np.zeros((ids.shape[0], 2), int), np.zeros((ids.shape[0], 2), int)
    wave = min(options.wave or options.n_slots, options.n_slots)
    pool: set[Slab] = set()
    strategy = None
    for call in calls(ids, lens, options):
        if call.first:
            strategy, pool = make(), set()
        group = call.group
        strategy.begin_call(group, call.experts, call.weights)
        missing = [e for e in call.experts if (group, e) not in pool]
        hits[group, int(call.prefill)] += len(call.experts) - len(missing)
        misses[group, int(call.prefill)] += len(missing)
        small = len(call.experts) <= wave
        for at in range(0, len(missing), wave):
            part = missing[at : at + wave]
            pinned = {(group, e) for e in (call.experts if small else part)}
            for e in part:
                if len(pool) == options.n_slots:
                    evictable = pool - pinned
                    out = strategy.victim(lambda g, x, evictable=evictable: (g, x) in evictable)
                    assert out in pool and out not in pinned
                    strategy.on_evict(*out)
                    pool.remove(out)
                strategy.on_load(group, e)
                pool.add((group, e))
    return hits, misses


def best_possible(ids: np.ndarray, lens: Sequence[int], options: Options) -> int:
    """The most hits by trying every choice of victims (and every order of the misses of calls in waves)."""
    lives: list[list[frozenset[Slab]]] = []
    for call in calls(ids, lens, options):
        if call.first:
            lives.append([])
        lives[-1].append(frozenset((call.group, e) for e in call.experts))
    wave = min(options.wave or options.n_slots, options.n_slots)

    def load(
        pool: frozenset[Slab], new: frozenset[Slab], stays: frozenset[Slab]
    ) -> Iterator[frozenset[Slab]]:
        """All ways to make room for ``new`` that spare ``stays``."""
        others = sorted(pool - stays)
        room = min(options.n_slots - len(new | stays), len(others))
        for kept in combinations(others, room):
            yield stays | new | frozenset(kept)

    def ends(pool: frozenset[Slab], missing: frozenset[Slab]) -> set[frozenset[Slab]]:
        """All pools in which loading ``missing`` in waves can end."""
        if not missing:
            return {pool}
        found: set[frozenset[Slab]] = set()
        for part in map(frozenset, combinations(sorted(missing), min(wave, len(missing)))):
            for next_pool in load(pool, part, frozenset()):
                found |= ends(next_pool, missing - part)
        return found

    def best(life: list[frozenset[Slab]]) -> int:
        reached = {frozenset(): 0}  # pool: the most hits on the way to it
        for wanted in life:
            now: dict[frozenset[Slab], int] = {}
            for pool, hits in reached.items():
                missing = wanted - pool
                small = len(wanted) <= wave
                for end in load(pool, missing, wanted & pool) if small else ends(pool, missing):
                    now[end] = max(now.get(end, 0), hits + len(wanted & pool))
            reached = now
        return max(reached.values())

    return sum(best(life) for life in lives)
