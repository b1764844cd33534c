"""How much of the GPUs' memory experts may take, which layers each GPU holds, and why none if it is none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _core
from .budget import Budget, is_auto, resolve
from .errors import SpiceBudgetError
from .plan import NOT_OFFLOADED, format_bytes

# Left to llama.cpp and to the driver, which takes memory as it goes: this share of what is free, at least the
# bytes below or a tenth of a small device.
_MARGIN_SHARE = 0.05
_MARGIN_BYTES = 512 * 2**20

ASKED = "vram_budget=0"
# Pinned memory is lost to everyone else, page cache included: at most this share of the machine's.
_PINNED_SHARE = 0.5


def placements() -> tuple[str, ...]:
    """The names that ``placement`` takes; the default first."""
    return tuple(_core.placement_names())


#: One budget for each GPU, or one for each of several, in llama.cpp's order: "6G,4G" or (6 * 2**30, "50%").
VramBudget = Budget | Sequence[Budget]


def check_vram(budget: VramBudget) -> None:
    """Raise ``TypeError`` or ``ValueError``, naming the option, for what can be no vram_budget."""
    for one in _each(budget):
        if not _is_none(one):
            try:
                resolve(one, everything=2**40, smallest=0, free=2**40)
            except (TypeError, ValueError) as error:
                raise type(error)(str(error).replace("ram_budget", "vram_budget")) from None


def _each(budget: VramBudget) -> list[Budget]:
    if isinstance(budget, str) and "," in budget:
        return [one.strip() for one in budget.split(",")]
    if isinstance(budget, Sequence) and not isinstance(budget, str):
        if not budget:
            raise ValueError("vram_budget names no size")
        return list(budget)
    return [budget]


def _is_none(budget: Budget) -> bool:
    return not isinstance(budget, bool) and budget in (0, "0")


def budgets_for(budget: VramBudget, devices: Sequence[str]) -> list[Budget]:
    """The budget of each device: one that is given alone holds for each of them, as in llama.cpp's options.

    Raises ``SpiceBudgetError`` when several are given, and not as many as there are devices.
    """
    each = _each(budget)
    if len(each) == 1:
        return each * len(devices)
    if not any(devices):
        raise SpiceBudgetError(f"vram_budget={budget!r} has {len(each)} sizes, and llama.cpp uses no GPU")
    if len(each) != len(devices):
        raise SpiceBudgetError(
            f"vram_budget={budget!r} has {len(each)} sizes, and llama.cpp uses {len(devices)} GPUs for this "
            f"model ({', '.join(devices)}); give one for each, or one for all"
        )
    return each


def owners(assigned: dict[int, str], layers: Sequence[int]) -> dict[str, list[int]]:
    """Which of the MoE layers each device holds, in llama.cpp's order of devices.

    ``assigned``: the device of each layer's attention, as llama.cpp said while it loaded. A layer that it
    left on the CPU goes with the nearest one that is on a device. Without any, the first GPU, named "", has
    all.
    """
    on_gpu = {layer: name for layer, name in assigned.items() if name != "CPU"}
    if not on_gpu:
        return {"": list(layers)}
    held: dict[str, list[int]] = {name: [] for _, name in sorted(on_gpu.items())}
    for layer in layers:
        nearest = min(on_gpu, key=lambda other: (abs(other - layer), other))
        held[on_gpu[nearest]].append(layer)
    return {name: of for name, of in held.items() if of}


@dataclass(frozen=True)
class VramChoice:
    """What was resolved: bytes for experts on the device, or 0 and why."""

    bytes: int
    reason: str


@dataclass(frozen=True)
class DeviceShare:
    """One GPU's part of a model, in the plan."""

    device: str  #: as ggml calls it
    layers: tuple[int, ...]  #: whose experts it may hold
    vram_budget: int  #: bytes of its memory that the slots take; 0: none
    slots: int  #: experts that it has room for
    reason: str  #: why this much, or why none
    link_speed: float  #: bytes per second up to it, as a probe at start found; 0: there was none
    device_speed: float  #: bytes of experts per second that it computes for one token
    host_speed: float  #: bytes of experts per second that the CPU computes for one token


def resolve_vram(budget: Budget, needs: dict[str, Any], *, offloaded: bool) -> VramChoice:
    """What ``vram_budget`` stands for on the device that ``needs`` describes (``Model.device_needs()``).

    ``offloaded``: llama.cpp was asked to use the device. Raises ``SpiceBudgetError`` when a size that was
    asked for cannot work; "auto" takes what is free, or nothing if that is too little, and says so.
    """
    if _is_none(budget):
        return VramChoice(0, ASKED)
    name, smallest = needs["device"], needs["smallest"]
    if is_auto(budget):
        if not offloaded:
            return VramChoice(0, NOT_OFFLOADED)
        if not name:
            return VramChoice(0, "llama.cpp has no GPU device")
        margin = max(int(needs["free"] * _MARGIN_SHARE), min(_MARGIN_BYTES, needs["total"] // 10))
        left = needs["free"] - margin
        if left < smallest:
            return VramChoice(
                0,
                f"{name} has {format_bytes(needs['free'])} free, and {format_bytes(smallest + margin)} are "
                f"needed for experts",
            )
        return VramChoice(min(left, needs["everything"]), "what is free")
    if not name:
        raise SpiceBudgetError(
            f"vram_budget={budget!r}: llama.cpp has no GPU device here; install llama-cpp-python with one "
            f"(docs/gpu.md), or give vram_budget=0"
        )
    size = resolve(budget, everything=needs["everything"], smallest=smallest, free=0)
    if size < smallest:
        raise SpiceBudgetError(
            f"vram_budget={budget!r} is too small for experts on {name}; give at least {smallest} bytes "
            f"({format_bytes(smallest)}), or 0 for none"
        )
    return VramChoice(size, "asked for")


def pinned_limit() -> int:
    """Bytes of host memory that may be pinned for copies to a GPU."""
    return int(_PINNED_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def warn_if_pageable(needs: dict[str, Any], pool: dict[str, Any]) -> None:
    """Warn when the pool of experts is not all pinned, and the device could copy faster if it were."""
    if needs["pins"] and pool["pinned"] < pool["budget"]:
        warnings.warn(
            f"only {format_bytes(pool['pinned'])} of the {format_bytes(pool['budget'])} "
            "of memory for experts "
            f"could be pinned: copies to {needs['device']} are slower; a smaller ram_budget may help",
            RuntimeWarning,
            stacklevel=2,
        )
