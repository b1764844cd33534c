"""How fast a file can be read now: random aligned direct reads of one size, several in flight.

The same reads that SPICE makes, without anything else to do: what a run may be measured against.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_ALIGNMENT = 4096
_HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class DiskSpeed:
    """What a probe found."""

    bytes_per_second: float
    in_flight: int
    read_bytes: int  #: of one read
    direct: bool  #: False: the file system refused direct reads, so the page cache may have answered

    def __str__(self) -> str:
        kind = (
            "direct reads" if self.direct else "PAGE-CACHE reads, direct ones are refused here: no disk speed"
        )
        return (
            f"{self.bytes_per_second / 1e9:.2f} GB/s ({kind} of {self.read_bytes / 2**20:.1f} MiB, "
            f"{self.in_flight} in flight)"
        )


def probe(
    path: Path, read_bytes: int, *, seconds: float = 0.6, depths: tuple[int, ...] = (2, 4, 8)
) -> DiskSpeed:
    """The best speed of ``depths`` reads in flight, each tried for ``seconds``."""
    read_bytes = max(-(-read_bytes // _ALIGNMENT) * _ALIGNMENT, _ALIGNMENT)
    fd, direct = _open(path)
    try:
        size = os.fstat(fd).st_size
        read_bytes = min(read_bytes, max(size // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT))
        tried = [DiskSpeed(_speed(fd, size, read_bytes, depth, seconds), depth, read_bytes, direct)
                 for depth in depths]  # fmt: skip
    finally:
        os.close(fd)
    return max(tried, key=lambda speed: speed.bytes_per_second)


def _open(path: Path) -> tuple[int, bool]:
    direct = getattr(os, "O_DIRECT", 0)
    if direct and not _in_memory(path):
        try:
            return os.open(path, os.O_RDONLY | direct), True
        except OSError:
            pass  # the file system refuses it
    return os.open(path, os.O_RDONLY), False


def _in_memory(path: Path) -> bool:
    """Whether the file lies on tmpfs, which takes O_DIRECT and ignores it."""
    try:
        device = path.stat().st_dev
        with Path("/proc/self/mountinfo").open() as mounts:
            for line in mounts:
                fields, _, tail = line.partition(" - ")
                major, _, minor = fields.split()[2].partition(":")
                if os.makedev(int(major), int(minor)) == device:
                    return tail.split()[0] in ("tmpfs", "ramfs")
    except (OSError, ValueError, IndexError):
        pass
    return False


def _speed(fd: int, size: int, read_bytes: int, depth: int, seconds: float) -> float:
    """Bytes per second of ``depth`` threads that read at random places until the time is over."""
    places = max((size - read_bytes) // _ALIGNMENT, 0)
    done = [0] * depth
    buffers = [_buffer(read_bytes) for _ in range(depth)]
    began = time.perf_counter()
    until = began + seconds

    def work(index: int) -> None:
        pick = random.Random()
        with memoryview(buffers[index]) as view, view[:read_bytes] as part:
            while time.perf_counter() < until:
                done[index] += os.preadv(fd, [part], pick.randint(0, places) * _ALIGNMENT)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)


def _buffer(size: int) -> mmap.mmap:
    """Memory like that of the pool: in huge pages, all there. Into small ones a disk may be half as fast."""
    buffer = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer[:] = bytes(len(buffer))
    return buffer
