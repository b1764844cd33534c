"""A GPU that is not there, for bench/device.py: the emulated accelerator with a preset's link and speeds.

It is slowed down until the host at hand is in the preset's proportion to it. One thread of this machine
stands for the preset's whole CPU, since the emulator needs a core of its own, and everything of the device is
slower by the same factor: times divided by it are those of the preset's machine. What is not slowed down is
what SPICE and llama.cpp do beside the experts' products, which counts less than it would.

A shared machine is slower in one minute than in the next: sides are compared that take turns every few
tokens (turns.py), with one factor for both, which every comparison measures anew, and the host's speed once
more at its end. The host's experts have a core for themselves, the same one in all processes. The emulator's
core is kept awake: one that sleeps in a virtual machine takes 50 to 100 us to wake up, for each of several
hand-overs per layer.

Products by experts on the device take their time and give zeros (cpp/emulator/emulator.h), so a model is
needed whose routing hardly depends on them: `models/synth.py --like NAME --thin`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.device_emulator import Speed

SECONDS = 0.8  #: for which the host's speed is measured at a time
AGREE = 0.05  #: by how much two such measurements in a row may differ
TRIES = 12
BYTES = 512 << 20
PATIENCE = 0.5  #: seconds without a new expert after which no more are expected


@dataclass(frozen=True)
class Likeness:
    """``factor``: seconds here for one of the preset's machine."""

    factor: float
    host_speed: float  #: bytes of experts per second of one thread here
    speed: Speed


def host_speed(types: Mapping[str, float]) -> float:
    """Bytes per second that one thread multiplies of experts of these types: {type: bytes}.

    Measured until two in a row agree: a neighbour's work of a moment would be taken for the machine's speed.
    """
    with on_first_processor():
        last = one_host_speed(types)
        for _ in range(TRIES):
            before, last = last, one_host_speed(types)
            if abs(last / before - 1.0) < AGREE:
                break
    return last


def one_host_speed(types: Mapping[str, float]) -> float:
    """As :func:`host_speed`, measured once."""
    from spice_moe import _core

    total = sum(types.values())
    seconds = 0.0
    for name, size in types.items():
        share = size / total
        _core.sim.dot_speed(name.upper(), n_threads=1, seconds=SECONDS * share / 2, bytes=BYTES)  # wakes up
        speed = _core.sim.dot_speed(name.upper(), n_threads=1, seconds=SECONDS * share, bytes=BYTES)
        seconds += size / speed
    return total / seconds


def likeness(preset: str, types: Mapping[str, float]) -> Likeness:
    """The preset's device beside this host, for experts of these types.

    Raises the errors of :func:`spice_moe.hardware.load`, and ValueError for a machine without a GPU.
    """
    from spice_moe import hardware

    machine = hardware.load(preset)
    if machine.device is None or machine.link is None:
        raise ValueError(f"{preset} has no GPU")
    host = host_speed(types)
    factor = machine.host.of(types).stream / host
    speed = Speed(
        upload_per_second=machine.link.bandwidth / factor,
        download_per_second=machine.link.bandwidth / factor,
        copy_latency_seconds=machine.link.latency * factor,
        launch_seconds=machine.device.call * factor,
        expert_bytes_per_second=machine.device.of(types).stream / factor,
    )
    return Likeness(factor, host, speed)


def set_apart() -> None:
    """This thread alone on the first processor, the process's others (the emulator's) on the rest.

    These are not interrupted by each other, if the system lets us say so: where they share a core, one that
    holds a lock would keep this thread waiting for a whole time slice of another. Does nothing where there is
    one processor, or a system that does not say.
    """
    tasks = Path("/proc/self/task")
    if not hasattr(os, "sched_setaffinity") or not tasks.exists():
        return
    first, *rest = sorted(os.sched_getaffinity(0))
    if not rest:
        return
    for task in tasks.iterdir():
        own = int(task.name) == threading.get_native_id()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.sched_setaffinity(int(task.name), {first} if own else rest)
            if not own:
                os.sched_setscheduler(int(task.name), os.SCHED_FIFO, os.sched_param(1))


@contextlib.contextmanager
def on_first_processor() -> Iterator[None]:
    """Where :func:`set_apart` puts the thread that computes."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


_BUSY = """import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[1:] or os.sched_getaffinity(0))
while True: pass"""


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """The emulator's core does not go to sleep: a process that gives way to every other one keeps it busy.

    Only there: beside a thread that computes it would not run, and what it costs the other core (they may be
    two halves of one) would come and go.
    """
    process = subprocess.Popen([sys.executable, "-c", _BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


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
