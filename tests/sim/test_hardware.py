"""Hardware files: the presets load, what is wrong with a file is named, and writing one reads back."""

from __future__ import annotations

from pathlib import Path

import pytest
from spice_moe import hardware
from spice_moe.errors import SpiceFileNotFoundError, SpiceFormatError

GOOD = """
name = "mine"
layer_us = 50
[memory]
bytes = "16GiB"
[host]
stream_gbs = 10
row_gbs = 20
[disk]
bandwidth_gbs = 2
latency_us = 80
chunk = "1MiB"
"""


@pytest.mark.parametrize("name", hardware.presets())
def test_presets(name: str) -> None:
    machine = hardware.load(name)
    assert machine.name and machine.note
    assert hardware.parse(hardware.to_toml(machine), name) == machine
    core = machine.machine()
    assert core.has_device == machine.has_device
    assert machine.power is not None and machine.power.idle > 0
    assert (machine.power.device > 0) == machine.has_device
    assert machine.machine(use_device=False).has_device is False


def test_presets_are_the_promised_ones() -> None:
    names = ("a800", "h200", "laptop-nvme", "phone-flash", "rtx3060", "rtx4060", "rtx5090")
    assert hardware.presets() == names


def test_units(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    machine = hardware.load(file)
    assert machine.memory == 16 * 2**30
    assert machine.host.stream == 10e9
    assert machine.disk == hardware.Link(2e9, pytest.approx(80e-6), 2**20)
    slow = hardware.parse(GOOD.replace("layer_us = 50", "layer_us = 50\ndrowsiness = 0.4"), "mine")
    assert slow.drowsiness == 0.4 and slow.machine().drowsiness == 0.4
    assert hardware.parse(hardware.to_toml(slow), "mine") == slow
    shared = hardware.parse(GOOD.replace('"1MiB"', '"1MiB"\nin_flight = 4'), "mine")
    assert shared.disk.in_flight == 4
    assert hardware.parse(hardware.to_toml(shared), "mine").disk == shared.disk
    assert machine.layer_call == pytest.approx(50e-6)
    assert not machine.has_device
    assert machine.power is None
    watts = hardware.parse(GOOD + "[power]\nidle_watts = 8\nhost_watts = 25", "mine").power
    assert watts == hardware.Power(idle=8, host=25)


def test_speed_by_quantisation() -> None:
    text = GOOD.replace("[disk]", "[host.types]\nq4_K = 20\nQ8_0 = 5\n[disk]")
    machine = hardware.parse(text, "mine")
    assert machine.host.types == {"Q4_K": 20e9, "Q8_0": 5e9}
    assert hardware.parse(hardware.to_toml(machine), "mine") == machine
    assert machine.machine().host.stream == 10e9
    mixed = machine.host.of({"Q4_K": 2e9, "Q8_0": 1e9, "F32": 1e9})  # 0.1 + 0.2 + 0.1 s
    assert mixed.stream == pytest.approx(10e9) and mixed.row == pytest.approx(20e9)
    assert machine.machine(types={"Q8_0": 1.0}).host.stream == pytest.approx(5e9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("stream_gbs = 10", "stream_gbs = 0"), r"\[host\]: stream_gbs must be above 0"),
        (("stream_gbs = 10", "stream_gbs = 30"), "row_gbs must be at least stream_gbs"),
        (("stream_gbs = 10", ""), "stream_gbs is missing"),
        (("[disk]", "[disc]"), r"\[disk\] is missing"),
        (("layer_us = 50", "layer_ms = 50"), "unknown: layer_ms"),
        (('"16GiB"', '"much"'), "not a size"),
        (('name = "mine"', "name = 7"), "name must be text"),
        (("[disk]", "[link]\nbandwidth_gbs = 9\n[disk]"), "device and link go together"),
        (("[memory]", "[memory"), "not TOML"),
        (("[disk]", "[host.types]\nQ4_K = 0\n[disk]"), "Q4_K must be above 0"),
        (("[disk]", "[power]\nidle_watts = -1\n[disk]"), r"\[power\]: idle_watts must be 0 or more"),
        (("[disk]", "[power]\ngpu_watts = 1\n[disk]"), "unknown: gpu_watts"),
    ],
)
def test_what_is_wrong_is_named(change: tuple[str, str], message: str) -> None:
    with pytest.raises(SpiceFormatError, match=message):
        hardware.parse(GOOD.replace(*change), "mine.toml")


def test_no_such_file() -> None:
    with pytest.raises(SpiceFileNotFoundError, match="presets are a800"):
        hardware.load("nothing.toml")
