"""The benchmark under memory pressure runs, and its rooflines are what it says. Numbers are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(FOLDER))

import disk_probe  # noqa: E402
import memory_limit  # noqa: E402
import ram_pressure  # noqa: E402


def run(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "ram_pressure.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def path(tiny_model) -> Path:
    return tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)


SMALL = ["--prefills", 8, 8, 16, "--warm", 2, "--decode", 4, "--threads", 1]


def test_all_sides_and_their_rooflines(path: Path) -> None:
    done = run(path, *SMALL, "--budgets", "50%", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [job["label"] for job in report["jobs"]] == [
        "plain llama.cpp, mmap",
        "plain llama.cpp, no mmap",
        "SPICE 50%",
    ]
    assert report["same_tokens"]
    ((spice,),) = report["results"][2:]
    assert spice["plan"]["slots"] == spice["plan"]["experts_total"] // 2
    for limit in (spice["roofline"]["decode"], *spice["roofline"]["prefill"]):
        assert limit["bound"] in ("disk", "memory")
        assert limit["share"] > 0
    assert [prompt["tokens"] for prompt in spice["prefill"]] == [8, 8, 16]
    assert report["in_memory"]["decode"]["counters"]["experts_missed"] == 0, "all was read before"


def test_words(path: Path) -> None:
    done = run(path, *SMALL, "--no-stock", "--strategies", "lru")
    assert done.returncode == 0, done.stderr
    for words in (
        "memory limit none",
        "GB/s",
        "of roofline",
        "the same in all runs",
        "SPICE: qwen2moe",
        "lru",
    ):
        assert words in done.stdout
    assert run("nothing.gguf").returncode == 3


def report(seconds: float, read: int) -> dict:
    return dict(seconds=seconds, counters=dict(bytes_read=read, wasted_bytes=0))


def test_rooflines() -> None:
    spice = dict(decode=report(4.0, 2_000_000_000), prefill=[report(2.0, 500_000_000), report(5.0, 0)])
    memory = dict(decode=report(1.0, 0), prefill=[report(1.0, 0), report(2.0, 0)])
    ram_pressure.add_rooflines(spice, memory, disk=1e9)
    assert spice["roofline"]["decode"] == dict(seconds=2.0, bound="disk", share=0.5)
    assert spice["roofline"]["prefill"] == [
        dict(seconds=1.0, bound="memory", share=0.5),
        dict(seconds=2.0, bound="memory", share=0.4),
    ]


def test_page_cache_speed_is_not_called_disk_speed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed = disk_probe.probe(path, 4096, seconds=0.02, depths=(1, 2))
    assert speed.bytes_per_second > 0
    assert speed.in_flight in (1, 2)
    assert speed.read_bytes == 4096

    def refuse(name: object, flags: int, *rest: object, real=os.open) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(name, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    refused = disk_probe.probe(path, 4096, seconds=0.02, depths=(1,))
    assert not refused.direct
    assert "PAGE-CACHE" in str(refused)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_a_file_in_memory_is_no_disk(path: Path) -> None:
    copy = Path(f"/dev/shm/spice-test-{os.getpid()}.gguf")
    try:
        copy.write_bytes(path.read_bytes())
        assert not disk_probe.probe(copy, 4096, seconds=0.02, depths=(1,)).direct
    finally:
        copy.unlink(missing_ok=True)


def test_a_limit_that_cannot_be_set_is_said(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path
) -> None:
    monkeypatch.setattr(memory_limit, "_MOUNT", tmp_path)
    assert ram_pressure.main([str(path), "--limit", "1G", "--no-roofline"]) == 4
    assert "cannot limit the memory" in capsys.readouterr().err


EAT = "import os, sys; block = bytearray(int(sys.argv[1])); print(len(block))"


def test_a_limit_holds() -> None:
    """Skips where no memory cgroup can be made. (v2: the same code by other file names.)"""
    try:
        with memory_limit.memory_limit(64 << 20) as group:
            assert group is not None
            codes = [
                subprocess.run(
                    [sys.executable, "-c", EAT, str(size)], capture_output=True, preexec_fn=group.enter
                ).returncode
                for size in (1 << 20, 128 << 20)
            ]
    except memory_limit.CannotLimit as error:
        pytest.skip(str(error))
    assert codes[0] == 0
    assert codes[1] != 0
