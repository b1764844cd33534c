"""Routing traces: the format, what it refuses, and recording them from tiny models on stock llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from spice_moe import SpiceFileNotFoundError, SpiceFormatError, SpiceUnsupportedError, trace, trace_cli
from spice_moe.watch import Recorder
from support import open_model, prefill, prompt
from support_models import make_dense

TEXT = "The other people had not said what they would do about it.\n" * 2


def example(**changes: Any) -> dict[str, Any]:
    """The parts of a valid trace: 2 layers, 5 tokens in 2 sequences, top 2 of 4."""
    rng = np.random.default_rng(0)
    parts: dict[str, Any] = dict(
        ids=np.argsort(rng.random((2, 5, 4)), axis=-1)[:, :, :2].astype(np.uint8),
        lens=np.array([3, 2], dtype=np.int32),
        n_expert=4,
        layers=np.array([1, 2], dtype=np.int32),
        meta={"model": "m", "top_k": 2},
        weights=rng.random((2, 5, 2)).astype(np.float16),
        tokens=np.arange(5, dtype=np.int32),
        router_inputs=rng.random((2, 5, 3)).astype(np.float16),
        routers=rng.random((2, 4, 3)).astype(np.float32),
        router_bias=rng.random((2, 4)).astype(np.float32),
        selection_bias=rng.random((2, 4)).astype(np.float32),
        predictions=rng.integers(-1, 4, (2, 5, 6, 3)).astype(np.int16),
        prediction_chances=rng.random((2, 5, 6, 3)).astype(np.float16),
    )
    return parts | changes


def test_round_trip(tmp_path: Path) -> None:
    before = trace.Trace(**example())
    after = trace.load(before.save(tmp_path / "t.npz"))
    assert after.meta == before.meta and after.n_expert == 4 and after.top_k == 2
    for name in ("ids", "lens", "layers", *before.summary()["has"]):
        assert np.array_equal(getattr(after, name), getattr(before, name)), name
        assert getattr(after, name).dtype == getattr(before, name).dtype
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]
    assert trace.load(tmp_path / "t.npz", router_inputs=False).router_inputs is None


def test_required_parts_are_enough(tmp_path: Path) -> None:
    """The traces of others hold no more than ids, lens and n_expert."""
    parts = example()
    np.savez(tmp_path / "t.npz", ids=parts["ids"], lens=parts["lens"], n_expert=4, other=np.zeros(3))
    found = trace.load(tmp_path / "t.npz")
    assert found.layers.tolist() == [0, 1]
    assert found.summary()["has"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(ids=np.zeros((2, 5), np.uint8)), "ids must be"),
        (dict(ids=np.zeros((2, 5, 2))), "ids must be"),
        (dict(ids=np.full((2, 5, 2), 4)), "reach 4..4"),
        (dict(ids=np.full((2, 5, 2), -1)), "reach -1"),
        (dict(n_expert=1), "name 2 experts"),
        (dict(lens=np.array([3, 3])), "6 tokens, ids have 5"),
        (dict(lens=np.array([5, 0])), "empty sequence"),
        (dict(lens=np.array([2.5, 2.5])), "lens must be"),
        (dict(layers=np.array([2, 1])), "ascend"),
        (dict(layers=np.array([1])), "layers has shape"),
        (dict(weights=np.zeros((2, 5, 1))), "weights has shape"),
        (dict(tokens=np.zeros(4)), "tokens has shape"),
        (dict(router_inputs=np.zeros((2, 4, 3))), "router_inputs has shape"),
        (dict(routers=np.zeros((2, 3, 3))), "routers has shape"),
        (dict(routers=np.zeros((2, 4, 7))), "7 wide, router_inputs 3"),
        (dict(router_bias=np.zeros(4)), "router_bias has shape"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    parts = example(**changes)
    with pytest.raises(SpiceFormatError, match=message):
        trace.Trace(**parts)
    meta = np.array(json.dumps(parts.pop("meta")))
    np.savez(tmp_path / "t.npz", meta=meta, **parts)
    with pytest.raises(SpiceFormatError, match=rf"t\.npz: .*{message}"):
        trace.load(tmp_path / "t.npz")


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with pytest.raises(SpiceFileNotFoundError, match=r"t\.npz"):
        trace.load(path)
    path.write_bytes(b"no archive")
    with pytest.raises(SpiceFormatError, match=r"not an \.npz"):
        trace.load(path)
    np.savez(path, ids=np.zeros(1))
    with pytest.raises(SpiceFormatError, match="no lens, n_expert"):
        trace.load(path)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(SpiceFormatError, match=r"not an \.npz"):
        trace.load(path)
    whole = trace.Trace(**example()).save(path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SpiceFormatError, match=r"not an \.npz"):
        trace.load(path)
    parts = example(meta=np.array("[1]"))
    np.savez(path, **parts)
    with pytest.raises(SpiceFormatError, match="no JSON object"):
        trace.load(path)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("arch", ["qwen2moe", "deepseek2"])
def test_recorded_ids_are_the_routers_choice(
    arch: str, decode: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = tiny_model(arch, layers=3, experts=8, used=3)
    summary = trace.record(
        path, [TEXT, prompt(20)], tmp_path / "t.npz", router_inputs=True, decode=decode, threads=1, batch=16
    )
    t = trace.load(tmp_path / "t.npz")
    lead = 1 if arch == "deepseek2" else 0
    assert t.layers.tolist() == list(range(lead, 3))
    assert t.ids.shape == (3 - lead, int(t.lens.sum()), 3) and len(t.lens) == 2 and t.lens[1] == 20
    assert t.tokens is not None and t.tokens[-20:].tolist() == prompt(20)
    assert summary["n_expert"] == 8 and t.meta["phase"] == ("decode" if decode else "prefill")
    assert t.router_inputs is not None and t.routers is not None and t.weights is not None
    logits = np.einsum("ltd,led->lte", t.router_inputs.astype(np.float64), t.routers.astype(np.float64))
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    # Inputs are rounded to F16: compare gate values, not places.
    gates = np.take_along_axis(p, t.ids.astype(np.int64), axis=-1)
    assert np.abs(gates - np.sort(p, axis=-1)[:, :, :-4:-1]).max() < 2e-3
    assert np.abs(t.weights - gates).max() < 2e-3


def test_batches_do_not_change_the_routing(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_model("qwen3moe", layers=2, experts=8, used=2)
    found = []
    for options in (dict(batch=64), dict(batch=7), dict(decode=True)):
        trace.record(path, [prompt(40)], tmp_path / "t.npz", threads=1, **options)
        found.append(trace.load(tmp_path / "t.npz"))
    assert all((t.ids == found[0].ids).mean() > 0.99 for t in found)
    for t in found:  # this architecture's gate weights are normalised
        assert t.weights is not None
        assert np.allclose(t.weights.astype(np.float32).sum(axis=-1), 1, atol=2e-3)
        assert (np.diff(t.weights.astype(np.float32), axis=-1) <= 0).all()


def test_watching_does_not_change_the_logits(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("qwen2moe", layers=3, experts=8, used=3)
    tokens = prompt(24)
    llm = open_model(llama_cpp.Llama, path, n_batch=24, n_ubatch=24)
    expected = prefill(llm, tokens)
    llm.close()
    with Recorder(path, n_ctx=768, batch=24, threads=1, router_inputs=True) as recorder:
        for count, seen in recorder.evaluate(tokens):
            assert count == 24 and len(seen) == 3
        assert np.array_equal(recorder.logits(24), expected)
        with pytest.raises(ValueError, match="room for 768"):
            next(recorder.evaluate([1] * 769))


def test_sequences_and_limits(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_model("qwen2moe", layers=3, experts=8, used=3)
    done: list[float] = []
    out = tmp_path / "t.npz"
    trace.record(path, [prompt(25)] * 2, out, sequence=10, tokens=42, threads=1, progress=done.append)
    assert trace.load(out).lens.tolist() == [10, 10, 5, 10, 7]
    assert done[-1] == 1 and done == sorted(done)
    trace.record(path, [TEXT], out, sequence=10, threads=1)
    t = trace.load(out)
    assert t.tokens is not None
    assert set(t.tokens[np.cumsum(t.lens) - t.lens]) == {1}, "each piece of a text starts with BOS"
    assert (t.tokens == 1).sum() == len(t.lens) > 2
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]


def test_predictions_are_recorded(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_model("qwen2moe", layers=4, experts=8, used=2)
    out = tmp_path / "t.npz"
    pieces = [prompt(30), prompt(20, seed=1)]
    trace.record(path, pieces, out, threads=1, predictions="router")
    t = trace.load(out)
    assert t.meta["predictor"] == "router"
    assert t.predictions is not None and t.prediction_chances is not None
    assert t.predictions.shape == (4, 50, 6, 4)  # twice the top 2
    assert (np.diff(t.prediction_chances.astype(np.float32), axis=-1) <= 0).all()
    assert (t.predictions[0, :, :3] >= 0).all()  # the three layers behind the first one
    assert (t.predictions[:, :, 3:] == -1).all()  # four layers later is the same layer again
    found = [t.predictions[g, :, 0, :2] for g in range(3)]
    right = [(found[g][:, :, None] == t.ids[g + 1][:, None, :]).any(axis=1).mean() for g in range(3)]
    assert np.mean(right) > 0.4  # chance is a quarter
    trace.record(path, pieces, tmp_path / "plain.npz", threads=1)
    plain = trace.load(tmp_path / "plain.npz")
    assert plain.predictions is None and np.array_equal(plain.ids, t.ids)


def test_predictions_that_cannot_be_had(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_model("qwen2moe", layers=3, experts=8, used=3)
    for name, message in (("replay", "choose one of: ensemble"), ("adapter", "spice-fit")):
        with pytest.raises(SpiceUnsupportedError, match=message):
            trace.record(path, [TEXT], tmp_path / "t.npz", threads=1, predictions=name)
    with pytest.raises(SpiceUnsupportedError, match="no routed experts"):
        trace.record(make_dense(tmp_path / "d.gguf"), [TEXT], tmp_path / "t.npz", predictions="history")
    assert [p.name for p in tmp_path.iterdir()] == ["d.gguf"]


def test_recording_refuses(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out" / "t.npz"
    out.parent.mkdir()
    with pytest.raises(SpiceFileNotFoundError):
        trace.record(tmp_path / "none.gguf", [TEXT], out)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(SpiceUnsupportedError, match="version 0"):  # as every other command says
        trace.record(bad, [TEXT], out)
    with pytest.raises(SpiceUnsupportedError, match="no routed experts"):
        trace.record(make_dense(tmp_path / "dense.gguf"), [TEXT], out, threads=1)
    with pytest.raises(ValueError, match="no text"):
        trace.record(tiny_model("qwen2moe", layers=3, experts=8, used=3), [[]], out)
    assert not list(out.parent.iterdir())


def test_command(tiny_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_model("qwen2moe", layers=3, experts=8, used=3)
    text, out = tmp_path / "a.txt", tmp_path / "t.npz"
    text.write_text(TEXT)
    arguments = [str(path), "-f", str(text), "-o", str(out), "--threads", "1", "--tokens", "30"]
    assert trace_cli.main([*arguments, "--json", "--router-inputs"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["tokens"] == 30 and summary["top_k"] == 3 and "router_inputs" in summary["has"]
    assert summary["bytes"] == out.stat().st_size
    assert trace_cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "30 tokens" in captured.err
    assert trace.load(out).router_inputs is None
    assert trace_cli.main([str(tmp_path / "no.gguf"), *arguments[1:], "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["exit_code"] == 3
    text.write_text("")
    assert trace_cli.main(arguments) == 2
    assert "no text" in capsys.readouterr().err


def test_larger_ids_fit(tmp_path: Path) -> None:
    t = trace.Trace(**example())
    wide = replace(
        t,
        ids=t.ids.astype(np.uint16) + 300,
        n_expert=512,
        routers=None,
        router_bias=None,
        selection_bias=None,
    )
    assert trace.load(wide.save(tmp_path / "t.npz")).ids.max() >= 300
