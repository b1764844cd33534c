"""The runtime's traffic is the simulator's: the same hits, fetches and bytes for the same routing."""

from __future__ import annotations

from pathlib import Path

import device_child
import pytest
from device_child import DeviceProcess
from support import prompt

from bench.device_emulator import Speed
from bench.device_sim import TIMELESS, compare, run, simulate


def counters(path: Path, name: str, vram: str) -> dict[str, dict[str, float]]:
    device_child.emulator.configure(Speed(upload_per_second=1e9))
    report = run(str(path), prompt(60, seed=3), name, vram, n_threads=1)
    return compare(report, simulate(report, name))


@pytest.mark.parametrize("vram", ["15%", "50%"])
@pytest.mark.parametrize("name", TIMELESS)
def test_what_does_not_depend_on_time(emulated: DeviceProcess, tiny_model, name: str, vram: str) -> None:
    path = tiny_model("qwen2moe", layers=4, experts=16, expert_type="Q4_K", seed=1)
    figures = emulated.run(counters, path, name, vram)
    for label, values in figures.items():
        # The experts of one call have one order here and another one there, which an LRU remembers.
        assert values["runtime"] == pytest.approx(values["simulator"], rel=0.02), label
    assert 0.05 < figures["on the device"]["runtime"] < 0.98
