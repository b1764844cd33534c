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
FEW, MANY = 3, 12  #: reads of a burst
DISK_SECONDS = 1.8
HUGE_PAGE = 2 << 20
MEMORY_BYTES = 192 * 2**20
#: Quantisations that are timed when no model says which it has.
TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_1", "Q5_0", "Q4_0", "IQ4_XS", "MXFP4", "F16")
DOT_SECONDS = 0.05  #: per quantisation
DOT_BYTES = 128 * 2**20
WORK, IDLE = 0.002, 0.004  #: seconds: what a layer computes, and what it waits for an expert or two
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
    disk = disk_link(model) if model is not None else Link(UNKNOWN_DISK, 100e-6, 2**20, IN_FLIGHT)
    slower, drowsy = UNKNOWN_CONTENTION, 0.0
    if model is not None and speeds:
        _bar(show, 0.8, "both")
        slower, drowsy = contention(model, next(iter(speeds))), drowsiness(next(iter(speeds)))
    _bar(show, 1.0, "done")
    if show:
        print(file=sys.stderr)
    source = "CPU measured, disk assumed" if model is None else "CPU and disk measured"
    return Hardware(
        name=f"{platform.machine()}, {os.cpu_count()} cores",
        note=f"{source} by spice-plan; no GPU measured",
        memory=free_memory().bytes,
        host=Engine(usual, usual * ROW_GAIN, 10e-6, speeds),
        disk=disk,
        layer_call=60e-6,
        contention=slower,
        drowsiness=drowsy,
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


def disk_link(path: Path, block: int = BLOCK) -> Link:
    """How the disk answers bursts of reads past the page cache, as layers with misses make them.

    Bursts of few and of many reads of `block` bytes at random places, each from an idle disk, with 2, 4 and 8
    in flight: the best of them. The latency is what a burst takes beside its bytes.
    """
    file, blocks = _open(path, block)
    try:
        if blocks < FEW + MANY:
            return Link(UNKNOWN_DISK, 100e-6, 2**20, IN_FLIGHT)
        tried = []
        for in_flight in (2, 4, 8):
            few, many = _bursts(file, blocks, block, in_flight)
            bandwidth = (MANY - FEW) * block / max(many - few, 0.1 * many)
            tried.append((many, Link(bandwidth, max(few - FEW * block / bandwidth, 0.0), 2**20, in_flight)))
    except OSError as error:
        raise SpiceIOError(f"{path}: cannot time its reads: {error}") from error
    finally:
        os.close(file)
    return min(tried, key=lambda one: one[0])[1]


def _bursts(file: int, blocks: int, block: int, in_flight: int) -> tuple[float, float]:
    """Seconds of a burst of few and of many reads; medians."""
    random = np.random.default_rng()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(in_flight))
        rooms = [stack.enter_context(_room(block)) for _ in range(MANY)]

        def read(job: tuple[int, int]) -> None:
            with memoryview(rooms[job[0]]) as view, view[:block] as part:
                os.preadv(file, [part], job[1] * block)

        took: dict[int, list[float]] = {FEW: [], MANY: []}
        end = time.perf_counter() + DISK_SECONDS / 3
        while time.perf_counter() < end or not took[MANY]:
            for count, seconds in took.items():
                jobs = list(enumerate(random.integers(0, blocks, count).tolist()))
                start = time.perf_counter()
                list(pool.map(read, jobs))
                seconds.append(time.perf_counter() - start)
        return statistics.median(took[FEW]), statistics.median(took[MANY])


def _room(size: int) -> mmap.mmap:
    """Memory like the pool's: huge pages, all there. Into small ones a disk may be half as fast."""
    options = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    room = mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE, **options)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            room.madvise(mmap.MADV_HUGEPAGE)
    room[:] = bytes(len(room))
    return room


def _open(path: Path, block: int) -> tuple[int, int]:
    """The file, open for direct reads if there are any, and how many blocks it has."""
    if not path.is_file():
        raise SpiceFileNotFoundError(f"no such file: {path}")
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system without direct reads: drop the file from the page cache first
        file = os.open(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return file, path.stat().st_size // block


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


def drowsiness(name: str) -> float:
    """How much slower a processor computes that idles all the time, from one that idles two thirds of it."""
    cores, speeds = os.cpu_count() or 1, []
    for pause in (0.0, IDLE, 0.0, IDLE):
        speeds.append(
            _core.sim.dot_speed(name, n_threads=cores, seconds=BOTH_SECONDS, bytes=DOT_BYTES, pause=pause)
        )
    slower = (speeds[0] + speeds[2]) / (speeds[1] + speeds[3]) - 1
    return max(slower * (WORK + IDLE) / IDLE, 0.0)


def _read(path: Path, seconds: float, stop: threading.Event) -> None:
    """Reads blocks of the file until the time is over or `stop`."""
    file, blocks = _open(path, BLOCK)
    start = time.perf_counter()

    def read(which: int) -> None:
        random = np.random.default_rng(which)
        with _room(BLOCK) as memory, memoryview(memory) as view, view[:BLOCK] as part:
            while time.perf_counter() - start < seconds and not stop.is_set():
                os.preadv(file, [part], int(random.integers(0, max(blocks, 1))) * BLOCK)

    try:
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(read, range(IN_FLIGHT)))
    finally:
        os.close(file)


def _bar(show: bool, fraction: float, what: str) -> None:
    if show:
        filled = round(20 * fraction)
        text = f"\rmeasuring [{'#' * filled}{'.' * (20 - filled)}] {what:8}"
        print(text, end="", file=sys.stderr, flush=True)
