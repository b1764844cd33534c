"""Simulated runs: a routing trace on a machine under a strategy, in virtual time.

    from spice_moe import hardware, sim, sim_models, trace

    t = trace.load("deepseek-v2-lite.npz")
    run = sim.run(t, hardware.load("rtx4060"), sim_models.of_trace(t, "deepseek-v2-lite"), "spice", slots=500)
    print(run.tpot, run.hit_rate)

What is simulated, and what is not: docs/simulator.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _core
from .hardware import Hardware
from .sim_models import Shape
from .trace import Trace

#: Seconds of a drafted token, as a share of a token of the model with everything in the fast pool. MoE-SpAc
#: drafts with a small model, MoE-SpeQ with a quantised copy of the model itself.
DRAFT_COST = {"moe-spac": 0.12, "moe-speq": 0.6}


#: Strategies whose pool never changes: it starts with the experts that the whole trace uses most.
PROFILED = frozenset({"all-host", "static", "fiddler"})


def strategies() -> tuple[str, ...]:
    """Every strategy that can be simulated; the default first, Belady's bounds last."""
    return (*_core.sim.strategy_names(), *_core.sim.belady_names())


@dataclass(frozen=True)
class Options:
    """How a trace is played. See cpp/sim/simulator.h for what each does."""

    batch: int = 1
    prefill: int = 0
    keep: bool = True
    draft: int = 0
    draft_cost: float | None = None  #: None: DRAFT_COST of the strategy, 0.1 for others with a draft
    acceptance: float = 0.75
    fidelity: float = 0.9
    warm: bool = False  #: pools that are not split start as PROFILED's do
    predictor: str = ""
    recall: tuple[float, ...] = ()
    seed: int = 1


@dataclass(frozen=True)
class Run:
    """One simulated run. Times in seconds, counts of (call, expert) pairs of decode."""

    strategy: str
    slots: int
    share: float  #: slots of all experts
    tpot: float  #: seconds per decoded token
    prefill_seconds: float
    prefill_tokens: int
    hit_rate: float  #: ready in the fast pool
    late_rate: float  #: on the way there
    miss_rate: float
    fetch_rate: float  #: of all uses, fetched at once
    host_rate: float  #: of all uses, computed by the host
    ahead_per_token: float  #: slabs loaded ahead, per token
    ahead_used: float  #: share of them that was used
    link_bytes_per_token: float
    link_busy: float  #: share of the time
    host_busy: float
    device_busy: float
    other: float  #: seconds per token beside routed experts
    tokens_per_step: float
    joules_per_token: float | None  #: of decode; None where the machine's power is not known
    counts: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def cut(
    trace: Trace, sequences: int = 0, tokens: int = 0
) -> tuple[NDArray[np.int32], NDArray[np.int32], Any]:
    """(ids, lens, weights) of some sequences, spread evenly, and of each its first tokens (0: all)."""
    which, lens = _cut_tokens(trace, sequences, tokens)
    weights = None if trace.weights is None else trace.weights[:, which].astype(np.float32)
    return (
        np.ascontiguousarray(trace.ids[:, which], dtype=np.int32),
        np.array(lens, dtype=np.int32),
        weights,
    )


def _cut_tokens(trace: Trace, sequences: int, tokens: int) -> tuple[NDArray[np.int64], list[int]]:
    """The numbers of the tokens that `cut` keeps, and how many of each sequence."""
    n = len(trace.lens)
    chosen = sorted({i * n // sequences for i in range(sequences)}) if 0 < sequences < n else range(n)
    ends = np.cumsum(trace.lens)
    spans, lens = [], []
    for i in chosen:
        length = min(int(trace.lens[i]), tokens or int(trace.lens[i]))
        start = int(ends[i]) - int(trace.lens[i])
        spans.append(np.arange(start, start + length))
        lens.append(length)
    return np.concatenate(spans) if spans else np.arange(0), lens


def profile(trace: Trace) -> NDArray[np.int64]:
    """Uses of each expert, [layers, experts]: what strategies that never change start with."""
    return np.stack([np.bincount(layer.ravel(), minlength=trace.n_expert) for layer in trace.ids])


def resident_tpot(machine: Any, shape: Shape) -> float:
    """Seconds of one token when every expert is in the fast pool."""
    engine = machine.device if machine.has_device else machine.host
    weights = shape.other_bytes + shape.top_k * sum(shape.slab_bytes)
    return weights / engine.stream + shape.layers * (machine.layer_call + engine.call)


def run(
    trace: Trace,
    hardware: Hardware,
    shape: Shape,
    strategy: str,
    *,
    sequences: int = 0,
    tokens: int = 0,
    **how: Any,
) -> Run:
    """Simulate one strategy on a trace, cut as by `cut`. `how`: slots and what else `_play` takes."""
    return _play(_Played.of(trace, sequences, tokens), hardware, shape, strategy, **how)


@dataclass(frozen=True)
class _Played:
    """What every run on one trace is given."""

    ids: NDArray[np.int32]
    lens: NDArray[np.int32]
    weights: Any
    predictions: Any  #: None, or [layers, tokens, horizons, named]
    chances: Any
    profile: list[int]
    n_expert: int

    @staticmethod
    def of(trace: Trace, sequences: int = 0, tokens: int = 0) -> _Played:
        which, _ = _cut_tokens(trace, sequences, tokens)
        said: tuple[Any, Any] = (None, None)
        if trace.predictions is not None and trace.prediction_chances is not None:
            said = (
                np.ascontiguousarray(trace.predictions[:, which], dtype=np.int32),
                np.ascontiguousarray(trace.prediction_chances[:, which], dtype=np.float32),
            )
        return _Played(*cut(trace, sequences, tokens), *said, profile(trace).ravel().tolist(), trace.n_expert)


def _play(
    played: _Played,
    hardware: Hardware,
    shape: Shape,
    strategy: str,
    *,
    slots: int,
    memory_slots: int = 0,
    use_device: bool = True,
    options: Options | None = None,
) -> Run:
    """Simulate one strategy with `slots` experts in the fast pool (VRAM, or memory without a device).

    memory_slots: with a device, experts that memory holds (0: all). Raises ValueError that names a wrong
    argument, or a pool too small for the strategy.
    """
    o = options or Options()
    machine = hardware.machine(use_device=use_device, types=shape.types)
    core = _core.sim.SimOptions()
    for name in ("batch", "prefill", "keep", "draft", "acceptance", "fidelity", "predictor", "seed"):
        setattr(core, name, getattr(o, name))
    core.strategy, core.slots, core.memory_slots = strategy, slots, memory_slots
    core.recall = list(o.recall)
    core.profile = played.profile if o.warm or strategy in PROFILED else []
    cost = DRAFT_COST.get(strategy, 0.1 if o.draft else 0.0) if o.draft_cost is None else o.draft_cost
    core.draft_seconds = cost * resident_tpot(machine, shape)
    if strategy not in DRAFT_COST and not o.draft:
        core.draft_seconds = 0.0
    counts: dict[str, Any] = _core.sim.simulate(
        played.ids,
        played.lens,
        n_experts=played.n_expert,
        machine=machine,
        model=shape.core(),
        options=core,
        weights=played.weights,
        predictions=played.predictions,
        chances=played.chances,
    )
    return _summary(strategy, slots, shape, counts, hardware.power is not None)


def _summary(strategy: str, slots: int, shape: Shape, c: dict[str, Any], power: bool) -> Run:
    uses = max(c["hits"] + c["late"] + c["misses"], 1)
    tokens = max(c["tokens"], 1)
    everything = max(c["tokens"] + c["prefill_tokens"], 1)
    seconds = max(c["total_seconds"], 1e-30)
    return Run(
        strategy=strategy,
        slots=slots,
        share=slots / shape.experts_total,
        tpot=c["seconds"] / tokens,
        prefill_seconds=c["prefill_seconds"],
        prefill_tokens=c["prefill_tokens"],
        hit_rate=c["hits"] / uses,
        late_rate=c["late"] / uses,
        miss_rate=c["misses"] / uses,
        fetch_rate=c["fetched"] / uses,
        host_rate=c["hosted"] / uses,
        ahead_per_token=c["ahead"] / everything,
        ahead_used=c["ahead_used"] / max(c["ahead"], 1),
        link_bytes_per_token=c["link_bytes"] / everything,
        link_busy=min(c["link_busy"] / seconds, 1.0),
        host_busy=c["host_busy"] / seconds,
        device_busy=c["device_busy"] / seconds,
        other=c["other_seconds"] / tokens,
        tokens_per_step=c["tokens"] / max(c["steps"], 1),
        joules_per_token=c["joules"] / tokens if power else None,
        counts=c,
    )


def sweep(
    trace: Trace,
    hardware: Hardware,
    shape: Shape,
    names: Sequence[str],
    shares: Sequence[float],
    *,
    sequences: int = 0,
    tokens: int = 0,
    progress: Callable[[float], object] | None = None,
    **how: Any,
) -> list[Run]:
    """Every strategy at every pool size (a share of all experts, at least one token's top-k), as `run`.

    Strategies that split their pool are left out where there is less than a slot per layer. progress: called
    with the fraction done.
    """
    played = _Played.of(trace, sequences, tokens)
    sizes = [max(shape.top_k, round(shape.experts_total * share)) for share in shares]
    pairs = [(n, name) for n in sizes for name in names if n >= shape.layers or name not in SPLIT]
    runs = []
    for done, (slots, name) in enumerate(pairs, 1):
        runs.append(_play(played, hardware, shape, name, slots=slots, **how))
        if progress is not None:
            progress(done / len(pairs))
    return runs


#: Strategies whose pool is shared out over the layers.
SPLIT = frozenset({"mixtral-offloading", "adapmoe", "hybrimoe", "promoe", "belady-layer"})
