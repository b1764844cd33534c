"""Training code of spice-tiny: export equals llama.cpp, training resumes, experts are chosen as told."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from models.tiny import data, evaluate, export, optim, stories, tasks, train  # noqa: E402
from models.tiny.config import Config  # noqa: E402
from models.tiny.model import Tiny  # noqa: E402
from models.tiny.tokens import Tokens  # noqa: E402

SMALL = Config(vocab=400, layers=2, experts=8, used=2, context=128)
TEXT = "<|im_start|>user\nIt's 12 + 193,\n\n  na\u00efve \u2713 caf\u00e9!<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    r = random.Random(0)
    texts = [stories.story(r) for _ in range(50)] + ["\n".join(tasks.draw(r)) for _ in range(200)]
    return Tokens.train(texts, SMALL.vocab)


def random_model(config: Config) -> Tiny:
    torch.manual_seed(1)
    model = Tiny(config, precise=True)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.copy_(1 + 0.2 * torch.randn_like(p))
            elif not p.any():
                p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5)
    return model


class FakeStream:
    """Random rows in place of the texts."""

    def batch(self, step: int, rows: int, time: int) -> tuple[np.ndarray, np.ndarray]:
        r = np.random.default_rng(step)
        shape = (rows, time + 1)
        return r.integers(0, SMALL.vocab, shape), np.ones(shape, np.float32)


def test_tokenizer_spells_everything_and_keeps_digits_apart(tokens: Tokens) -> None:
    assert len(tokens) == SMALL.vocab
    assert tokens.decode(tokens.encode(TEXT)) == TEXT
    assert len(tokens.encode("1234567")) == 7


def test_export_computes_the_same_in_llama_cpp(tokens: Tokens, tmp_path: Path) -> None:
    model = random_model(SMALL)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    path = export.write_f32(tmp_path / "tiny.gguf", SMALL, weights, tokens)
    llm = evaluate.open_gguf(path, all_logits=True)
    ids = tokens.encode(TEXT)
    assert llm.tokenize(TEXT.encode(), add_bos=False, special=True) == ids
    mine, theirs = evaluate.torch_logits(model, ids), evaluate.gguf_logits(llm, ids)
    assert mine.std() > 0.1
    np.testing.assert_allclose(mine, theirs, atol=0.02)  # llama.cpp keeps the latents in half precision


def test_quantised_export_loads(tokens: Tokens, tmp_path: Path) -> None:
    weights = {name: value.numpy() for name, value in random_model(SMALL).state_dict().items()}
    exact = export.write_f32(tmp_path / "f32.gguf", SMALL, weights, tokens)
    small = export.quantize_q5_k_m(exact, tmp_path / "q5.gguf", threads=1)
    assert small.stat().st_size < exact.stat().st_size / 4
    assert isinstance(evaluate.reply(evaluate.open_gguf(small), "Hello", limit=4), str)


def test_quantiser_names_the_files_when_it_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no-such"):
        export.quantize_q5_k_m(tmp_path / "no-such.gguf", tmp_path / "out.gguf")


def test_training_resumes_where_it_stopped(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plan = train.Plan(until=time.time() + 3600, decay=1, rows=2, time=32, steps=4)
    for folder, stops in (("once", [4]), ("twice", [2, 4])):
        (tmp_path / folder).mkdir()
        for steps in stops:
            train.run(tmp_path / folder, SMALL, FakeStream(), replace(plan, steps=steps))
    states = [torch.load(tmp_path / f / "model.pt", weights_only=True) for f in ("once", "twice")]
    assert [s["step"] for s in states] == [4, 4]
    for name, value in states[0]["model"].items():
        torch.testing.assert_close(value, states[1]["model"][name], rtol=1e-3, atol=1e-4, msg=name)
    assert train.load_model(tmp_path / "once" / "model.pt").c == SMALL


def test_learning_rate_rises_holds_and_falls_to_zero() -> None:
    plan = train.Plan(until=1000.0, decay=100.0, warmup=10)
    assert train.learning_rate(plan, 0, 0.0) == pytest.approx(0.1)
    assert train.learning_rate(plan, 500, 800.0) == 1.0
    assert train.learning_rate(plan, 500, 950.0) == pytest.approx(0.5)
    assert train.learning_rate(plan, 500, 1001.0) == 0.0


def test_clock_is_the_next_such_time() -> None:
    now = datetime(2026, 1, 31, 23, 30)
    assert train.clock("23:45", now) - now.timestamp() == 900
    assert train.clock("00:30", now) - now.timestamp() == 3600


def test_orthogonalize_makes_singular_values_alike() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(optim.orthogonalize(torch.randn(3, 32, 64)).float())
    assert values.min() > 0.6 and values.max() < 1.3


def test_experts_report_load_and_random_ones_answer_otherwise() -> None:
    model = random_model(SMALL)
    rows = [(list(range(3, 103)), [1.0] * 100)]
    (layer,) = evaluate.routing(model, rows)
    assert layer.load.sum() == pytest.approx(1) and 0 < layer.load_entropy <= 1
    assert 0 < layer.gate_entropy <= np.log(SMALL.experts) + 1e-3
    plain = evaluate.torch_perplexity(model, rows)
    assert evaluate.torch_perplexity(model, rows, random_experts=True) != plain
    assert evaluate.torch_perplexity(model, rows) == plain


def test_loss_counts_what_the_assistant_says(tokens: Tokens) -> None:
    ids = tokens.encode(data.render([("Hi", "Hello!"), ("Bye", "Goodbye!")]))
    weights = data.chat_weights(ids)
    said = tokens.decode([i for i, w in zip(ids, weights, strict=True) if w == 1.0])
    assert "Hello!<|im_end|>" in said and "Goodbye!<|im_end|>" in said
    assert "Hi" not in said and "Bye" not in said
