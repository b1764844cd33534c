"""Synthetic models load in stock llama-cpp-python, generate, and are what was asked for."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFReader

from models import synth, taps, tokenizer

# Those whose weights are tuned by hand; the others are in test_architectures.py.
ARCHS = ["deepseek", "deepseek2", "llama", "olmoe", "qwen2moe", "qwen3moe"]
TYPES = ("F16", "Q8_0", "Q4_K", "Q5_K")


def load(path: Path, **options: object) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        str(path), n_ctx=128, n_threads=1, n_threads_batch=1, verbose=False, logits_all=True, **options
    )


def expert_types(path: Path) -> set[str]:
    """Types of all expert tensors of a file."""
    return {t.tensor_type.name for t in GGUFReader(path).tensors if "_exps." in t.name}


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def generate(path: Path, tokens: int = 16) -> tuple[list[int], np.ndarray]:
    """Greedy continuation of a fixed prompt: its token ids, and the logits of every step [tokens, vocab]."""
    llm = load(path)
    prompt = llm.tokenize(b"The other people", add_bos=True)
    out = []
    for token in llm.generate(prompt, temp=0.0):
        out.append(token)
        if len(out) == tokens:
            break
    logits = llm.scores[len(prompt) - 1 : len(prompt) - 1 + tokens].copy()
    llm.close()
    return out, logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("synth")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_loads_and_generates(arch: str, kind: str, tmp_path: Path) -> None:
    path = synth.make(arch, tmp_path / "m.gguf", expert_type=kind)
    assert expert_types(path) == {kind}
    tokens, logits = generate(path)
    assert len(tokens) == 16
    assert np.isfinite(logits).all()
    assert not np.allclose(logits[0], logits[1])
    assert len(set(tokens)) > 4, f"greedy text is stuck: {tokens}"
    assert not set(tokens) & {tokenizer.BOS, tokenizer.EOS}


@pytest.mark.parametrize("kind", TYPES[1:])
@pytest.mark.parametrize("arch", ["qwen2moe", "deepseek2"])
def test_llama_cpp_quantises_it(arch: str, kind: str, folder: Path, tmp_path: Path) -> None:
    source = folder / f"{arch}.gguf"
    if not source.exists():
        synth.make(arch, source)
    path = synth.quantize(source, tmp_path / "q.gguf", kind)
    assert expert_types(path) == {kind}
    assert np.isfinite(generate(path, 4)[1]).all()


def test_our_quantisation_is_llama_cpps(tmp_path: Path) -> None:
    """Experts encoded by ggml_quantize_chunk are those that llama_model_quantize makes of the F32 model."""
    full = synth.make("llama", tmp_path / "f32.gguf", expert_type="F32")
    theirs = GGUFReader(synth.quantize(full, tmp_path / "theirs.gguf", "Q4_K"))
    ours = GGUFReader(synth.make("llama", tmp_path / "ours.gguf", expert_type="Q4_K"))
    by_name = {t.name: t for t in theirs.tensors}
    experts = [t for t in ours.tensors if "_exps." in t.name]
    assert len(experts) == 6
    for tensor in experts:
        assert np.array_equal(tensor.data, by_name[tensor.name].data), tensor.name


@pytest.mark.parametrize("arch", ARCHS)
def test_routing_spreads(arch: str, tmp_path: Path) -> None:
    """64 random tokens reach at least half of the experts in every layer, and layers and tokens differ."""
    path = synth.make(arch, tmp_path / "m.gguf", layers=6, experts=16, used=4, embd=256)
    tokens = np.random.default_rng(5).integers(5, tokenizer.VOCABULARY_SIZE, 64).tolist()
    chosen = taps.routing(path, tokens, experts=16, used=4)
    lead = synth.ARCHITECTURES[arch].dense_lead
    assert sorted(chosen) == list(range(lead, 6))
    for layer, ids in chosen.items():
        assert ids.shape == (64, 4)
        assert len(np.unique(ids)) >= 8, f"layer {layer} uses {np.unique(ids)}"
        assert len({tuple(sorted(row)) for row in ids}) > 32, f"layer {layer} routes tokens alike"
    deep = chosen[5]
    assert not np.array_equal(chosen[4], deep)


def test_experts_matter(tmp_path: Path) -> None:
    """Other experts give other logits: a wrong choice shows."""
    path = synth.make("olmoe", tmp_path / "m.gguf", used=4)
    with taps.Tap(path, [], n_ctx=64) as tap:
        right = tap.run(list(range(300, 332)))
    with taps.Tap(path, [], n_ctx=64, olmoe__expert_used_count=3) as tap:
        fewer = tap.run(list(range(300, 332)))
    assert np.abs(right - fewer).max() > 0.1 * right.std()


@pytest.mark.parametrize("arch", ["qwen2moe", "deepseek2"])
@pytest.mark.parametrize("parts", [2, 3])
def test_split_files(arch: str, parts: int, tmp_path: Path) -> None:
    whole = synth.make(arch, tmp_path / "m.gguf", layers=3)
    first = synth.make(arch, tmp_path / "m.gguf", layers=3, split=parts)
    assert first.name == f"m-00001-of-0000{parts}.gguf"
    files = sorted(tmp_path.glob("m-*.gguf"))
    assert len(files) == parts
    readers = [GGUFReader(f) for f in files]
    assert readers[1].fields["split.count"].contents() == parts
    # Cut inside a layer: the last tensor of a part and the first of the next are experts of the same layer.
    for before, after in itertools.pairwise(readers):
        last, following = before.tensors[-1].name, after.tensors[0].name
        assert "_exps." in last and "_exps." in following
        assert last.split(".")[1] == following.split(".")[1]
    joined = {t.name: t.data for r in readers for t in r.tensors}
    for tensor in GGUFReader(whole).tensors:
        assert np.array_equal(joined[tensor.name], tensor.data)
    assert generate(first)[0] == generate(whole)[0]


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    a = synth.make("qwen2moe", tmp_path / "a.gguf", seed=7, expert_type="Q4_K")
    b = synth.make("qwen2moe", tmp_path / "b.gguf", seed=7, expert_type="Q4_K")
    c = synth.make("qwen2moe", tmp_path / "c.gguf", seed=8, expert_type="Q4_K")
    assert digest(a) == digest(b)
    assert generate(a)[0] != generate(c)[0]


def test_fused_gate_up(tmp_path: Path) -> None:
    path = synth.make("deepseek2", tmp_path / "m.gguf", fused_gate_up=True, expert_type="Q4_K")
    names = {t.name for t in GGUFReader(path).tensors}
    assert "blk.1.ffn_gate_up_exps.weight" in names and "blk.1.ffn_up_exps.weight" not in names
    assert np.isfinite(generate(path)[1]).all()


def test_row_bank_keeps_experts_apart(tmp_path: Path) -> None:
    path = synth.make(
        "qwen2moe", tmp_path / "m.gguf", experts=12, row_bank=2, expert_type="Q4_K", down_type="Q5_K"
    )
    assert expert_types(path) == {"Q4_K", "Q5_K"}
    for tensor in GGUFReader(path).tensors:
        if "_exps." in tensor.name:
            assert len({expert.tobytes() for expert in tensor.data}) == 12
    assert np.isfinite(generate(path)[1]).all()


def test_fallback_types(tmp_path: Path) -> None:
    """A down projection 96 wide cannot be Q4_K: llama.cpp's fallback Q5_0 is stored."""
    path = synth.make("olmoe", tmp_path / "m.gguf", ff=96, expert_type="Q4_K")
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_up_exps.weight"] == "Q4_K"
    assert kinds["blk.0.ffn_down_exps.weight"] == "Q5_0"
    assert np.isfinite(generate(path, 4)[1]).all()


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q4_0", "Q6_K", "MXFP4", "NVFP4", "TQ2_0"])
def test_more_types(kind: str, tmp_path: Path) -> None:
    path = synth.make("llama", tmp_path / "m.gguf", expert_type=kind)
    assert expert_types(path) == {kind}
    assert np.isfinite(generate(path, 4)[1]).all()


def test_tokenizer_spells_any_text(tmp_path: Path) -> None:
    llm = load(synth.make("llama", tmp_path / "m.gguf"))
    text = "The people\tin Ünïcode: 日本語 😀 \x00 <b>&amp;</b>\n\n  twice  "
    ids = llm.tokenize(text.encode(), add_bos=False)
    assert llm.detokenize(ids).decode() == text
    assert llm.tokenize(b"a", add_bos=True)[0] == llm.token_bos() == tokenizer.BOS
    assert llm.token_eos() == tokenizer.EOS
    answer = llm.create_chat_completion(
        [{"role": "user", "content": "Which words?"}], max_tokens=8, temperature=0.0
    )
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        ("qwen9moe", {}, "unknown architecture"),
        ("llama", {"expert_type": "Q4_J"}, "unknown tensor type"),
        ("llama", {"used": 9}, "9 of 8 experts"),
        ("llama", {"fused_gate_up": True}, "no fused gate_up"),
        ("olmoe", {"expert_scales": True}, "no scales"),
        ("qwen2moe", {"shared": False}, "always has shared experts"),
        ("deepseek2", {"layers": 1}, "needs more than 1"),
        ("llama", {"embd": 100}, "does not divide"),
        ("llama", {"split": 99}, "into 99 parts"),
    ],
)
def test_refuses(arch: str, options: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        synth.make(arch, tmp_path / "m.gguf", **options)
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    assert synth.main(["olmoe", "-o", str(out), "--layers", "1", "--experts", "4", "--type", "Q8_0"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert expert_types(out) == {"Q8_0"}
    assert synth.main(["olmoe", "-o", str(out), "--used", "99"]) == 1
    assert synth.main(["-o", str(out)]) == 2
    assert synth.main(["olmoe"]) == 2
    # A preset is a set of defaults: shrink it and it is a small file of the same kind.
    small = ["--preset", "bench-2g", "--layers", "1", "--embd", "256", "--experts", "6", "--ff", "256"]
    assert synth.main([*small, "-o", str(out)]) == 0
    assert expert_types(out) == {"Q4_K", "Q5_K"}
