"""With default options every logit equals stock llama.cpp's to the last bit: any batch, any thread count.

Each test also asserts by SPICE's counters that SPICE ran the experts, so that none can pass by accident.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace

import llama_cpp
import llama_cpp._internals as internals
import numpy as np
import pytest
from spice_moe import Llama
from support import Counts, assert_same, both, greedy, open_model, prefill, prompt

ARCHITECTURES = ["qwen2moe", "deepseek2", "olmoe", "llama"]  # llama with experts is Mixtral
TYPES = ["F16", "Q8_0", "Q4_K", "Q5_K"]
BATCHES = [1, 2, 3, 4, 5, 6, 7, 8, 33, 512]


@pytest.fixture(params=[f"{arch}-{kind}" for arch in ARCHITECTURES for kind in TYPES])
def model(request: pytest.FixtureRequest, tiny_model) -> Path:
    arch, kind = request.param.split("-")
    return tiny_model(arch, layers=3, expert_type=kind, seed=1)


def test_prefill_and_64_greedy_tokens(model: Path) -> None:
    tokens = prompt(33)
    with both(model) as (stock, spice):
        counts = Counts(spice)
        assert_same(prefill(spice, tokens), prefill(stock, tokens))
        counts.expect(batches=1, tokens=33)

        counts = Counts(spice)
        ids, logits = greedy(spice, tokens, 64)
        counts.expect(batches=1 + 64, tokens=33 + 64)
        expected_ids, expected_logits = greedy(stock, tokens, 64)
        assert ids == expected_ids
        assert_same(logits, expected_logits)
        assert len(set(ids)) > 8, "a text of one token would prove little"


@pytest.mark.parametrize(
    "options",
    [
        {"flash_attn": True},
        {"type_k": llama_cpp.GGML_TYPE_Q4_0},
        {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0, "type_v": llama_cpp.GGML_TYPE_Q8_0},
    ],
    ids=str,
)
def test_flash_attention_and_a_quantised_cache(tiny_model, options: dict[str, int]) -> None:
    path = tiny_model("qwen2moe", layers=2, expert_type="Q4_K", seed=1)
    tokens = prompt(33)
    with both(path, **options) as (stock, spice):
        counts = Counts(spice)
        assert_same(prefill(spice, tokens, [20, *[1] * 13]), prefill(stock, tokens, [20, *[1] * 13]))
        counts.expect(batches=14, tokens=33)
        with contextlib.closing(open_model(Llama, path)) as other:
            assert prefill(other, tokens).tobytes() != prefill(spice, tokens).tobytes(), "it changes nothing"


@pytest.mark.parametrize("batch", BATCHES)
def test_micro_batches(model: Path, batch: int) -> None:
    length = 512 if batch == 512 else 70
    tokens = prompt(length, seed=batch)
    with both(model, n_batch=512, n_ubatch=batch) as (stock, spice):
        counts = Counts(spice)
        assert_same(prefill(spice, tokens), prefill(stock, tokens))
        counts.expect(batches=math.ceil(length / batch), tokens=length)


def test_evaluation_in_chunks_of_every_size(model: Path) -> None:
    with both(model) as (stock, spice):
        for batch in BATCHES[:-1]:
            tokens = prompt(70, seed=batch)
            chunks = [batch] * (70 // batch)
            counts = Counts(spice)
            assert_same(prefill(spice, tokens, chunks), prefill(stock, tokens, chunks))
            counts.expect(batches=math.ceil(70 / batch), tokens=70)


@pytest.mark.parametrize(("threads", "threads_batch"), [(1, 2), (2, 2), (2, 1)])
def test_threads(model: Path, threads: int, threads_batch: int) -> None:
    tokens = prompt(40)
    with both(model, n_threads=threads, n_threads_batch=threads_batch) as (stock, spice):
        counts = Counts(spice)
        ids, logits = greedy(spice, tokens, 4)
        counts.expect(batches=1 + 4, tokens=40 + 4)
        expected_ids, expected_logits = greedy(stock, tokens, 4)
        assert ids == expected_ids
        assert_same(logits, expected_logits)


def test_reset_and_reuse(model: Path) -> None:
    first, second = prompt(33, seed=1), prompt(20, seed=2)
    with both(model) as (stock, spice):
        before = prefill(spice, first)
        assert_same(before, prefill(stock, first))
        assert_same(prefill(spice, second), prefill(stock, second))
        counts = Counts(spice)
        assert_same(prefill(spice, first), before)
        counts.expect(batches=1, tokens=33)
        assert spice.spice.stats()["slabs_read"] == 0, "the experts of this prompt were in memory"


def test_two_models_of_one_file_in_turns(model: Path) -> None:
    tokens = {0: prompt(33, seed=1), 1: prompt(48, seed=2)}
    with both(model) as (stock, one), contextlib.closing(open_model(Llama, model)) as two:
        counts = Counts(one), Counts(two)
        logits: dict[int, list] = {0: [], 1: []}
        for start in range(0, 48, 8):
            for index, llm in enumerate((one, two)):
                if chunk := tokens[index][start : start + 8]:
                    llm.eval(chunk)
                    logits[index].append(llm.scores[start : start + len(chunk)].copy())
        counts[0].expect(batches=5, tokens=33)
        counts[1].expect(batches=6, tokens=48)
        for index in (0, 1):
            expected = prefill(stock, tokens[index], [8] * 6)
            assert_same(np.concatenate(logits[index]), expected)


class SecondContext:
    """A second llama context on the model of ``llm``, by the classes that llama_cpp.Llama itself uses."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self._vocab = llm.n_vocab()
        self._ctx = internals.LlamaContext(model=llm._model, params=llm.context_params, verbose=False)
        self._batch = internals.LlamaBatch(n_tokens=512, embd=0, n_seq_max=1, verbose=False)
        self.used = 0

    def eval(self, tokens: list[int]) -> np.ndarray:
        """Logits [len(tokens), n_vocab]."""
        self._batch.set_batch(tokens, n_past=self.used, logits_all=True)
        self._ctx.decode(self._batch)
        self.used += len(tokens)
        shape = (len(tokens), self._vocab)
        return np.ctypeslib.as_array(self._ctx.get_logits(), shape=shape).copy()

    def close(self) -> None:
        self._batch.close()
        self._ctx.close()


def test_two_contexts_of_one_model_in_turns(model: Path) -> None:
    tokens = [prompt(32, seed=1), prompt(32, seed=2)]
    with both(model) as (stock, spice), contextlib.closing(SecondContext(spice)) as second:
        counts = Counts(spice)
        logits = SimpleNamespace(first=[], second=[])
        for start in range(0, 32, 4):
            spice.eval(tokens[0][start : start + 4])
            logits.first.append(spice.scores[start : start + 4].copy())
            logits.second.append(second.eval(tokens[1][start : start + 4]))
        counts.expect(batches=16, tokens=64)
        assert_same(np.concatenate(logits.first), prefill(stock, tokens[0], [4] * 8))
        assert_same(np.concatenate(logits.second), prefill(stock, tokens[1], [4] * 8))


@pytest.mark.parametrize("split", [2, 3])
def test_split_files(tiny_model, split: int) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1, split=split)
    tokens = prompt(33)
    with both(path) as (stock, spice):
        counts = Counts(spice)
        assert_same(prefill(spice, tokens), prefill(stock, tokens))
        counts.expect(batches=1, tokens=33)


def test_fewer_and_more_experts_than_the_header_says(tiny_model) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)
    tokens = prompt(33)
    for used in (1, 3, 8):
        with both(path, kv_overrides={"qwen2moe.expert_used_count": used}) as (stock, spice):
            assert spice.spice.plan.experts_used == used
            counts = Counts(spice)
            assert_same(prefill(spice, tokens), prefill(stock, tokens))
            counts.expect(batches=1, tokens=33)


def test_loading_reads_no_expert_byte(tiny_model) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)
    with contextlib.closing(open_model(Llama, path)) as spice:
        stats = spice.spice.stats()
        assert stats["bytes_read"] == stats["slabs_read"] == stats["resident_experts"] == 0
        prefill(spice, prompt(33))
        stats = spice.spice.stats()
        assert 0 < stats["bytes_read"] <= spice.spice.plan.expert_bytes
        assert stats["slabs_read"] == stats["resident_experts"] == stats["experts_missed"]
