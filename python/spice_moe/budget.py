"""How much memory the experts may take: sizes as people write them, and what is free.

``auto`` is resolved after llama.cpp has loaded everything else, so the weights that are not experts, the KV
cache and the buffers need no estimate: they are already gone from what the system says is available.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from .errors import SpiceBudgetError
from .plan import format_bytes

#: ``"6GiB"``, ``"6G"``, a number of bytes, a fraction of the experts (``0.5`` or ``"50%"``), or ``"auto"``.
Budget = str | int | float

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*(0?\.\d+|1\.0*)\s*")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
# Left to the system and to what grows later: this share of the free memory, at least this much.
_MARGIN_SHARE = 0.05
_MARGIN_BYTES = 256 * 2**20
_LARGEST = 2**63  # bytes are 64-bit numbers in C++
_NO_LIMIT = 2**60  # cgroup v1 writes a number near 2**63 for "no limit"


def parse_size(text: str) -> int:
    """``"6GiB"`` -> bytes. K, M, G, T are binary, with or without ``iB`` or ``B``. Raises ``ValueError``."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"not a size: {text!r}; write 6GiB, 6G, 512M or a number of bytes")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size >= _LARGEST:
        raise ValueError(f"not a size of any memory: {text!r}")
    return int(size)


def is_auto(budget: Budget) -> bool:
    """Whether ``budget`` depends on what is free once the rest is loaded."""
    return isinstance(budget, str) and budget.strip().lower() == "auto"


def check(budget: Budget) -> None:
    """Raise ``TypeError`` or ``ValueError``, naming the option, for what can be no budget."""
    resolve(budget, everything=2**40, smallest=0, free=2**40)


def resolve(budget: Budget, *, everything: int, smallest: int, free: int) -> int:
    """The bytes for experts that ``budget`` stands for, at most ``everything``.

    ``everything``: bytes with which all experts fit; ``smallest``: the least that works; ``free``: what
    ``auto`` may use. Raises ``SpiceBudgetError`` when ``auto`` finds less than ``smallest`` (a size that is
    too small is refused by the core), ``TypeError`` or ``ValueError`` for what is no budget.
    """
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float)):
        raise TypeError(f'ram_budget must be a size such as "6GiB", a fraction or "auto", not {budget!r}')
    if is_auto(budget):
        margin = max(int(free * _MARGIN_SHARE), _MARGIN_BYTES)
        left = free - margin
        if left < smallest:
            raise SpiceBudgetError(
                f"{format_bytes(free)} of memory are free, and {format_bytes(smallest + margin)} are "
                f"needed for experts; free some memory, or give ram_budget={smallest} at your own risk"
            )
        return min(left, everything)
    if isinstance(budget, str):
        if match := _SHARE.fullmatch(budget):
            return _fraction(float(match[1]), budget, everything)
        if match := _PERCENT.fullmatch(budget):
            return _fraction(float(match[1]) / 100, budget, everything)
        return min(_positive(parse_size(budget), budget), everything)
    if isinstance(budget, float):
        return _fraction(budget, budget, everything)
    return min(_positive(budget, budget), everything)


def _positive(size: int, given: Budget) -> int:
    if size <= 0:
        raise ValueError(f"ram_budget must be more than 0 bytes, not {given!r}")
    return size


def _fraction(share: float, given: Budget, everything: int) -> int:
    if not 0.0 < share <= 1.0:
        raise ValueError(f"ram_budget as a fraction must be above 0 and at most 1, not {given!r}")
    return int(share * everything)


@dataclass(frozen=True)
class FreeMemory:
    """What the process may still take, in bytes, and which limit says so."""

    bytes: int
    limit: str  #: "system", or the cgroup that binds


def free_memory(root: Path = Path("/")) -> FreeMemory:
    """Memory that is available to this process: MemAvailable, and every cgroup limit above the process.

    Page cache counts as free: the kernel gives it back. ``root`` is where /proc and /sys are (tests move it).
    Where /proc does not exist (macOS), half of the physical memory.
    """
    free = FreeMemory(_mem_available(root), "system")
    for group, limit, used in _cgroups(root):
        left = max(limit - used, 0)
        if left < free.bytes:
            free = FreeMemory(left, group)
    return free


def swap_memory(root: Path = Path("/")) -> int:
    """Bytes of swap space that are free; 0 where that is not said. A cgroup may allow less."""
    return _meminfo(root, "SwapFree:") or 0


def _meminfo(root: Path, name: str) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _mem_available(root: Path) -> int:
    available = _meminfo(root, "MemAvailable:")
    if available is not None:
        return available
    import os

    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroups(root: Path) -> list[tuple[str, int, int]]:
    """(name, limit, bytes used that cannot be dropped) of each memory cgroup that this process is in."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return []
    found: list[tuple[str, int, int]] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2
            found += _walk(
                root / "sys/fs/cgroup",
                path,
                "memory.max",
                "memory.current",
                ("inactive_file", "active_file"),  # "file" has tmpfs in it, which cannot be dropped
            )
        elif "memory" in controllers.split(","):
            found += _walk(
                root / "sys/fs/cgroup/memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ("total_inactive_file", "total_active_file"),
            )
    return found


def _walk(
    mount: Path, path: str, limit_file: str, usage_file: str, droppable: tuple[str, ...]
) -> list[tuple[str, int, int]]:
    found = []
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):  # limits of all ancestors hold; inside a container the top is "/"
        group = mount.joinpath(*parts[:depth])
        try:
            limit_text = (group / limit_file).read_text().strip()
            usage = int((group / usage_file).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            limit = _NO_LIMIT if limit_text == "max" else int(limit_text)
            cache = sum(int(stat.get(name, 0)) for name in droppable)
        except (OSError, ValueError):
            continue
        if limit < _NO_LIMIT:
            found.append((str(group), limit, usage - min(cache, usage)))
    return found
