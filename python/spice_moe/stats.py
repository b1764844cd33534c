"""``llm.spice``: the plan of a model, and the counters of what really happened."""

from __future__ import annotations

from typing import Any, Protocol

from .plan import Plan

#: Every counter of ``llm.spice.stats()`` and what it counts, since the load or the last ``reset_stats()``.
COUNTERS: dict[str, str] = {
    "layer_calls": "MoE layers that SPICE computed (one per layer and micro-batch)",
    "graph_calls": "pieces of llama.cpp's compute graph that were handed to SPICE",
    "matmul_nodes": "matrix products by experts (three per layer call, two where gate and up are fused)",
    "expert_rows": "expert evaluations: tokens x experts used, summed over the layer calls",
    "experts_requested": "experts that layer calls needed, each counted once per layer call",
    "experts_missed": "of these, experts that were not in memory and had to be waited for",
    "waves": "batches of arrived experts that were computed while others were still being read",
    "preloaded": "experts of earlier runs that were read before the first layer call",
    "early_nodes": "graph nodes of shared experts that were computed while experts were being read",
    "rows_direct": "rows of matrix products with few rows per expert (decode)",
    "rows_batched": "rows of matrix products with many rows per expert (prompts), or with too few slots",
    "evictions": "experts that left the pool to make room",
    "slabs_read": "experts that were given a slot and read from disk",
    "bytes_read": "bytes read from disk for experts",
    "reads": "read calls to the operating system",
    "read_depth": "reads that are kept in flight now",
    "read_seconds": "seconds with at least one read running",
    "stall_seconds": "seconds with at least one compute thread waiting for a read",
    "resident_experts": "experts in memory now",
    "resident_bytes": "bytes of the experts in memory now",
    "prefetched": "experts that were queued for reading ahead of need",
    "prefetch_ready": "of these, experts that were in memory when a layer needed them",
    "prefetch_late": "of these, experts that were still on their way then",
    "prefetch_dropped": "experts that were taken back before they were read: better ones came up",
    "prefetch_wasted": "of these, experts that left the pool without having been needed",
    "prefetch_bytes": "bytes read ahead, part of bytes_read",
    "wasted_bytes": "bytes of the wasted ones",
    "prefetch_on": "whether experts are read ahead now: it turns itself off while it does not pay",
    "prefetch_saving": "measured share of the waiting that reading ahead saves, its own cost taken off",
    "prefetch_switches": "times that it was turned off or on again",
    "predicted_calls": "layer calls from which the next layers were predicted",
    "predicted_layers": "layers predicted in these calls",
    "predicted_experts": "experts that next layers used, where they had been predicted",
    "predicted_right": "of these, experts among the best of the prediction (the rest is recall's complement)",
    "predict_seconds": "seconds that predicting and choosing took on the compute thread",
    "delegated_nodes": "graph nodes in SPICE's pieces that ran on ggml's CPU backend unchanged",
    "device_calls": "layer calls in which the GPU computed experts",
    "device_hits": "experts that layer calls needed and that were on the GPU, or on their way",
    "device_fetched": "experts that were sent to the GPU for the layer call that needed them",
    "device_passed": "of these, experts of prompts that passed through a few slots and did not stay",
    "device_filled": "experts that were sent to the GPU for later tokens",
    "device_prefetched": "experts that were sent to the GPU ahead of a layer that was predicted to use them",
    "device_prefetch_used": "of these, experts that were there when a layer first needed them",
    "device_prefetch_late": "of these, experts that were still on their way then",
    "device_prefetch_wasted": "of these, experts that left the GPU's pool without having been needed",
    "device_prefetch_on": "whether experts are sent ahead now: it turns itself off while it does not pay",
    "device_prefetch_saving": "measured share of the layer calls' time that sending ahead saves",
    "device_prefetch_switches": "times that it was turned off or on again",
    "device_left": "experts that the CPU computed beside the GPU",
    "device_rows": "expert evaluations on the GPU, part of expert_rows",
    "device_evictions": "experts that left the GPU's pool to make room",
    "device_in_place": "layer calls whose activations the GPU had: they were not sent up",
    "device_unfit": "layer calls whose block the GPU cannot compute: it lacks an operation, or SPICE a form",
    "device_refused": "layer calls that the GPU had no memory for, which the CPU computed alone",
    "device_wait_seconds": "seconds that the CPU waited for the GPU's share of a layer",
    "uploads": "experts copied to the GPU",
    "upload_bytes": "bytes of them",
    "upload_seconds": "seconds with at least one such copy running",
    "device_resident_experts": "experts on the GPU now",
    "device_resident_bytes": "bytes of its memory that they take",
    "lore_rows": "tokens in layer calls where stand-ins could have replaced experts, summed over the layers",
    "lore_pairs": "experts that these tokens were routed to",
    "lore_substituted": "of these, experts that stand-ins replaced (no part of expert_rows)",
    "lore_gate_mass": "sum of the replaced experts' shares of their token's gate weights in the layer",
    "lore_error": "expected squared error of the layers' outputs, relative, summed over tokens and layers",
    "lore_kl": "expected KL divergence from the exact model, in nats, summed over tokens and layers",
    "lore_unfit": "layer calls that were exact as the graph does not show what stand-ins need",
    "failures": "layer calls that failed; the Python call raised an exception",
}

#: Counters that say what is there now; reset_stats() leaves them alone.
GAUGES = frozenset(
    {
        "resident_experts",
        "resident_bytes",
        "read_depth",
        "prefetch_on",
        "prefetch_saving",
        "prefetch_switches",
    }
    | {"device_resident_experts", "device_resident_bytes"}
    | {"device_prefetch_on", "device_prefetch_saving", "device_prefetch_switches"}
)


class Counting(Protocol):
    """The part of the compiled ``_core.Model`` that counts."""

    def stats(self) -> dict[str, int | float]: ...

    def reset_stats(self) -> None: ...


class Spice:
    """The handle ``llm.spice``. Any thread may call it; nothing blocks."""

    def __init__(self, plan: Plan, core: Counting | None) -> None:
        self.plan = plan
        self._core = core
        self._last: dict[str, int | float] = dict.fromkeys(COUNTERS, 0)

    def stats(self) -> dict[str, Any]:
        """The counters (see :data:`COUNTERS`) and, under ``"plan"``, the resolved plan as a dict.

        A plain model counts nothing: all zero. After ``close()`` the last values stay readable, except that
        nothing is resident any more.
        """
        if self._core is not None:
            self._last = dict(self._core.stats())
        return {**self._last, "plan": self.plan.to_dict()}

    def reset_stats(self) -> None:
        """Set the counters to zero, except those that say what is in memory now."""
        if self._core is not None:
            self._core.reset_stats()
        else:
            self._last.update(dict.fromkeys(self._last.keys() - GAUGES, 0))

    def detach(self) -> None:
        """Keep the last counters and let go of the core, which is about to be freed."""
        if self._core is not None:
            self._last = dict(self._core.stats())
            self._last.update(dict.fromkeys(GAUGES, 0))
            self._core = None

    def __repr__(self) -> str:
        return f"<{self.plan}>"
