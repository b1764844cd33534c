"""What this machine can do, in a few seconds: memory bandwidth, CPU speed, direct reads from a disk."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from . import _core
from .budget import free_memory
from .errors import SpiceFileNotFoundError, SpiceIOError, SpiceUnsupportedError
from .hardware import Engine, Hardware, Link

BLOCK = 2 * 2**20  #: bytes per read; SPICE reads experts, a few MB each
IN_FLIGHT = 4
DISK_SECONDS = 3.0
DISK_BYTES = 2**30
MEMORY_BYTES = 192 * 2**20
#: Quantisations that are timed when no model says which it has.
TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_1", "Q5_0", "Q4_0", "IQ4_XS", "MXFP4", "F16")
DOT_SECONDS = 0.05  #: per quantisation
DOT_BYTES = 128 * 2**20
BOTH_SECONDS = 0.3  #: of dot products without reads beside them, with them, and without
#: A dot product nobody could time: about this share of the memory's bandwidth.
VEC_DOT_SHARE = 0.75
#: Many rows share one pass over the weights; how much faster that was on two AVX2 cores.
ROW_GAIN = 1.6
#: A disk nobody could time: a common NVMe disk.
UNKNOWN_DISK = 2e9
UNKNOWN_CONTENTION = 0.15


def measure(model: Path | None, types: Iterable[str] = TYPES, *, progress: bool | None = None) -> Hardware:
    """Measure this machine; `model` is read to time the disk (None: a disk of 2 GB/s is assumed).

    types: quantisations whose dot products are timed. Takes at most about 8 seconds; GPUs are not measured.
    Raises SpiceFileNotFoundError or SpiceIOError.
    """
    show = sys.stderr.isatty() if progress is None else progress
    _bar(show, 0.0, "memory")
    stream = memory_bandwidth()
    _bar(show, 0.3, "CPU")
    speeds = dot_speeds(types)
    usual = statistics.median(speeds.values()) if speeds else stream * VEC_DOT_SHARE
    _bar(show, 0.5, "disk")
    disk = disk_bandwidth(model) if model is not None else UNKNOWN_DISK
    slower = UNKNOWN_CONTENTION
    if model is not None and speeds:
        _bar(show, 0.9, "both")
        slower = contention(model, next(iter(speeds)))
    _bar(show, 1.0, "done")
    if show:
        print(file=sys.stderr)
    source = "CPU measured, disk assumed" if model is None else "CPU and disk measured"
    return Hardware(
        name=f"{platform.machine()}, {os.cpu_count()} cores",
        note=f"{source} by spice-plan; no GPU measured",
        memory=free_memory().bytes,
        host=Engine(usual, usual * ROW_GAIN, 10e-6, speeds),
        disk=Link(disk, 100e-6, 2**20),
        layer_call=60e-6,
        contention=slower,
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


def dot_speeds(types: Iterable[str]) -> dict[str, float]:
    """Bytes of weights per second that all cores multiply, by quantisation; those that ggml knows."""
    speeds = {}
    for name in types:
        with contextlib.suppress(SpiceUnsupportedError):
            speeds[name] = _core.sim.dot_speed(
                name, n_threads=os.cpu_count() or 1, seconds=DOT_SECONDS, bytes=DOT_BYTES
            )
    return speeds


def disk_bandwidth(path: Path, seconds: float = DISK_SECONDS) -> float:
    """Bytes per second of reads past the page cache, several in flight, spread over the file."""
    return _read(path, seconds, threading.Event())


def contention(path: Path, name: str) -> float:
    """How much slower dot products of a quantisation are while the disk is read: 0.05 is 5 %."""
    cores, seconds = os.cpu_count() or 1, BOTH_SECONDS
    speeds = []
    for reading in (False, True, False):
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            if reading:
                pool.submit(_read, path, 2 * seconds, stop)
            speeds.append(_core.sim.dot_speed(name, n_threads=cores, seconds=seconds, bytes=DOT_BYTES))
            stop.set()
    alone = (speeds[0] + speeds[2]) / 2
    return max(alone / speeds[1] - 1, 0.0)


def _read(path: Path, seconds: float, stop: threading.Event) -> float:
    """Reads blocks of the file until the time is over, or 1 GiB is read, or `stop`; bytes per second."""
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
    order = np.random.default_rng().permutation(blocks)[: DISK_BYTES // BLOCK]
    start = time.perf_counter()

    def read(which: int) -> int:
        total = 0
        with mmap.mmap(-1, BLOCK) as memory:  # anonymous memory is aligned to pages
            for block in order[which::IN_FLIGHT]:
                if time.perf_counter() - start > seconds or stop.is_set():
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
