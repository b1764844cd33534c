"""A GPU that is not there, for bench/device.py: the emulated accelerator with a preset's link and speeds.

It is slowed down until the host at hand is in the preset's proportion to it. One thread of this machine
stands for the preset's whole CPU, since the emulator needs a core of its own, and everything of the device is
slower by the same factor: times divided by it are those of the preset's machine. What is not slowed down is
what SPICE and llama.cpp do beside the experts' products, which counts less than it would.

Products by experts on the device take their time and give zeros (cpp/emulator/emulator.h), so a model is
needed whose routing hardly depends on them: `models/synth.py --like NAME --thin`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.device_emulator import Speed

SECONDS = 0.5  #: for which the host's speed is measured
BYTES = 128 << 20
PATIENCE = 1.0  #: seconds without a new expert after which no more are expected


@dataclass(frozen=True)
class Likeness:
    """``factor``: seconds here for one of the preset's machine."""

    preset: str
    factor: float
    host_speed: float  #: bytes of experts per second of one thread here
    speed: Speed


def likeness(preset: str, types: Mapping[str, float], memory_bytes: int) -> Likeness:
    """The preset's device for experts of these types: {type: bytes}.

    Raises the errors of :func:`spice_moe.hardware.load`, and ValueError for a machine without a GPU.
    """
    from spice_moe import _core, hardware

    machine = hardware.load(preset)
    if machine.device is None or machine.link is None:
        raise ValueError(f"{preset} has no GPU")
    seconds = sum(
        size / _core.sim.dot_speed(name.upper(), n_threads=1, seconds=SECONDS, bytes=BYTES)
        for name, size in types.items()
    )
    host = sum(types.values()) / seconds
    factor = machine.host.of(types).stream / host
    speed = Speed(
        memory_bytes=memory_bytes,
        upload_per_second=machine.link.bandwidth / factor,
        download_per_second=machine.link.bandwidth / factor,
        copy_latency_seconds=machine.link.latency * factor,
        launch_seconds=machine.layer_call * factor,
        expert_bytes_per_second=machine.device.of(types).stream / factor,
    )
    return Likeness(preset, factor, host, speed)


def describe(like: Likeness) -> str:
    """The resolved configuration in one line."""
    numbers = ", ".join(f"{name} {value:g}" for name, value in asdict(like.speed).items())
    return (
        f"like {like.preset}, {like.factor:.2f} times slower "
        f"(one thread here: {like.host_speed / 1e9:.2f} GB/s): {numbers}"
    )


def everything(uses: Mapping[int, Sequence[float]]) -> list[tuple[int, int]]:
    """All experts, the most used ones first."""
    from spice_moe.usage import hottest_first

    return hottest_first({layer: [use + 1e-9 for use in row] for layer, row in uses.items()}, uses)


def fill(core: Any, experts: Sequence[tuple[int, int]]) -> None:
    """Reads the experts into memory, and on to the device while it has room; waits until that is done."""
    core.preload(list(experts))
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < PATIENCE:
        time.sleep(0.05)
        stats = core.stats()
        now = stats["preloaded"] + stats["device_resident_experts"]
        if now != seen:
            seen, since = now, time.monotonic()
