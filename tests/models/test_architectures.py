"""Every architecture: its tensors are those that llama.cpp asks for, and its routing is not degenerate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from models import synth, taps, tokenizer
from models.architectures import ARCHITECTURES, LEFT_OUT, Dims, classic, deepseek, table
from models.architectures.loader import FromHeader, created

SPELLED = [a.name for a in (*classic.ALL, *deepseek.ALL)]
ASKED = sorted(name for name, a in ARCHITECTURES.items() if isinstance(a, FromHeader))
# A Tap reads logits, and encoders give none.
TAPPED = sorted(name for name in ASKED if not ARCHITECTURES[name].encoder)


@pytest.mark.parametrize("name", SPELLED)
def test_spelled_tensors_are_those_llama_cpp_asks_for(name: str) -> None:
    arch = ARCHITECTURES[name]
    d = Dims(layers=3, fused_gate_up=arch.fuses)
    asked = created(arch.arch, arch.common_header(d), d)
    ours = {t.name: t.shape for t in arch.tensors(d)}
    assert ours.items() <= asked.items()
    missing = {n for n in asked.keys() - ours.keys() if not n.endswith((".scale", ".input_scale", ".bias"))}
    assert missing <= {"rope_freqs.weight"}


@pytest.mark.parametrize("name", TAPPED)
def test_routing_spreads(name: str, tmp_path: Path) -> None:
    """64 random tokens reach half of the experts in every layer and are routed apart."""
    arch = ARCHITECTURES[name]
    layers = 4 + arch.unused_layers
    path = synth.make(name, tmp_path / "m.gguf", layers=layers, experts=16, used=4)
    tokens = np.random.default_rng(5).integers(5, tokenizer.VOCABULARY_SIZE, 64).tolist()
    chosen = taps.routing(path, tokens, experts=16, used=4)
    names = {t.name for t in GGUFReader(path).tensors}
    computed = [i for i in range(4) if f"blk.{i}.ffn_down_exps.weight" in names]
    assert computed and sorted(chosen) == computed
    for layer, ids in chosen.items():
        assert len(np.unique(ids)) >= 8, f"layer {layer} uses {np.unique(ids)}"
        assert len({tuple(sorted(row)) for row in ids}) > 32, f"layer {layer} routes tokens alike"


@pytest.mark.parametrize("name", sorted(n for n, a in ARCHITECTURES.items() if a.fuses))
def test_fused_and_separate(name: str) -> None:
    arch = ARCHITECTURES[name]
    shapes = {}
    for fused in (False, True):
        d = Dims(layers=3, fused_gate_up=fused)
        shapes[fused] = {t.name: t.shape for t in arch.tensors(d) if "_exps." in t.name}
    assert shapes[False]["blk.2.ffn_gate_exps.weight"] == shapes[False]["blk.2.ffn_up_exps.weight"]
    experts, rows, columns = shapes[False]["blk.2.ffn_up_exps.weight"]
    assert shapes[True]["blk.2.ffn_gate_up_exps.weight"] == (experts, 2 * rows, columns)
    assert shapes[True]["blk.2.ffn_down_exps.weight"] == shapes[False]["blk.2.ffn_down_exps.weight"]
    assert not any("ffn_up_exps" in n or "ffn_gate_exps" in n for n in shapes[True])


@pytest.mark.parametrize("name", [n for n in TAPPED if ARCHITECTURES[n].scales])
def test_scales_of_experts_are_used(name: str, tmp_path: Path) -> None:
    """The same weights with and without scales give different logits: the graph multiplies by them."""
    layers = ARCHITECTURES[name].dense_lead + 2
    logits = []
    for scales in (False, True):
        path = synth.make(name, tmp_path / f"{scales}.gguf", layers=layers, experts=4, expert_scales=scales)
        with taps.Tap(path, [], n_ctx=64) as tap:
            logits.append(tap.run(list(range(300, 316))))
    assert np.isfinite(logits).all()
    assert np.abs(logits[0] - logits[1]).max() > 0.01 * logits[0].std()


def test_no_fused_tensor_where_the_loader_takes_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no fused gate_up"):
        synth.make("gpt-oss", tmp_path / "m.gguf", fused_gate_up=True)


def test_a_header_that_llama_cpp_refuses() -> None:
    d = Dims()
    with pytest.raises(ValueError, match="refuses the header of llama4"):
        created("llama4", {"block_count": 2}, d)


def test_list_names_every_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert synth.main(["--list"]) == 0
    listed = {line.split("  ")[0] for line in capsys.readouterr().out.splitlines()}
    assert set(ARCHITECTURES) | set(LEFT_OUT) <= listed
    assert not set(ARCHITECTURES) & set(LEFT_OUT)
    readme = (Path(synth.__file__).parent / "architectures" / "README.md").read_text()
    for name in ARCHITECTURES:
        assert f"`{name}`" in readme, f"{name} is missing in models/architectures/README.md"
    assert table().endswith(LEFT_OUT["nemotron_h"])
