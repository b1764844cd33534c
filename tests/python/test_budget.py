"""Sizes as people write them, and what is free by made-up and by real /proc and /sys."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spice_moe import SpiceBudgetError, SpiceOptions
from spice_moe.budget import FreeMemory, check, free_memory, parse_size, resolve

KIB, MIB, GIB = 2**10, 2**20, 2**30
NO_LIMIT_V1 = 9223372036854771712


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GiB", 6 * GIB),
        ("6G", 6 * GIB),
        ("6g", 6 * GIB),
        ("6gb", 6 * GIB),
        ("512M", 512 * MIB),
        ("1.5G", 3 * GIB // 2),
        ("10k", 10 * KIB),
        ("1TiB", 2**40),
        ("1024", 1024),
        ("1024B", 1024),
        ("  6 GiB ", 6 * GIB),
        ("0", 0),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", " ", "G", "GiB", "-1G", "+1G", "1,5G", "1.G", ".5G", "6X", "6GG", "6 G B", "0x10", "1e9", "nan"],
)
def test_bad_sizes_are_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="not a size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


def resolved(budget: object, free: int = 0) -> int:
    return resolve(budget, everything=10 * GIB, smallest=GIB, free=free)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        ("6GiB", 6 * GIB),
        (" 512 M ", 512 * MIB),
        ("4096", 4096),
        (4096, 4096),
        (1, 1),  # one byte, not everything
        (1.0, 10 * GIB),
        (0.25, 10 * GIB // 4),
        ("25%", 10 * GIB // 4),
        (" 2.5 % ", 10 * GIB // 40),
        ("100%", 10 * GIB),
        ("11G", 10 * GIB),  # more than everything
        (2**70, 10 * GIB),
        ("0.5", 5 * GIB),
        (".25", 5 * GIB // 2),
    ],
)
def test_budgets(budget: object, size: int) -> None:
    assert resolved(budget) == size
    SpiceOptions(ram_budget=budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("word", ["auto", "AUTO", " auto "])
def test_auto_leaves_a_margin(word: str) -> None:
    assert resolved(word, free=4 * GIB) == 4 * GIB - 256 * MIB
    assert resolved(word, free=10 * GIB) == 10 * GIB - 10 * GIB // 20
    assert resolved(word, free=20 * GIB) == 10 * GIB
    assert resolved(word, free=GIB + 256 * MIB) == GIB, "exactly the smallest"


@pytest.mark.parametrize("free", [0, 256 * MIB, GIB, GIB + 256 * MIB - 1])
def test_auto_with_too_little_names_the_numbers(free: int) -> None:
    with pytest.raises(SpiceBudgetError) as caught:
        resolved("auto", free=free)
    for words in (f"ram_budget={GIB}", "1.2 GiB are needed", "are free"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    "budget", [0, -1, "0", "0G", "0.0", 0.0, -0.5, 1.5, math.nan, math.inf, "0%", "101%", "big"]
)
def test_amounts_that_make_no_sense(budget: object) -> None:
    for refuse in (resolved, check, lambda given: SpiceOptions(ram_budget=given)):
        with pytest.raises(ValueError, match=r"ram_budget|not a size") as caught:
            refuse(budget)
        assert repr(budget) in str(caught.value)
        assert not isinstance(caught.value, SpiceBudgetError)


@pytest.mark.parametrize("budget", [None, True, False, [1], b"6G", 1j])
def test_types_that_make_no_sense(budget: object) -> None:
    for refuse in (resolved, check, lambda given: SpiceOptions(ram_budget=given)):
        with pytest.raises(TypeError, match="ram_budget"):
            refuse(budget)


SIZES = st.integers(1, 2**50)


@given(everything=SIZES, left=SIZES, right=SIZES)
def test_sizes_are_kept_and_monotone(everything: int, left: int, right: int) -> None:
    small, large = (
        resolve(size, everything=everything, smallest=0, free=0) for size in sorted((left, right))
    )
    assert small <= large <= everything
    assert small == min(left, right, everything)
    assert small == resolve(f"{min(left, right)}B", everything=everything, smallest=0, free=0)


@given(everything=SIZES, shares=st.tuples(*[st.floats(0, 1, exclude_min=True)] * 2))
def test_fractions_are_kept_and_monotone(everything: int, shares: tuple[float, float]) -> None:
    small, large = (resolve(s, everything=everything, smallest=0, free=0) for s in sorted(shares))
    assert 0 <= small <= large <= everything


@given(everything=SIZES, smallest=SIZES, free=st.tuples(SIZES, SIZES))
def test_auto_is_kept_and_monotone(everything: int, smallest: int, free: tuple[int, int]) -> None:
    def auto(size: int) -> int:
        try:
            return resolve("auto", everything=everything, smallest=min(smallest, everything), free=size)
        except SpiceBudgetError:
            return 0

    small, large = (auto(size) for size in sorted(free))
    assert small <= large <= everything
    assert small < min(free)
    assert small == 0 or small >= min(smallest, everything)


class Root:
    """A folder that looks like / to free_memory()."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, text: str) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def system(self, available: int) -> None:
        self.write(
            "proc/meminfo", f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {available // KIB} kB\n"
        )

    def v2(self, group: str, limit: object, used: int = 0, **stat: int) -> None:
        self._group(f"sys/fs/cgroup{group}", ("memory.max", limit), ("memory.current", used), stat)

    def v1(self, group: str, limit: object, used: int = 0, **stat: int) -> None:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        self._group(f"sys/fs/cgroup/memory{group}", (names[0], limit), (names[1], used), stat)

    def _group(self, folder: str, limit: tuple, used: tuple, stat: dict[str, int]) -> None:
        for name, value in (limit, used):
            self.write(f"{folder}/{name}", f"{value}\n")
        self.write(f"{folder}/memory.stat", "".join(f"{key} {value}\n" for key, value in stat.items()))

    def free(self) -> FreeMemory:
        return free_memory(self.path)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path)
    made.system(8 * GIB)
    return made


def test_the_system_alone(root: Root) -> None:
    assert root.free() == FreeMemory(8 * GIB, "system")


def test_v2_the_tightest_ancestor_binds(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/a/b/c\n")
    root.v2("/a/b/c", "max", 1 * GIB)
    root.v2("/a/b", 4 * GIB, 3 * GIB)
    root.v2("/a", 6 * GIB, 4 * GIB)
    free = root.free()
    assert free.bytes == 1 * GIB
    assert free.limit.endswith("/a/b")
    root.v2("/a", 6 * GIB, 6 * GIB - 1)
    assert root.free().bytes == 1
    root.v2("/a", 6 * GIB, 7 * GIB)  # a limit that was lowered later
    assert root.free().bytes == 0
    root.system(0)
    assert root.free() == FreeMemory(0, "system")


def test_v2_the_limit_of_a_container_is_at_the_top(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/\n")
    root.v2("", 2 * GIB, 1 * GIB)
    assert root.free().bytes == 1 * GIB
    root.write("proc/self/cgroup", "0::/../outside\n")  # a process that came from outside
    assert root.free().bytes == 1 * GIB


def test_v2_page_cache_is_free_and_tmpfs_is_not(root: Root) -> None:
    root.write("proc/self/cgroup", "0::/a\n")
    cache = dict(file=3 * GIB, shmem=1 * GIB, active_file=1 * GIB, inactive_file=1 * GIB, anon=GIB // 2)
    root.v2("/a", 4 * GIB, 7 * GIB // 2, **cache)
    assert root.free().bytes == 4 * GIB - 7 * GIB // 2 + 2 * GIB
    root.v2("/a", 4 * GIB, 1 * GIB, **cache)  # numbers that were not read at one time
    assert root.free().bytes == 4 * GIB


def test_v1(root: Root) -> None:
    root.write("proc/self/cgroup", "9:name=systemd:/x\n5:cpu,cpuacct:/y\n4:hugetlb,memory:/a/b\n0::/\n")
    root.v1("/y", 1, 1)
    root.v1("/a/b", NO_LIMIT_V1, 9 * GIB)
    root.v1("/a", 5 * GIB, 4 * GIB, total_inactive_file=GIB, total_active_file=GIB, inactive_file=4 * GIB)
    free = root.free()
    assert free.bytes == 3 * GIB
    assert free.limit.endswith("cgroup/memory/a")


def test_no_limit_is_no_limit(root: Root) -> None:
    root.write("proc/self/cgroup", "4:memory:/a\n0::/b\n")
    root.v1("/a", NO_LIMIT_V1, 9 * GIB)
    root.v1("", NO_LIMIT_V1, 9 * GIB)
    root.v2("/b", "max", 9 * GIB)
    assert root.free() == FreeMemory(8 * GIB, "system")


def test_missing_files(root: Root) -> None:
    root.write("proc/self/cgroup", "4:memory:/a/b\n0::/a/b\n")
    assert root.free() == FreeMemory(8 * GIB, "system")
    root.v2("/a", 2 * GIB, 1 * GIB)
    (root.path / "sys/fs/cgroup/a/memory.stat").unlink()
    assert root.free() == FreeMemory(8 * GIB, "system")
    (root.path / "proc/meminfo").unlink()
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert root.free() == FreeMemory(physical // 2, "system")


@pytest.mark.parametrize(
    "garbage", ["", "\n", "what", "MemAvailable:", "1:2", "::::", "-", "\x00" * 9, "MemAvailable: x kB"]
)
@pytest.mark.parametrize(
    "file",
    ["proc/meminfo", "proc/self/cgroup"]
    + [f"sys/fs/cgroup/a/memory.{name}" for name in ("max", "current", "stat")],
)
def test_garbage_is_no_limit(root: Root, file: str, garbage: str) -> None:
    root.write("proc/self/cgroup", "0::/a\n")
    root.v2("/a", 4 * GIB, 3 * GIB, active_file=0)
    assert root.free().bytes == 1 * GIB
    root.write(file, garbage)
    free = root.free()
    assert free.bytes > 0
    if file != "proc/meminfo":
        assert free.bytes in (8 * GIB, 1 * GIB)
    (root.path / file).write_bytes(b"\xff\xfe 4")
    assert root.free().bytes > 0


@contextlib.contextmanager
def memory_cgroup() -> Iterator[Path]:
    """A real memory cgroup without a limit; skips the test where none can be made."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("making a memory cgroup needs root")
    mount = Path("/sys/fs/cgroup")
    v2 = mount / "cgroup.subtree_control"
    if (mount / "memory/memory.limit_in_bytes").exists():
        mount = mount / "memory"
    elif not (v2.exists() and "memory" in v2.read_text().split()):
        pytest.skip("no memory controller of cgroup version 1 or 2 is mounted")
    group = mount / f"spice-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


# Moves itself into the group, sets limits and prints what free_memory() and the budget "auto" make of them.
IN_CGROUP = """
import json, os, sys
from pathlib import Path
import llama_cpp
from spice_moe import Llama, SpiceBudgetError
from spice_moe.budget import free_memory

group, path = Path(sys.argv[1]), sys.argv[2]
files = group / "memory.max", group / "memory.limit_in_bytes"
limit = next(file for file in files if file.exists())
before = free_memory().bytes
(group / "cgroup.procs").write_text(str(os.getpid()))

def load():
    return Llama(path, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)

load().close()  # what a first load leaves behind is no longer new
tokens = [1, *range(261, 511)]
llm = load()
plan = llm.spice.plan
everything = plan.ram_budget
limit.write_text(str(8 << 30))
used = (8 << 30) - free_memory().bytes  # with everything but the experts in memory
llm.close()

margin = 256 << 20
wanted = used + margin + everything // 2
limit.write_text(str(wanted))
free = free_memory()
llm = load()
budget = llm.spice.plan.ram_budget
llm.eval(tokens)
llm.eval(tokens[:4])
counts = llm.spice.stats()
left = free_memory().bytes
llm.close()
limit.write_text(str(wanted - free_memory().bytes + margin // 2))
try:
    load()
    refused = ""
except SpiceBudgetError as error:
    refused = str(error)
print(json.dumps(dict(before=before, free=free.bytes, name=free.limit, limit=wanted, everything=everything,
                      budget=budget, resident=counts["resident_bytes"], evictions=counts["evictions"],
                      left=left, margin=margin, refused=refused)))
"""


def test_a_real_cgroup_bounds_the_automatic_budget(tiny_model) -> None:
    path = tiny_model("qwen2moe", layers=3, experts=16, embd=512, ff=1024, expert_type="Q8_0", row_bank=2)
    with memory_cgroup() as group:
        command = [sys.executable, "-c", IN_CGROUP, str(group), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["name"] == str(group)
    assert seen["free"] < seen["limit"] < seen["before"]
    assert seen["budget"] < seen["everything"]
    assert seen["budget"] <= seen["free"] - seen["margin"]
    assert seen["budget"] > seen["everything"] // 4, "the limit leaves room for about half"
    assert seen["resident"] <= seen["budget"]
    assert seen["evictions"] > 0
    assert seen["left"] > seen["margin"] // 2, "the margin was left alone"
    assert "are free" in seen["refused"]
    assert "ram_budget=" in seen["refused"]
