"""Models with planted routing: they load, are what was asked for, and route about as real models do."""

from __future__ import annotations

import hashlib
import re
import resource
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFReader
from spice_moe import trace

from models import routing, synth
from models.planted import REAL, make_like, parse_size
from models.planted.plant import Plant, kernel
from models.planted.write import narrowed
from models.routing_stats import of_trace

SMALL = dict(embd=256, ff=64, vocab=512, file_type="Q8_0")
# Every real shape has its quirks here: 1408-wide down projections are no multiple of 256.
EXPERT_TYPES = {
    "deepseek-v2-lite": {"Q5_K", "Q5_1", "Q8_0"},
    "qwen1.5-moe-a2.7b": {"Q5_K", "Q5_1", "Q8_0"},
    "qwen3-30b-a3b": {"Q4_K", "Q6_K"},
    "olmoe-1b-7b": {"Q4_K", "Q6_K"},
    "mixtral-8x7b": {"Q4_K", "Q6_K"},
    "gpt-oss-20b": {"MXFP4"},
}


def texts(count: int, characters: int) -> list[str]:
    """Technical English from the standard library's documentation."""
    plain = [" ".join(re.sub(r"[^\w\s.,;()'-]+", " ", topics[name]).split()) for name in sorted(topics)]
    long = [text for text in plain if len(text) > 2000 + characters]
    return [long[i][1000 : 1000 + characters] for i in np.linspace(0, len(long) - 1, count).astype(int)]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", sorted(REAL))
def test_loads_generates_and_spreads(name: str, tmp_path: Path) -> None:
    path = make_like(name, tmp_path / "m.gguf", layers=REAL[name].lead + 3, **SMALL)
    llm = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
    tokens = []
    for token in llm.generate(llm.tokenize(b"The other people"), temp=0.0):
        tokens.append(token)
        if len(tokens) == 16:
            break
    llm.close()
    assert len(set(tokens)) > 4, f"greedy text is stuck: {tokens}"
    trace.record(path, texts(2, 200), tmp_path / "t.npz", sequence=64, threads=1)
    t = trace.load(tmp_path / "t.npz")
    real = REAL[name]
    assert (t.n_expert, t.top_k) == (real.experts, real.used)
    for layer in t.ids:
        assert len(np.unique(layer)) > real.experts / 2
    assert t.weights is not None
    if real.renormalised:
        assert np.allclose(t.weights.astype(np.float32).sum(axis=-1), 1, atol=3e-3)


@pytest.mark.parametrize("thin", [False, True])
def test_statistics_are_near_the_target(thin: bool, tmp_path: Path) -> None:
    """A narrow DeepSeek-V2-Lite with eight MoE layers; full ones are measured by models/routing_stats.py."""
    path = make_like("deepseek-v2-lite", tmp_path / "m.gguf", layers=8 if thin else 9, thin=thin, **SMALL)
    trace.record(
        path, texts(8, 400), tmp_path / "t.npz", sequence=192, tokens=1500, threads=1, router_inputs=True
    )
    s, wanted = of_trace(trace.load(tmp_path / "t.npz"), optional=False), routing.TARGETS["deepseek-v2-lite"]
    for lag in (1, 2, 4, 8):
        assert s.repeat[lag] == pytest.approx(wanted.repeat[lag], abs=0.08)
    assert s.repeat[1] > s.repeat[2] > s.repeat[8] > 0.1
    for slots in (16, 32):
        assert s.lru[slots] == pytest.approx(wanted.lru[slots], abs=0.1)
    assert s.gini_sequence == pytest.approx(wanted.gini_sequence, abs=0.12)
    assert s.unique[8] == pytest.approx(wanted.unique[8], abs=4)
    for ahead in (1, 3, 5):
        assert s.recall[ahead] == pytest.approx(wanted.recall[ahead], abs=0.1)
    assert s.recall[1] > s.recall[3] > s.recall[5]


@pytest.mark.parametrize("name", sorted(REAL))
def test_real_shapes_and_types(name: str) -> None:
    """The planned full-size file: near the real one's size, and with its types. Nothing is written."""
    from models.planted import write
    from models.planted.write import _Vocabulary

    real = REAL[name]
    words = _Vocabulary(real.vocab, None)
    plans = write._plans(Plant(real, words.counts, words.bos, 0), real.layers, words.kinds, real.file_type)
    assert {p.kind.name for p in plans if "_exps.weight" in p.name} == EXPERT_TYPES[name]
    sizes = {  # GB of the published GGUFs
        "deepseek-v2-lite": 11.9, "qwen1.5-moe-a2.7b": 10.7, "qwen3-30b-a3b": 18.6, "olmoe-1b-7b": 4.2,
        "mixtral-8x7b": 28.4, "gpt-oss-20b": 12.1,
    }  # fmt: skip
    assert sum(p.nbytes for p in plans) / 1e9 == pytest.approx(sizes[name], rel=0.06)
    assert max(p.nbytes for p in plans) < 700e6, "one tensor is in memory at a time"


def test_same_seed_same_bytes_and_no_experts_alike(tmp_path: Path) -> None:
    a = make_like("olmoe-1b-7b", tmp_path / "a.gguf", layers=2, seed=7, **SMALL)
    b = make_like("olmoe-1b-7b", tmp_path / "b.gguf", layers=2, seed=7, **SMALL)
    c = make_like("olmoe-1b-7b", tmp_path / "c.gguf", layers=2, seed=8, **SMALL)
    assert digest(a) == digest(b) != digest(c)
    experts = [e.tobytes() for t in GGUFReader(a).tensors if "gate_exps" in t.name for e in t.data]
    assert len(set(experts)) == len(experts) == 128


def test_split_and_size(tmp_path: Path) -> None:
    size = 30_000_000
    first = make_like("olmoe-1b-7b", tmp_path / "m.gguf", size=size, split=2, **SMALL)
    assert first.name == "m-00001-of-00002.gguf"
    total = sum(p.stat().st_size for p in tmp_path.iterdir())
    assert 0.5 * size < total < 1.02 * size
    with pytest.raises(ValueError, match="GB already"):
        make_like("olmoe-1b-7b", tmp_path / "m.gguf", size=1000, **SMALL)


def test_sizes_are_read() -> None:
    assert [parse_size(s) for s in ("10G", "1.5M", "800 mb", "77")] == [10**10, 1_500_000, 8 * 10**8, 77]
    with pytest.raises(ValueError, match="write 10G"):
        parse_size("ten")


def test_tokenizer_of_another_file(tmp_path: Path) -> None:
    source = synth.make("olmoe", tmp_path / "s.gguf")
    path = make_like(
        "qwen3-30b-a3b", tmp_path / "m.gguf", layers=1, tokens_from=source, **SMALL | dict(vocab=600)
    )
    llm = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, verbose=False)
    other = llama_cpp.Llama(str(source), vocab_only=True, verbose=False)
    assert llm.n_vocab() == 600
    assert llm.tokenize(b"The people, all") == other.tokenize(b"The people, all")
    assert "im_start" in llm.metadata["tokenizer.chat_template"]
    llm.close(), other.close()
    with pytest.raises(ValueError, match="does not fit 100 rows"):
        make_like("qwen3-30b-a3b", tmp_path / "x.gguf", tokens_from=source, **SMALL | dict(vocab=100))


def test_kernel_is_a_power_law() -> None:
    for base, n in ((1e4, 64), (1e6, 128), (150000.0, 64)):
        theta = base ** (-np.arange(0, n, 2) / n)
        a = kernel(theta, 0.8)
        assert (a >= 0).all()
        d = np.array([1, 4, 16, 64, 256])
        fall = (np.cos(np.outer(d, theta)) - 1) @ a
        assert np.abs(fall + 0.8 * np.log1p(d)).max() < 0.45


def test_embedding_is_centred_and_of_one_size() -> None:
    real = replace(narrowed(REAL["olmoe-1b-7b"], 256, 64), vocab=700)
    counts = np.random.default_rng(0).random(700) ** 8
    plant = Plant(real, counts, 1, 0)
    rows = plant.embedding(0, 700)
    assert np.allclose((rows**2).mean(axis=1), 1, atol=1e-4)
    assert np.array_equal(rows[100:650], plant.embedding(100, 650))
    share = counts / counts.sum()
    mean = share @ rows
    assert np.abs(mean[plant.token]).max() < 0.05
    assert np.sqrt((mean[plant.rest] ** 2).mean()) < 0.5 * np.sqrt((share**2).sum())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(name="gpt-7"), "unknown model"),
        (dict(layers=1), "dense layer"),
        (dict(layers=3, size=10**9), "not both"),
        (dict(file_type="Q9_Z"), "unknown tensor type"),
    ],
)
def test_refuses(options: dict, message: str, tmp_path: Path) -> None:
    arguments = dict(name="deepseek-v2-lite", path=tmp_path / "m.gguf") | SMALL | options
    with pytest.raises(ValueError, match=message):
        make_like(**arguments)
    assert not list(tmp_path.iterdir())


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.gguf"
    small = ["--embd", "256", "--ff", "64", "--type", "Q8_0", "--layers", "2"]
    assert synth.main(["--like", "olmoe-1b-7b", "-o", str(out), *small]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert synth.main(["--like", "olmoe-1b-7b", "-o", str(out), "--experts", "9"]) == 1
    assert "no option --experts" in capsys.readouterr().err


def test_memory_stays_small() -> None:
    """Of this whole test run; a writer that held a model, or drew a vocabulary at once, would show."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert peak < 3000
