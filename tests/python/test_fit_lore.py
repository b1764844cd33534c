"""spice-fit --lore: the experts' formulas, and stand-ins of the shipped model from end to end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from spice_moe import Llama, capture, fit, fit_cli, fit_lore
from spice_moe.errors import SpiceUnsupportedError
from spice_moe.fit_lore_experts import Expert, ExpertFile, Formula
from spice_moe.fit_lore_sensitivity import divergence, log_probabilities
from spice_moe.fit_lore_solve import StandIn
from spice_moe.shipped import tiny_model as shipped_model
from support import open_model, prompt
from test_coverage import layers_of
from test_fit import WORDS, chat

# Of each kind of formula one, and what the stand-ins' neurons need to know.
FORMULAS = {
    "qwen2moe": ("silu", True),
    "gemma4": ("gelu", True),
    "smallthinker": ("relu", True),
    "nemotron_h_moe": ("relu squared, no gate", False),
    "gpt-oss": ("gpt-oss", False),
}


@pytest.mark.parametrize("arch", FORMULAS)
def test_the_formula_is_found_by_trial(arch: str, tiny_model) -> None:
    path = tiny_model(arch, layers=layers_of(arch), expert_type="Q8_0")
    with contextlib.closing(open_model(Llama, path)) as llm:
        found = fit_lore.formulas(llm, ExpertFile(path), prompt(16))
    assert found
    assert {(f.name, f.plain) for f in found.values()} == {FORMULAS[arch]}


def test_projections_in_one_tensor_and_scales(tiny_model) -> None:
    path = tiny_model(
        "gemma4", layers=2, expert_type="Q8_0", down_type="F16", fused_gate_up=True, expert_scales=True
    )
    with contextlib.closing(open_model(Llama, path)) as llm:
        found = fit_lore.formulas(llm, ExpertFile(path), prompt(16))
    assert {f.name for f in found.values()} == {"gelu"}


def test_a_layer_that_computes_something_else_is_refused(tiny_model) -> None:
    path = tiny_model("olmoe", layers=2, expert_type="Q8_0")
    with contextlib.closing(open_model(Llama, path)) as llm:
        file = ExpertFile(path)
        with contextlib.closing(capture.run(llm, [prompt(16)], outputs=True)) as chunks:
            chunk = next(iter(chunks))
    h, ids, down = chunk.hidden[1], chunk.ids[1], chunk.down[1]
    assert file.formula(1, h, ids, down).name == "silu"
    with pytest.raises(SpiceUnsupportedError, match=r"olmoe.*layer 1: no known formula"):
        file.formula(1, h, ids, down + 0.1 * np.abs(down))


def test_bytes_compute_what_was_fitted() -> None:
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    expert = Expert(up=floats(6, 8), down=floats(5, 6), gate=floats(6, 8))
    keep = np.array([4, 1])
    # Rows of any length.
    fitted = StandIn(a=1e-4 * floats(3, 8), b=1e5 * floats(5, 5), offset=floats(5), bias=floats(5))
    fitted = dataclasses.replace(fitted, b=np.concatenate([floats(2, 5), fitted.b[2:]]))
    h = floats(20, 8)
    silu = Formula("silu", lambda g, u: g / (1 + np.exp(-g)) * u)
    parts = fit_lore._as_bytes(fitted, expert, keep)
    assert all(rows.dtype == np.int8 and np.abs(rows).max() == 127 for rows in parts[:3])
    y = fitted.bias + fit_lore._evaluate(silu, h, *parts)
    expected = fitted(h, expert.activations(h, silu)[:, keep])
    np.testing.assert_allclose(y, expected, rtol=0, atol=0.03 * np.abs(expected).max())


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("lore") / "tiny.spice.gguf"
    options = fit.FitOptions(tokens=4000, chunk=128, heads=False, lore=16, n_threads=1)
    return out, fit.fit(shipped_model(), {"chat": chat(18000)}, out, options)


def test_stand_ins_are_nearer_than_the_mean_and_than_nothing(fitted: tuple[Path, dict]) -> None:
    _, report = fitted
    lore = report["lore"]
    assert [row["layer"] for row in lore["layers"]] == [1, 2, 3]
    assert lore["activation"] == "silu"
    assert 0.05 < lore["share"] < 0.3
    for row in lore["layers"]:
        assert row["error"] < 0.6 * row["base_error"] < 0.7
        block = row["block"]
        assert block["lore"] < 0.5 * block["drop"]
        assert block["lore"] < block["base"]
        assert row["estimated"] == pytest.approx(block["lore"], rel=0.5)  # of so few tokens
        assert len(row["expert_errors"]) == 16


def test_the_file_has_what_the_format_says(fitted: tuple[Path, dict]) -> None:
    path, report = fitted
    tensors = {t.name: t for t in GGUFReader(path).tensors}
    for row in report["lore"]["layers"]:
        count = row["neurons"] + row["rank"]
        p = f"lore.{row['layer']}."
        assert tensors[p + "a"].data.shape == tensors[p + "b"].data.shape == (16, count, 256)
        assert tensors[p + "offset"].data.shape == tensors[p + "scale"].data.shape == (16, count)
        if row["neurons"]:
            assert tensors[p + "gate"].data.shape == (16, row["neurons"], 256)
            assert tensors[p + "gate_scale"].data.shape == (16, row["neurons"])
        assert tensors[p + "sensitivity"].data[0] > 0
        assert (tensors[p + "error"].data < 1.5).all()
        assert 3 * row["neurons"] + 2 * row["rank"] <= 2 * 2 * 16
    assert {t for t in tensors if not t.startswith("lore.")} == {"lore-kl.curve"}
    curve = tensors["lore-kl.curve"].data
    assert 1 <= len(curve) <= 5 and (np.diff(curve, axis=0, prepend=0) > 0).all()


def test_substitution_costs_less_than_dropping_and_about_what_is_expected(fitted: tuple[Path, dict]) -> None:
    path, _ = fitted
    with contextlib.closing(Llama(str(shipped_model()), n_ctx=256, n_batch=256, verbose=False)) as llm:
        core = llm.spice._core
        core.load_lore(str(path))
        ids = capture.tokenize(llm, chat(40000)[-900:])[:250]
        exact = log_probabilities(llm, ids)
        kl = {}
        for kind in ("drop", "base", "lore"):
            core.set_substitution(kind, 1.0)
            core.reset_stats()
            kl[kind] = float(divergence(exact, log_probabilities(llm, ids)).mean())
        stats = core.stats()
        core.set_substitution("off")
        np.testing.assert_array_equal(log_probabilities(llm, ids), exact)
    assert kl["lore"] < 0.5 * kl["drop"]
    assert kl["lore"] < kl["base"]
    assert 0.1 < stats["lore_kl"] / len(ids) / kl["lore"] < 10  # so few tokens


def test_the_command_fits_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(chat(8000))
    out = tmp_path / "s.gguf"
    command = [str(shipped_model()), "--text", str(text), "-o", str(out), "--chunk", "64", "--horizons", "1"]
    assert fit_cli.main([*command, "--tokens", "1500", "--lore", "8"]) == 0
    printed = capsys.readouterr().out
    assert "recall of the top 4" in printed
    share = re.search(r"stand-ins of size 8: .*, ([\d.]+)% of the experts", printed)
    assert share
    with contextlib.closing(open_model(Llama, shipped_model(), lore=out)) as llm:
        said = re.search(r"stand-ins of ([\d.]+)% of their size", str(llm.spice.plan))
    assert said and float(said[1]) == pytest.approx(float(share[1]), abs=0.2), "both say the same"
    kinds = {t.name.split(".")[0] for t in GGUFReader(out).tensors}
    assert kinds == {"lore", "lore-kl", "draft", "adapter"}
    assert not list(tmp_path.glob(".spice-fit-*"))


def test_a_layer_that_no_formula_fits_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("spice_moe.fit_lore_experts._TOLERANCE", 0.0)
    text = tmp_path / "text.txt"
    text.write_text(chat(8000))
    out = tmp_path / "s.gguf"
    command = [
        str(shipped_model()),
        "--text",
        str(text),
        "-o",
        str(out),
        "--lore",
        "8",
        "--no-heads",
        "--json",
    ]
    assert fit_cli.main(command) != 0
    assert "no known formula" in json.loads(capsys.readouterr().out)["error"]["message"]
    assert not out.exists()


def test_the_size_is_checked() -> None:
    with pytest.raises(ValueError, match="8 to 64, not 65"):
        fit.FitOptions(lore=65)
    with pytest.raises(ValueError, match="nothing to fit"):
        fit.FitOptions(heads=False)


def test_a_dense_layer_between_and_few_tokens(tiny_model, tmp_path: Path) -> None:
    """Experts that the text never reaches get a stand-in of finite numbers."""
    path = tiny_model("deepseek2", layers=4, experts=32, used=2, expert_type="Q8_0")
    options = fit.FitOptions(tokens=600, chunk=32, heads=False, lore=8)
    fit.fit(path, {"words": WORDS}, tmp_path / "s.gguf", options)
    for tensor in GGUFReader(tmp_path / "s.gguf").tensors:
        assert np.isfinite(tensor.data.astype(np.float32)).all(), tensor.name
    with contextlib.closing(open_model(Llama, path)) as llm:
        llm.spice._core.load_lore(str(tmp_path / "s.gguf"))
