"""spice-sim and spice-plan: what they print, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from spice_moe import hardware, plan_cli, probe, sim, sim_cli, sim_models, trace

SHAPE = sim_models.Shape("toy", (1e6,) * 4, 2e6, 16, 2)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    ids = np.argsort(rng.random((4, 60, 16)) * rng.random((4, 1, 16)), axis=2)[..., :2].astype(np.uint8)
    made = trace.Trace(ids=ids, lens=np.array([30, 30]), n_expert=16, layers=np.arange(4))
    return made.save(tmp_path / "t.npz")


def test_every_strategy_on_every_preset(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in hardware.presets():
        arguments = [str(recorded), "--hardware", name, "--slab", "1M", "--slots", "30", "--json"]
        assert sim_cli.main(arguments) == 0
        report = json.loads(capsys.readouterr().out)
        runs = {one["strategy"]: one for one in report["runs"]}
        assert set(runs) == set(sim.strategies())
        assert all(one["tpot"] > 0 for one in runs.values())
        idle = hardware.load(name).power.idle
        assert all(one["joules_per_token"] > idle * one["tpot"] for one in runs.values())
        assert runs["belady"]["miss_rate"] <= runs["lru"]["miss_rate"]


def test_the_table(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(recorded), "--slab", "1M", "--other", "1M", "--strategy", "spice", "lru"]
    assert sim_cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "RTX 4060" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["spice", "lru"] * 4
    assert lines[1].split()[-1] == "J/token" and float(lines[2].split()[-1]) > 0


def test_refusals(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim_cli.main([str(recorded)]) == 5  # the model is not known
    assert "--slab" in capsys.readouterr().err
    assert sim_cli.main(["nothing.npz"]) == 3
    assert sim_cli.main([str(recorded), "--slab", "1M", "--hardware", "nothing"]) == 3
    assert sim_cli.main([str(recorded), "--slab", "1M", "--predictor", "guess"]) == 2
    with pytest.raises(SystemExit):
        sim_cli.main([str(recorded), "--strategy", "best"])
    with pytest.raises(SystemExit):
        plan_cli.main([])


def test_recorded_predictions(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told the truth, it does what the oracle does; told nothing, what no predictor does."""
    t = trace.load(recorded)
    layers, tokens, k = t.ids.shape
    told = np.full((layers, tokens, 3, k), -1, np.int16)
    following = np.concatenate([t.ids, np.roll(t.ids, -1, axis=1)]).astype(np.int16)  # then the next token's
    for layer in range(layers):
        for horizon in (1, 2, 3):
            told[layer, :, horizon - 1] = following[layer + horizon]
            if layer + horizon >= layers:
                told[layer, np.cumsum(t.lens) - 1, horizon - 1] = -1  # no token follows
    machine = hardware.load("laptop-nvme")
    arguments = {"slots": 20, "use_device": False}

    def seconds(routing: trace.Trace, name: str, strategy: str, recall: float = 1.0) -> float:
        options = sim.Options(predictor=name, recall=(recall,) * 6 if name == "replay" else ())
        return sim.run(routing, machine, SHAPE, strategy, options=options, **arguments).tpot

    for strategy in ("specprefetch", "promoe"):  # they look no further than three layers
        for truth in (True, False):
            ids = told if truth else np.full_like(told, -1)
            made = replace(t, predictions=ids, prediction_chances=np.ones(ids.shape, np.float16))
            oracle = seconds(t, "replay", strategy, 1.0 if truth else 0.0)
            assert seconds(made, "recorded", strategy) == pytest.approx(oracle, rel=1e-9)
    assert seconds(t, "replay", "specprefetch") < seconds(t, "replay", "specprefetch", 0.0)
    assert sim_cli.main([str(recorded), "--slab", "1M", "--predictor", "recorded"]) == 2
    assert "spice-trace --predictions" in capsys.readouterr().err
    made = replace(t, predictions=told, prediction_chances=np.ones(told.shape, np.float16))
    path = made.save(recorded.with_name("told.npz"))
    assert sim_cli.main([str(path), "--slab", "1M", "--predictor", "recorded", "--tokens", "20"]) == 0


def test_known_models(recorded: Path) -> None:
    t = trace.load(recorded)
    shape = sim_models.of_trace(t, "DeepSeek-V2-Lite.part", 8.0)
    assert shape.slab_bytes == (3 * 2048 * 1408,) * 4
    sim_models.check(shape, t, "t")


@pytest.mark.parametrize("name", hardware.presets())
def test_plans(name: str) -> None:
    machine = hardware.load(name)
    report = plan_cli.plan(SHAPE, machine)
    assert report["fits"] and report["possible"]
    assert report["budget"] == report["expert_bytes"] == 64e6
    speeds = [one["tpot"] for one in report["forecasts"]]
    assert all(one["low"] < one["tpot"] < one["high"] for one in report["forecasts"])
    assert speeds[-1] < speeds[0]  # more room, more speed
    assert "tokens/s" in plan_cli.describe(report)


def test_plans_for_too_little() -> None:
    laptop = hardware.load("laptop-nvme")
    tight = plan_cli.plan(SHAPE, laptop, ram=plan_cli.RESERVE + int(2e6 + 20e6))
    assert not tight["fits"] and tight["budget"] == 20e6
    assert "31% of the experts fit" in plan_cli.describe(tight)
    nothing = plan_cli.plan(SHAPE, laptop, ram=10**6)
    assert not nothing["possible"] and nothing["forecasts"] == []
    assert "does not run" in plan_cli.describe(nothing)


def test_nothing_is_nothing() -> None:
    """0 is a size, not "as much as there is"."""
    gpu = hardware.load("rtx4060")
    assert plan_cli.plan(SHAPE, gpu)["pool"] == "VRAM"
    without = plan_cli.plan(SHAPE, gpu, vram=0)
    assert without["pool"] == "RAM" and without["room"] == gpu.memory
    assert not plan_cli.plan(SHAPE, hardware.load("laptop-nvme"), ram=0)["possible"]


def test_a_probe_writes_a_file_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MEMORY_BYTES", 2**20)
    monkeypatch.setattr(probe, "DISK_SECONDS", 0.05)
    monkeypatch.setattr(probe, "DOT_BYTES", 2**20)
    monkeypatch.setattr(probe, "DOT_SECONDS", 0.002)
    monkeypatch.setattr(probe, "BOTH_SECONDS", 0.01)
    file = tmp_path / "data"
    file.write_bytes(bytes(16 * probe.BLOCK))
    measured = probe.measure(file, progress=False)
    assert 0 <= measured.contention < 100
    assert measured.disk.bandwidth > 0 and measured.host.stream > 0
    assert measured.disk.in_flight in (2, 4, 8) and measured.disk.latency >= 0
    assert set(measured.host.types) == set(probe.TYPES) and min(measured.host.types.values()) > 0
    text = hardware.to_toml(measured)
    again = hardware.parse(text, "mine").host
    assert again.row >= measured.host.stream * 0.99
    assert again.types == pytest.approx(measured.host.types, rel=1e-3)
    assert probe.dot_speeds(["I32", "what"]) == {}
