"""How much of a GPU's memory the experts may take, and why it is none when it is none."""

from __future__ import annotations

import os
import warnings
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


def check_vram(budget: Budget) -> None:
    """Raise ``TypeError`` or ``ValueError``, naming the option, for what can be no vram_budget."""
    if not _is_none(budget):
        try:
            resolve(budget, everything=2**40, smallest=0, free=2**40)
        except (TypeError, ValueError) as error:
            raise type(error)(str(error).replace("ram_budget", "vram_budget")) from None


def _is_none(budget: Budget) -> bool:
    return not isinstance(budget, bool) and budget in (0, "0")


@dataclass(frozen=True)
class VramChoice:
    """What was resolved: bytes for experts on the device, or 0 and why."""

    bytes: int
    reason: str


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
