"""A memory cgroup (version 1 or 2) for a benchmark's worker processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")


class CannotLimit(Exception):
    """This system or user cannot limit the memory of a process; the message says why."""


class MemoryGroup:
    """A cgroup with a limit on the memory of its processes, page cache included."""

    def __init__(self, path: Path) -> None:
        self._procs = str(path / "cgroup.procs")
        self.outside = str(path.parent / "cgroup.procs")  #: a process whose id is written there leaves

    def enter(self) -> None:
        """Move the calling process in. For ``preexec_fn`` of a worker."""
        with open(self._procs, "w") as file:  # noqa: PTH123  (between fork and exec: as little as possible)
            file.write(str(os.getpid()))


@contextlib.contextmanager
def memory_limit(limit: int) -> Iterator[MemoryGroup | None]:
    """A cgroup with ``limit`` bytes and no swap, removed at the end; None for 0, which is no limit.

    Raises CannotLimit.
    """
    if not limit:
        yield None
        return
    v1 = _MOUNT / "memory/memory.limit_in_bytes"
    v2 = _MOUNT / "cgroup.subtree_control"
    if v1.exists():
        parent, limits = v1.parent, ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    elif v2.exists():
        parent, limits = _MOUNT, ["memory.max", "memory.swap.max"]
    else:
        raise CannotLimit("no cgroup file system is mounted")
    group = parent / f"spice-bench-{os.getpid()}"
    try:
        if not v1.exists() and "memory" not in v2.read_text().split():
            v2.write_text("+memory")
        group.mkdir()
    except OSError as error:
        raise CannotLimit(f"making a memory cgroup: {error}; run as root, or with --limit 0") from error
    try:
        try:
            (group / limits[0]).write_text(str(limit))
        except OSError as error:
            raise CannotLimit(f"setting a memory limit: {error}; run as root, or with --limit 0") from error
        with contextlib.suppress(OSError):  # systems without swap accounting
            (group / limits[1]).write_text("0" if limits[1] == "memory.swap.max" else str(limit))
        yield MemoryGroup(group)
    finally:
        with contextlib.suppress(OSError):  # a worker that cannot be killed keeps it
            group.rmdir()
