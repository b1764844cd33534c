"""What bench/speed_by_memory.py makes of the reports of bench/ram_pressure.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.speed_by_memory import Point, plot, points

BENCH = Path(__file__).resolve().parents[2] / "bench" / "speed_by_memory.py"


def test_points_are_medians() -> None:
    jobs = [dict(label="plain", decode=8), dict(label="SPICE", decode=8)]
    results = [[dict(decode=dict(seconds=s)) for s in seconds] for seconds in ([4, 1, 2], [1, 1, 9])]
    assert points(5, dict(jobs=jobs, results=results)) == [Point("plain", 5, 4.0), Point("SPICE", 5, 8.0)]


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = [Point(label, 2**30 * n, 1.0 * n) for label in ("plain", "SPICE") for n in (1, 2)]
    plot(measured, "m.gguf", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_that_is_not_there() -> None:
    done = subprocess.run([sys.executable, str(BENCH), "nothing.gguf"], capture_output=True, text=True)
    assert done.returncode == 3 and "nothing.gguf" in done.stderr
