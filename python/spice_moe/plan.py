"""The resolved plan: what SPICE decided to do with one model, in plain words."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .device import DeviceShare

EXACT = "exact: bit-identical to llama.cpp with repacking off"
ON_DEVICE = "exact, but for the last bits of what the device's own kernels compute"
EXACT_STOCK = "exact: this is llama.cpp itself"
NOT_OFFLOADED = "n_gpu_layers is 0"
REPACKED = "approximate in the last bits: llama.cpp repacks the weights that are not experts"


def format_bytes(count: float) -> str:
    """``1536`` -> ``"1.5 KiB"``: a byte count with a binary unit, one decimal from KiB up."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What was resolved for one model. ``str(plan)`` is a short paragraph; ``to_dict()`` goes into JSON.

    Sizes are in bytes. For a plain or dense model the expert fields describe the file, and nothing of SPICE
    runs.
    """

    mode: Literal["spice", "plain"]
    reason: str  #: why this mode
    architecture: str  #: ``general.architecture`` of the GGUF
    moe_layers: int  #: layers that hold routed experts
    experts_per_layer: int  #: routed experts of a layer (the largest, if layers differ)
    experts_used: int  #: routed experts that each token uses in a layer
    experts_total: int  #: routed experts of all layers
    expert_types: tuple[str, ...]  #: quantisations of the experts
    expert_bytes: int  #: weights of all experts
    slab_bytes_min: int  #: weights of the smallest expert
    slab_bytes_max: int  #: weights of the largest expert
    other_bytes: int  #: every other weight; llama.cpp holds these in memory
    kv_cache_bytes: int  #: of the context's KV cache, recurrent layers' states included
    load_mode: str  #: how llama.cpp reads the other weights: "read", "read+mlock", "mmap", "mmap+mlock"
    repack: bool  #: llama.cpp may repack weights (that are not experts, in mode "spice")
    ram_budget: int  #: bytes that all slots of the expert pool may take
    slots: int  #: experts that the pool has room for
    working_set_bytes: int  #: slots that one token touches, in bytes
    smallest_budget: int  #: the smallest ram_budget that works for this model
    strategy: str  #: which expert leaves a full pool
    device: str  #: the GPUs that have a pool of experts too, as ggml calls them; "" for none
    devices: tuple[DeviceShare, ...]  #: the layers and the memory of each GPU that llama.cpp uses
    vram_budget: int  #: bytes of their memory that the slots take
    vram_slots: int  #: experts that they have room for
    pinned_bytes: int  #: of ram_budget, memory that the GPU copies from at full speed
    vram_reason: str  #: why this much, or why none
    placement: str  #: who computes which expert; "" without a device
    direct_io: bool  #: experts are read past the page cache
    predictor: str  #: what predicts the next layers' experts, to read them ahead; "" for nothing
    predictor_bytes: int  #: memory that it takes, beside the pool
    predictor_note: str  #: why some layers are predicted from their history alone; "" for none
    sidecar: str  #: the file of ``spice-fit`` that is used; "" for none
    lore: dict[str, Any]  #: stand-ins for experts, as in :class:`spice_moe.lore.LorePlan`; empty: none
    io_threads: int | None  #: reads kept in flight; None: tuned on the first reads; 0 in mode "plain"
    preload: str  #: what is read before the first token, or why nothing is; "" in mode "plain"
    n_threads: int  #: compute threads for single tokens
    n_threads_batch: int  #: compute threads for batches
    exact: bool  #: False when ``exactness`` names something lossy
    exactness: str  #: one sentence on what the output may be compared with

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict of plain JSON types."""
        fields = dataclasses.asdict(self)
        fields["expert_types"] = list(self.expert_types)
        fields["devices"] = [{**share, "layers": list(share["layers"])} for share in fields["devices"]]
        return fields

    def _experts(self) -> str:
        types = "/".join(self.expert_types)
        return (
            f"{self.architecture}, {_count(self.moe_layers, 'MoE layer')} x {self.experts_per_layer} experts "
            f"({self.experts_used} used per token), {format_bytes(self.expert_bytes)} of {types} experts"
        )

    def _speeds(self) -> str:
        """What the probe at start found, for each GPU with a pool."""
        return "".join(
            f"; probed: {format_bytes(one.link_speed)}/s to {one.device}, which computes experts of "
            f"{format_bytes(one.device_speed)}/s, the CPU of {format_bytes(one.host_speed)}/s"
            for one in self.devices
            if one.link_speed
        )

    def _ahead(self) -> str:
        if not self.predictor:
            return "read when needed"
        fitted = f" with {Path(self.sidecar).name}" if self.sidecar else ""
        note = f"; {self.predictor_note}" if self.predictor_note else ""
        memory = format_bytes(self.predictor_bytes)
        moved = "read and sent to the GPU" if self.device else "read"
        return f"{moved} ahead where {self.predictor}{fitted} predicts them ({memory}{note})"

    def __str__(self) -> str:
        threads = f"{_count(self.n_threads, 'compute thread')} ({self.n_threads_batch} for batches)"
        if self.mode == "plain":
            return (
                f"plain llama.cpp ({self.reason}): {self.architecture}, weights by {self.load_mode}, "
                f"{format_bytes(self.kv_cache_bytes)} of KV cache, {threads}; {self.exactness}"
            )
        reads = "reads in flight tuned" if self.io_threads is None else f"{self.io_threads} reads in flight"
        if self.slots >= self.experts_total:
            pool = "read at first use and kept in memory"
        else:
            pool = (
                f"in a pool of {format_bytes(self.ram_budget)} ({self.slots} of {self.experts_total} "
                f"experts, strategy {self.strategy}), {self._ahead()}"
            )
        if self.lore:
            pool += (
                f", stand-ins for {self.lore['layers']} layers beside it ({format_bytes(self.lore['bytes'])})"
            )
        if self.ram_budget < self.working_set_bytes:
            pool += (
                f" - slow: one token touches {format_bytes(self.working_set_bytes)} of them, "
                f"a larger ram_budget helps most -"
            )
        if self.device:
            pool += (
                f", {self.vram_slots} of them also on {self.device} ({format_bytes(self.vram_budget)}, "
                f"placement {self.placement}{self._speeds()})"
            )
        elif self.vram_reason not in ("", NOT_OFFLOADED):
            pool += f", none on a GPU ({self.vram_reason})"
        if not self.direct_io:
            pool += " (buffered: direct_io is off, or the file system refuses it)"
        return (
            f"SPICE: {self._experts()} {pool}, "
            f"{format_bytes(self.other_bytes)} of other weights {self.load_mode} at load, "
            f"{format_bytes(self.kv_cache_bytes)} of KV cache; {threads}, "
            f"{reads}; read at start: {self.preload}; {self.exactness}"
        )
