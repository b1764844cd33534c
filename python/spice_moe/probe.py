"""What this machine can do, in a few seconds: memory bandwidth, CPU speed, direct reads from a disk."""

from __future__ import annotations

import mmap
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .budget import free_memory
from .errors import SpiceFileNotFoundError, SpiceIOError
from .hardware import Engine, Hardware, Link

BLOCK = 2 * 2**20  #: bytes per read; SPICE reads experts, a few MB each
IN_FLIGHT = 4
DISK_SECONDS = 3.0
DISK_BYTES = 2**30
MEMORY_BYTES = 192 * 2**20
#: ggml's dot products on quantised weights reach about this share of the memory's bandwidth.
VEC_DOT_SHARE = 0.75
#: Many rows share one pass over the weights; how much faster that was on two AVX2 cores.
ROW_GAIN = 1.6
#: A disk nobody could time: a common NVMe disk.
UNKNOWN_DISK = 2e9


def measure(model: Path | None, *, progress: bool | None = None) -> Hardware:
    """Measure this machine; `model` is read to time the disk (None: a disk of 2 GB/s is assumed).

    Takes at most about 6 seconds; GPUs are not measured. Raises SpiceFileNotFoundError or SpiceIOError.
    """
    show = sys.stderr.isatty() if progress is None else progress
    _bar(show, 0.0, "memory")
    stream = memory_bandwidth()
    _bar(show, 0.4, "disk")
    disk = disk_bandwidth(model) if model is not None else UNKNOWN_DISK
    _bar(show, 1.0, "done")
    if show:
        print(file=sys.stderr)
    source = "disk assumed" if model is None else "memory and disk measured"
    return Hardware(
        name=f"{platform.machine()}, {os.cpu_count()} cores",
        note=f"{source} by spice-plan; no GPU measured",
        memory=free_memory().bytes,
        host=Engine(stream * VEC_DOT_SHARE, stream * VEC_DOT_SHARE * ROW_GAIN, 10e-6),
        disk=Link(disk, 100e-6, 2**20),
        layer_call=60e-6,
        contention=0.15,
        spread=0.35,
    )


def memory_bandwidth() -> float:
    """Bytes per second that all cores together read."""
    cores = min(os.cpu_count() or 1, 16)
    data = [np.ones(MEMORY_BYTES // cores // 8) for _ in range(cores)]
    best = 0.0
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(np.max, data))
            best = max(best, sum(part.nbytes for part in data) / (time.perf_counter() - start))
    return best


def disk_bandwidth(path: Path) -> float:
    """Bytes per second of reads past the page cache, several in flight, spread over the file."""
    if not path.is_file():
        raise SpiceFileNotFoundError(f"no such file: {path}")
    blocks = path.stat().st_size // BLOCK
    if blocks < IN_FLIGHT:
        return UNKNOWN_DISK
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system without direct reads: drop the file from the page cache first
        file = os.open(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    order = np.random.default_rng(1).permutation(blocks)[: DISK_BYTES // BLOCK]
    start = time.perf_counter()

    def read(which: int) -> int:
        total = 0
        with mmap.mmap(-1, BLOCK) as memory:  # anonymous memory is aligned to pages
            for block in order[which::IN_FLIGHT]:
                if time.perf_counter() - start > DISK_SECONDS:
                    break
                total += os.preadv(file, [memory], int(block) * BLOCK)
        return total

    try:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            total = sum(pool.map(read, range(IN_FLIGHT)))
        seconds = time.perf_counter() - start
    except OSError as error:
        raise SpiceIOError(f"{path}: cannot time its reads: {error}") from error
    finally:
        os.close(file)
    return total / seconds


def _bar(show: bool, fraction: float, what: str) -> None:
    if show:
        filled = round(20 * fraction)
        text = f"\rmeasuring [{'#' * filled}{'.' * (20 - filled)}] {what:8}"
        print(text, end="", file=sys.stderr, flush=True)
