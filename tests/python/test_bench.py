"""The benchmark against stock runs and reports what it promises. Its numbers are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(FOLDER))
BENCH = FOLDER / "vs_stock.py"


def test_vs_stock(tiny_model) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)
    options = ["--rounds", "2", "--load-rounds", "1", "--decode", "4", "--threads", "1"]
    command = [sys.executable, str(BENCH), str(path), *options]
    (report,) = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True).stdout)
    assert report["results"].keys() == {"prefill 64", "prefill 256", "decode", "load"}
    assert all(result["ratio"] > 0 for result in report["results"].values())
    assert report["identical"]
    # Not bytes_read: what was read ahead in vain may still be on its way.
    assert report["counters"]["experts_missed"] == 0, "experts are warm in the counted rounds"
    assert report["counters"]["layer_calls"] == 3 * 2 * (1 + 1 + 1 + 4)
    assert report["load"]["expert_bytes_read"] == 0
    assert report["load"]["file_bytes_read"] < report["bytes"]

    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for words in ("SPICE: qwen2moe", "repacking off", "decode", "bit-identical", "layer_calls"):
        assert words in text
    assert subprocess.run([sys.executable, str(BENCH), "nothing.gguf"], capture_output=True).returncode == 3


def test_a_limit_is_on_the_whole_disk(tmp_path: Path) -> None:
    from prefetch import disk_of

    disk = tmp_path / "devices" / "nvme1n1"
    (disk / "nvme1n1p2").mkdir(parents=True)
    (disk / "dev").write_text("259:3\n")
    (disk / "nvme1n1p2" / "partition").write_text("2\n")
    links = tmp_path / "block"
    links.mkdir()
    (links / "259:5").symlink_to(disk / "nvme1n1p2")
    (links / "259:3").symlink_to(disk)
    assert disk_of(os.makedev(259, 5), links) == "259:3"
    assert disk_of(os.makedev(259, 3), links) == "259:3"


@pytest.mark.parametrize("bench", ["prefetch.py", "device.py", "lore.py"])
def test_a_text_that_is_too_short_is_named(tiny_model, tmp_path: Path, bench: str) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)
    text = tmp_path / "short.txt"
    text.write_text("a few words")
    command = [sys.executable, str(BENCH.with_name(bench)), str(path), "--text", str(text)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"{text}: " in done.stderr and "give a longer --text" in done.stderr


@pytest.mark.parametrize("bench", ["prefetch.py", "lore.py", "ram_pressure.py"])
def test_a_worker_that_fails_is_told_in_one_line(tiny_model, bench: str) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)
    budget = {"prefetch.py": "--budgets", "lore.py": "--ram", "ram_pressure.py": "--budgets"}[bench]
    more = ["--limit", "0", "--no-stock"] if bench == "ram_pressure.py" else []
    command = [sys.executable, str(BENCH.with_name(bench)), str(path), budget, "1K", *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "is too small" in done.stderr and "ended with exit code 1" in done.stderr


@pytest.mark.parametrize(
    "bench",
    [
        "device", "device_sim", "eviction", "history_recall", "lore", "prediction", "prefetch",
        "ram_pressure", "speed_by_memory", "validate_sim",
    ],
)  # fmt: skip
def test_a_missing_file_is_told_in_one_line(bench: str) -> None:
    more = ["--text", __file__] if bench == "prediction" else []
    command = [sys.executable, str(FOLDER / f"{bench}.py"), "nothing.gguf", *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1 and "no such file" in done.stderr.lower()
