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
    assert machine.layer_call == pytest.approx(50e-6)
    assert not machine.has_device


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
    ],
)
def test_what_is_wrong_is_named(change: tuple[str, str], message: str) -> None:
    with pytest.raises(SpiceFormatError, match=message):
        hardware.parse(GOOD.replace(*change), "mine.toml")


def test_no_such_file() -> None:
    with pytest.raises(SpiceFileNotFoundError, match="presets are a800"):
        hardware.load("nothing.toml")
