"""The drop-in behaves as llama_cpp.Llama does, and says what it did."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import pickle
import subprocess
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from spice_moe import (
    COUNTERS,
    Llama,
    SpiceError,
    SpiceFileNotFoundError,
    SpiceFormatError,
    SpiceOptions,
    SpiceUnsupportedError,
    loading,
)
from spice_moe.shipped import tiny_model as shipped
from support import Counts, Stock, assert_same, both, greedy, open_model, prefill, prompt, usage
from support_models import make_dense, make_lora

TEXT = "The time of the people"


@pytest.fixture(scope="module")
def path(tiny_model) -> Path:
    return tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)


def test_completion_and_streaming(path: Path) -> None:
    with both(path) as (stock, spice):
        answers = [m(TEXT, max_tokens=24, temperature=0)["choices"][0]["text"] for m in (stock, spice)]
        assert answers[0] == answers[1] != ""
        pieces = list(spice(TEXT, max_tokens=24, temperature=0, stream=True))
        assert "".join(p["choices"][0]["text"] for p in pieces) == answers[0]
        seeded = [m(TEXT, max_tokens=24, seed=7)["choices"][0]["text"] for m in (stock, spice)]
        assert seeded[0] == seeded[1] != answers[0]


def test_chat(path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    with both(path) as (stock, spice):
        assert spice.chat_format == stock.chat_format
        options = dict(max_tokens=16, temperature=0)
        contents = [
            m.create_chat_completion(messages, **options)["choices"][0]["message"]["content"]
            for m in (stock, spice)
        ]
        assert contents[0] == contents[1] != ""
        chunks = spice.create_chat_completion(messages, stream=True, **options)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == contents[0]


def test_log_probabilities(path: Path) -> None:
    with both(path) as (stock, spice):
        left, right = (
            m(TEXT, max_tokens=8, temperature=0, logprobs=3)["choices"][0]["logprobs"] for m in (stock, spice)
        )
        assert left == right
        assert len(left["top_logprobs"][0]) >= 3


def test_only_the_last_token_has_logits(path: Path) -> None:
    with both(path, logits_all=False) as (stock, spice):
        answers = [m(TEXT, max_tokens=24, temperature=0)["choices"][0]["text"] for m in (stock, spice)]
        assert answers[0] == answers[1]
        assert spice.spice.stats()["layer_calls"] > 0


def test_embeddings(path: Path) -> None:
    for pooling in (llama_cpp.LLAMA_POOLING_TYPE_MEAN, llama_cpp.LLAMA_POOLING_TYPE_NONE):
        with both(path, embedding=True, pooling_type=pooling, logits_all=False) as (stock, spice):
            texts = [TEXT, "other words"]
            assert spice.embed(texts) == stock.embed(texts)
            left, right = (m.create_embedding(texts)["data"] for m in (stock, spice))
            assert left == right
            assert spice.spice.stats()["layer_calls"] > 0


def test_grammar(path: Path) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    with contextlib.closing(open_model(Llama, path)) as spice:
        assert spice(TEXT, max_tokens=16, grammar=grammar)["choices"][0]["text"] in ("yes", "no")


def test_state_save_and_load(path: Path) -> None:
    with contextlib.closing(open_model(Llama, path)) as spice:
        prefill(spice, prompt(33))
        state = spice.save_state()
        spice.eval([400, 401])
        expected = spice.scores[33:35].copy()
        prefill(spice, prompt(50, seed=9))
        spice.load_state(state)
        assert spice.n_tokens == 33
        spice.eval([400, 401])
        assert_same(spice.scores[33:35], expected)


def test_prompt_lookup_decoding(path: Path) -> None:
    def text(kind: type[llama_cpp.Llama]) -> str:
        draft = LlamaPromptLookupDecoding(num_pred_tokens=4)
        with contextlib.closing(open_model(kind, path, draft_model=draft)) as llm:
            return llm(f"{TEXT}, {TEXT}, {TEXT}", max_tokens=32, temperature=0)["choices"][0]["text"]

    assert text(Llama) == text(Stock) != ""


def test_lora(path: Path, tmp_path: Path) -> None:
    lora = make_lora(path, tmp_path / "lora.gguf", ["blk.1.attn_q.weight", "output.weight"])
    with both(path, lora_path=str(lora)) as (stock, spice):
        assert_same(prefill(spice, prompt(33)), prefill(stock, prompt(33)))
        with contextlib.closing(open_model(Stock, path)) as bare:
            assert not np.array_equal(prefill(spice, prompt(33)), prefill(bare, prompt(33)))


def test_lora_on_experts(path: Path, tmp_path: Path) -> None:
    lora = make_lora(
        path, tmp_path / "lora.gguf", ["blk.0.ffn_gate_exps.weight", "blk.1.ffn_down_exps.weight"]
    )
    with both(path, lora_path=str(lora)) as (stock, spice):
        adapted = prefill(spice, prompt(33))
        assert_same(adapted, prefill(stock, prompt(33)))
        assert spice.spice.stats()["expert_rows"] > 0
    with contextlib.closing(open_model(Llama, path)) as bare:
        assert not np.array_equal(prefill(bare, prompt(33)), adapted)


def test_lora_that_cannot_be_applied(path: Path, tmp_path: Path) -> None:
    with pytest.raises(SpiceFormatError, match="LoRA"):
        open_model(Llama, path, lora_path=str(path))
    with pytest.raises(SpiceFileNotFoundError):
        open_model(Llama, path, lora_path=str(tmp_path / "nothing"))


def test_two_models_are_independent(path: Path, tiny_model) -> None:
    other = tiny_model("olmoe", layers=2, expert_type="Q8_0", seed=2)
    with both(path) as (stock, one), contextlib.closing(open_model(Llama, other)) as two:
        expected = prefill(stock, prompt(33))
        logits = prefill(two, prompt(20))
        counts = Counts(one)
        two.spice.reset_stats()
        assert_same(prefill(one, prompt(33)), expected)
        counts.expect(batches=1, tokens=33)
        assert two.spice.stats()["layer_calls"] == 0
        one.close()
        assert_same(prefill(two, prompt(20)), logits)


def test_a_dense_model_loads_as_plain(tmp_path: Path) -> None:
    path = make_dense(tmp_path / "dense.gguf")
    with contextlib.closing(open_model(Llama, path)) as spice:
        plan = spice.spice.plan
        assert plan.mode == "plain"
        assert "dense" in plan.reason
        assert "dense" in str(plan)
        assert spice.model_params.use_extra_bufts
        assert spice.model_params.load_mode == llama_cpp.LLAMA_LOAD_MODE_MMAP
        assert not spice.model_params.tensor_buft_overrides
        with contextlib.closing(open_model(llama_cpp.Llama, path)) as parent:
            assert_same(prefill(spice, prompt(33)), prefill(parent, prompt(33)))
        assert not any(spice.spice.stats()[name] for name in COUNTERS)


def test_disabled_loads_as_plain(path: Path) -> None:
    with contextlib.closing(open_model(Llama, path, enabled=False)) as spice:
        assert spice.spice.plan.mode == "plain"
        assert "enabled=False" in str(spice.spice.plan)
        assert spice.model_params.load_mode == llama_cpp.LLAMA_LOAD_MODE_MMAP
        prefill(spice, prompt(8))
        assert spice.spice.stats()["layer_calls"] == 0


def test_vocab_only(path: Path) -> None:
    with contextlib.closing(open_model(Llama, path, vocab_only=True)) as spice:
        assert spice.spice.plan.mode == "plain"
        assert spice.detokenize(spice.tokenize(TEXT.encode())).decode().strip() == TEXT


def test_counters_are_documented(path: Path) -> None:
    with contextlib.closing(open_model(Llama, path)) as spice:
        prefill(spice, prompt(33))
        stats = spice.spice.stats()
        assert stats.keys() == {*COUNTERS, "plan"}
        assert stats["plan"] == spice.spice.plan.to_dict()
        assert stats["resident_experts"] > 0
        spice.spice.reset_stats()
        after = spice.spice.stats()
        assert after["layer_calls"] == after["bytes_read"] == 0
        assert after["resident_experts"] == stats["resident_experts"]


def test_plan_describes_the_model(path: Path) -> None:
    with contextlib.closing(open_model(Llama, path, n_threads=1, n_threads_batch=2, io_threads=3)) as spice:
        plan = spice.spice.plan
    assert (plan.mode, plan.architecture, plan.moe_layers) == ("spice", "qwen2moe", 3)
    assert (plan.experts_per_layer, plan.experts_used, plan.experts_total) == (8, 2, 24)
    assert (plan.n_threads, plan.n_threads_batch, plan.io_threads) == (1, 2, 3)
    assert plan.expert_types == ("Q4_K",)
    assert plan.expert_bytes == 24 * plan.slab_bytes_max
    assert plan.exact
    assert "bit-identical" in str(plan)


def test_the_plan_is_printed_when_verbose(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    open_model(Llama, path, verbose=True).close()
    assert "SPICE: qwen2moe, 3 MoE layers" in capfd.readouterr().err
    open_model(Llama, path).close()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_repacking_is_lossy_and_says_so(path: Path) -> None:
    with both(path, repack=True) as (stock, spice):
        assert not spice.spice.plan.exact
        assert "repack" in str(spice.spice.plan)
        assert spice.model_params.use_extra_bufts
        left, right = prefill(spice, prompt(33)), prefill(stock, prompt(33))
        assert np.abs(left - right).max() < 0.1 * np.abs(right).max()


def test_options_object_and_shortcuts(path: Path) -> None:
    options = SpiceOptions(io_threads=2, repack=True)
    with contextlib.closing(open_model(Llama, path, spice=options, repack=False)) as spice:
        assert spice.spice.plan.io_threads == 2
        assert not spice.spice.plan.repack


def test_every_parameter_of_the_parent_is_accepted(path: Path) -> None:
    skipped = {"self", "model_path", "kwargs", "lora_base", "lora_path", "chat_handler", "numa"}
    parent = inspect.signature(llama_cpp.Llama.__init__).parameters
    defaults = {name: p.default for name, p in parent.items() if name not in skipped}
    with contextlib.closing(Llama(str(path), **{**defaults, "verbose": False})) as spice:
        assert spice.spice.plan.mode == "spice"
    with contextlib.closing(Llama(path, verbose=False, use_mlock=True, use_mmap=False)) as spice:  # a Path
        assert spice.spice.plan.load_mode == "read+mlock"
        prefill(spice, prompt(8))


MLOCK = """
import ctypes, resource, sys, warnings
libc = ctypes.CDLL(None)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
sets[0] &= ~(1 << 14)  # CAP_IPC_LOCK, with which the limit does not hold
sets[1] &= ~(1 << 14)
assert libc.capset(header, sets) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
from spice_moe import Llama
with warnings.catch_warnings(record=True) as said:
    llm = Llama(sys.argv[1], use_mlock=True, verbose=False, n_ctx=64, n_threads=1)
llm.eval([1, 300])
print(llm.spice.plan.load_mode, *(one.message for one in said))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="takes a capability away")
def test_memory_that_cannot_be_locked(path: Path) -> None:
    """The model runs, and the plan does not say that it is locked."""
    done = subprocess.run([sys.executable, "-c", MLOCK, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mode, _, warning = done.stdout.partition(" ")
    assert mode == "read"
    assert "not locked" in warning and "ulimit -l" in warning


def test_pickle_and_copy(path: Path) -> None:
    with contextlib.closing(open_model(Llama, path, io_threads=2)) as spice:
        expected = greedy(spice, prompt(20), 8)
        for twin in (pickle.loads(pickle.dumps(spice)), copy.copy(spice)):
            with contextlib.closing(twin):
                assert twin.spice.plan == spice.spice.plan
                ids, logits = greedy(twin, prompt(20), 8)
                assert ids == expected[0]
                assert_same(logits, expected[1])
                assert twin.__getstate__()["use_mmap"] is True


def test_close_twice_and_delete(path: Path) -> None:
    spice = open_model(Llama, path)
    prefill(spice, prompt(8))
    spice.close()
    spice.close()
    stats = spice.spice.stats()
    assert stats["layer_calls"] > 0
    assert stats["resident_experts"] == 0
    del spice
    gc.collect()


def test_a_with_block_closes_the_model(path: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"), open_model(Llama, path) as llm:
        llm.eval([1, 2])
        raise RuntimeError("mine")
    with pytest.raises(ValueError, match="closed"):
        llm.eval([1])


def test_missing_file_and_directory(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.gguf"
    with pytest.raises(SpiceFileNotFoundError, match=r"nothing\.gguf"):
        Llama(str(missing))
    for kind in (ValueError, FileNotFoundError, SpiceError):
        with pytest.raises(kind):
            Llama(str(missing))
    with pytest.raises(SpiceError):
        Llama(str(tmp_path))


def test_a_context_too_large_is_a_memory_error(path: Path) -> None:
    script = (
        "import resource, sys; from spice_moe import Llama\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "Llama(sys.argv[1], n_ctx=3_000_000, verbose=False)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "SpiceMemoryError" in done.stderr.splitlines()[-1]
    assert "kv cache" in done.stderr.splitlines()[-1]


def refused_context() -> None:
    """A load that fails once the model is there: one cache for both cannot have two types."""
    with pytest.raises(SpiceUnsupportedError, match=r"no context.*different K \(f32\) and V \(f16\)"):
        open_model(Llama, shipped(), type_k=llama_cpp.GGML_TYPE_F32)


def test_a_context_that_cannot_be_made_says_why() -> None:
    refused_context()


def test_progress(path: Path) -> None:
    seen: list[float] = []
    open_model(Llama, path, progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert seen[-1] > 0.5

    with pytest.raises(SpiceError, match="stopped"):
        open_model(Llama, path, progress=lambda fraction: fraction < 0.2)

    def fail(_fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_model(Llama, path, progress=fail)


def test_progress_bar_is_on_stderr_even_when_llama_cpp_is_quiet(
    path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_model(Llama, path, progress=True).close()
    assert capfd.readouterr().err == "", "a quick load shows no bar"
    monkeypatch.setattr(loading, "_BAR_DELAY_S", 0)
    open_model(Llama, path, progress=True).close()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("\rloading [")
    assert err.endswith("\r\x1b[2K"), "wiped at the end"


THREADS = """
import sys, os
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from pathlib import Path
from spice_moe import Llama
llm = Llama(sys.argv[1], verbose=False, n_threads=int(sys.argv[2]), n_threads_batch=int(sys.argv[3]),
            enabled=sys.argv[4] == "spice", io_threads=1)
llm.eval([1, 300, 301, 302]); llm.eval([303])
print(len(list(Path("/proc/self/task").iterdir())))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_threads_are_those_of_stock(path: Path) -> None:
    def threads(single: int, batch: int, mode: str) -> int:
        command = [sys.executable, "-c", THREADS, str(path), str(single), str(batch), mode]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    io = threads(1, 1, "spice") - threads(1, 1, "plain")
    assert io <= 1
    for single, batch in ((3, 1), (1, 3)):
        assert threads(single, batch, "spice") - io == threads(single, batch, "plain")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_twenty_loads_leave_nothing_behind(path: Path) -> None:
    def cycle() -> None:
        llm = open_model(Llama, path, n_ctx=2048, logits_all=False)
        llm(TEXT, max_tokens=2)
        llm.close()

    def fail() -> None:
        refused_context()
        with pytest.raises(SpiceFormatError):
            open_model(Llama, path, kv_overrides={"qwen2moe.attention.head_count": 7})

    for _ in range(5):
        cycle()
        fail()
    before = usage()
    for _ in range(20):
        cycle()
        fail()
    time.sleep(0.1)  # threads that were told to end
    after = usage()
    assert after.files == before.files
    assert after.threads == before.threads
    assert after.resident_bytes < before.resident_bytes + 4 * 2**20
