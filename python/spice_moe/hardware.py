"""Machines as small TOML files: presets that come along, files that users write, and what a probe measures.

    from spice_moe import hardware

    hardware.load("rtx4060")  # a preset
    hardware.load("mine.toml")  # a file; `spice-plan --probe mine.toml` writes one

The format, with every field, is described in docs/simulator.md.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from . import _core, files
from .budget import parse_size
from .errors import SpiceFileNotFoundError, SpiceFormatError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - the same library under its older name
    import tomli as tomllib

GB = 1e9


@dataclass(frozen=True)
class Link:
    """What moves experts between two tiers. Bytes per second, seconds, bytes."""

    bandwidth: float
    latency: float = 0.0
    chunk: float = 0.0  #: a demand interrupts a load ahead at multiples of it; 0: never
    in_flight: int = 1  #: reads that share the bandwidth; the latency is that of the first of a burst then


@dataclass(frozen=True)
class Engine:
    """What computes experts. Bytes of weights per second (one row; rows times bytes for many), seconds."""

    stream: float
    row: float
    call: float = 0.0  #: seconds per layer call that uses it
    #: stream by quantisation, where it was measured; `stream` and `row` are of the others
    types: Mapping[str, float] = field(default_factory=dict)

    def of(self, types: Mapping[str, float]) -> Engine:
        """The engine on weights of these types: {type: bytes that a token reads}. Empty: as it is."""
        if not types or not self.types:
            return self
        seconds = sum(size / self.types.get(name, self.stream) for name, size in types.items())
        stream = sum(types.values()) / seconds
        return replace(self, stream=stream, row=self.row * stream / self.stream)


@dataclass(frozen=True)
class Power:
    """Watts. `idle`: of the whole machine, all the time; the others: what a part takes more while busy."""

    idle: float = 0.0
    host: float = 0.0
    device: float = 0.0
    link: float = 0.0
    disk: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """One machine. `device` and `link` are None without a GPU."""

    name: str
    note: str
    memory: int  #: bytes of RAM
    host: Engine
    disk: Link
    device: Engine | None = None
    link: Link | None = None
    vram: int = 0
    layer_call: float = 0.0  #: seconds of each layer beside its weights
    contention: float = 0.0  #: how much slower the host computes while a transfer runs
    drowsiness: float = 0.0  #: how much slower it computes when it waits all the time; in proportion for less
    spread: float = 0.3  #: relative half-width of the range that a forecast is given with
    power: Power | None = None  #: None: not known, and no energy is reported

    def machine(self, *, use_device: bool = True, types: Mapping[str, float] | None = None) -> Any:
        """The simulator's form of it; without the device if `use_device` is False.

        types: bytes that a token reads by quantisation, where the engines' speeds are known for each.
        """
        machine = _core.sim.Machine()
        host = self.host.of(types or {})
        machine.host = _core.sim.EngineSpec(host.stream, host.row, host.call)
        disk = self.disk
        machine.disk = _core.sim.LinkSpec(disk.bandwidth, disk.latency, disk.chunk, disk.in_flight)
        if use_device and self.device is not None and self.link is not None:
            machine.has_device = True
            device = self.device.of(types or {})
            machine.device = _core.sim.EngineSpec(device.stream, device.row, device.call)
            machine.link = _core.sim.LinkSpec(self.link.bandwidth, self.link.latency, self.link.chunk)
        machine.layer_call = self.layer_call
        machine.contention = self.contention
        machine.drowsiness = self.drowsiness
        if self.power is not None:
            machine.power = _core.sim.PowerSpec(**vars(self.power))
        return machine

    @property
    def has_device(self) -> bool:
        return self.device is not None and self.link is not None


def presets() -> tuple[str, ...]:
    """The names of the machines that come along."""
    folder = resources.files("spice_moe") / "data" / "hardware"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir()))


def load(name: str | Path) -> Hardware:
    """A preset by name, or a TOML file by path.

    Raises SpiceFileNotFoundError, or SpiceFormatError that names the file and the field.
    """
    if str(name) in presets():
        text = (resources.files("spice_moe") / "data" / "hardware" / f"{name}.toml").read_text("utf-8")
        return parse(text, str(name))
    path = Path(name)
    if not path.exists():
        raise SpiceFileNotFoundError(
            f"no hardware preset and no file: {str(name) or repr('')}; presets are {', '.join(presets())}"
        )
    files.check_input(path, f"a TOML file, or a preset: {', '.join(presets())}")
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise SpiceFormatError(f"{path}: not UTF-8 (byte {error.start})") from error
    return parse(text, str(path))


def parse(text: str, where: str) -> Hardware:
    """A machine from TOML text; `where` names it in errors."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpiceFormatError(f"{where}: not TOML: {error}") from error
    fields = _Fields(data, where)
    device = fields.table("device", required=False)
    link = fields.table("link", required=False)
    power = fields.table("power", required=False)
    if (device is None) != (link is None):
        raise fields.wrong("device and link go together: give both or neither")
    memory = fields.table("memory")
    host = fields.table("host")
    disk = fields.table("disk")
    assert memory is not None and host is not None and disk is not None
    made = Hardware(
        name=fields.text("name"),
        note=fields.text("note", ""),
        memory=memory.size("bytes"),
        host=host.engine(),
        disk=disk.link(),
        device=device.engine() if device else None,
        link=link.link() if link else None,
        vram=device.size("bytes") if device else 0,
        layer_call=fields.number("layer_us", 0.0) / 1e6,
        contention=fields.number("contention", 0.0),
        drowsiness=fields.number("drowsiness", 0.0),
        spread=fields.number("spread", 0.3),
        power=power.power() if power else None,
    )
    for part in (fields, memory, host, disk, device, link, power):
        if part is not None:
            part.all_known()
    return made


class _Fields:
    """One TOML table: typed access that names what is missing, wrong or unknown."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self._data, self._where = data, where
        self._asked: set[str] = set()

    def wrong(self, message: str) -> SpiceFormatError:
        return SpiceFormatError(f"{self._where}: {message}")

    def _get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        value = self._data.get(key, default)
        if value is None:
            raise self.wrong(f"{key} is missing")
        return value

    def table(self, key: str, *, required: bool = True) -> _Fields | None:
        self._asked.add(key)
        value = self._data.get(key)
        if value is None and not required:
            return None
        if not isinstance(value, dict):
            raise self.wrong(f"[{key}] is missing")
        return _Fields(value, f"{self._where} [{key}]")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.wrong(f"{key} must be text")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(f"{key} must be a number")
        if not (0.0 < value < 1e18 if positive else 0.0 <= value < 1e18):
            raise self.wrong(f"{key} must be {'above 0' if positive else '0 or more'}, not {value}")
        return float(value)

    def size(self, key: str, default: str | None = None) -> int:
        value = self._get(key, default)
        try:
            return parse_size(value) if isinstance(value, str) else int(self.number(key))
        except ValueError as error:
            raise self.wrong(f"{key}: {error}") from error

    def engine(self) -> Engine:
        stream = self.number("stream_gbs", positive=True) * GB
        row = self.number("row_gbs", positive=True) * GB
        if row < stream:
            raise self.wrong("row_gbs must be at least stream_gbs")
        types = self.table("types", required=False)
        return Engine(stream, row, self.number("call_us", 0.0) / 1e6, types.speeds() if types else {})

    def speeds(self) -> dict[str, float]:
        return {name.upper(): self.number(name, positive=True) * GB for name in self._data}

    def power(self) -> Power:
        return Power(**{name: self.number(f"{name}_watts", 0.0) for name in vars(Power())})

    def link(self) -> Link:
        return Link(
            self.number("bandwidth_gbs", positive=True) * GB,
            self.number("latency_us", 0.0) / 1e6,
            float(self.size("chunk", "0")),
            max(1, int(self.number("in_flight", 1.0))),
        )

    def all_known(self) -> None:
        unknown = sorted(set(self._data) - self._asked)
        if unknown:
            raise self.wrong(f"unknown: {', '.join(unknown)}")


def to_toml(hardware: Hardware, comments: tuple[str, ...] = ()) -> str:
    """The TOML text that `parse` reads back."""
    lines = [f"# {comment}" for comment in comments]
    lines += [f'name = "{hardware.name}"', f'note = "{hardware.note}"']
    lines += [
        f"layer_us = {hardware.layer_call * 1e6:.4g}",
        f"contention = {hardware.contention:.3g}",
        *([f"drowsiness = {hardware.drowsiness:.3g}"] if hardware.drowsiness else []),
        f"spread = {hardware.spread:.3g}",
    ]
    lines += ["", "[memory]", f"bytes = {hardware.memory}"]
    lines += ["", "[host]", *_engine_lines(hardware.host)]
    if hardware.host.types:
        lines += ["", "[host.types]", *(f"{k} = {v / GB:.4g}" for k, v in hardware.host.types.items())]
    lines += ["", "[disk]", *_link_lines(hardware.disk)]
    if hardware.device is not None and hardware.link is not None:
        lines += ["", "[device]", f"bytes = {hardware.vram}", *_engine_lines(hardware.device)]
        lines += ["", "[link]", *_link_lines(hardware.link)]
    if hardware.power is not None:
        lines += ["", "[power]", *(f"{name}_watts = {w:.4g}" for name, w in vars(hardware.power).items())]
    return "\n".join(lines) + "\n"


def _engine_lines(engine: Engine) -> list[str]:
    return [
        f"stream_gbs = {engine.stream / GB:.4g}",
        f"row_gbs = {engine.row / GB:.4g}",
        f"call_us = {engine.call * 1e6:.4g}",
    ]


def _link_lines(link: Link) -> list[str]:
    return [
        f"bandwidth_gbs = {link.bandwidth / GB:.4g}",
        f"latency_us = {link.latency * 1e6:.4g}",
        f"chunk = {int(link.chunk)}",
        *([f"in_flight = {link.in_flight}"] if link.in_flight > 1 else []),
    ]
