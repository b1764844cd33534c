"""The KV cache that is foretold is the one that llama.cpp makes, and only what cannot fit is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import llama_cpp
import pytest
from spice_moe import Llama, SpiceBudgetError, cli, context_memory
from spice_moe.budget import FreeMemory, swap_memory
from spice_moe.context_memory import CacheSize, cache_size
from spice_moe.shipped import tiny_model as shipped
from support import open_model
from support_models import make_dense

GIB = 2**30
MLA = "shipped"  # latent attention: one cache for keys and values
INDEXED = ("deepseek32", "deepseek4")  # attention to chosen tokens, with a cache to choose by
WINDOWS = ("gpt-oss", "gemma4")
RECURRENT = ("qwen3next", "nemotron_h_moe", "jamba")


@pytest.mark.parametrize("options", [{}, {"flash_attn": True, "type_k": 8, "type_v": 8}, {"swa_full": False}])
@pytest.mark.parametrize("name", [MLA, "qwen2moe", *INDEXED, *WINDOWS, *RECURRENT])
def test_what_is_foretold_is_what_is_made(name: str, options: dict, tiny_model) -> None:
    path = shipped() if name == MLA else tiny_model(name, layers=4, expert_type="Q8_0")
    if name == MLA and options.get("type_k"):
        pytest.skip("its heads are no multiple of a block")
    arguments = {"n_ctx": 16384, "n_batch": 64, "n_ubatch": 64, **options}
    exact, less = (cache_size(str(path), arguments, tried=cells) for cells in (16384, 4096))
    assert exact is not None and less is not None
    with contextlib.closing(open_model(Llama, path, logits_all=False, **arguments)) as llm:
        made = llm.spice.plan.kv_cache_bytes
        assert " of KV cache; 1 compute thread" in str(llm.spice.plan)
    assert made > 2**20
    assert exact(16384) == pytest.approx(made, rel=1e-3)
    assert less(16384) == pytest.approx(made, rel=5e-2), "from a quarter of the cells, rounded"
    fixed = name in RECURRENT or (name in WINDOWS and options.get("swa_full") is False)
    assert (exact.fixed > made / 1000) == fixed or name == "deepseek4", "the part that does not grow"


def test_the_largest_that_fits() -> None:
    size = CacheSize(n_ctx=2**20, fixed=1000, per_cell=100.0)
    assert size.largest(1000 + 100 * 512) == 512
    assert size.largest(1000 + 100 * 512 - 1) == 256
    assert size.largest(999) == 0
    recurrent = CacheSize(n_ctx=2**20, fixed=1000, per_cell=0)  # any or none
    assert (recurrent.largest(1000), recurrent.largest(999)) == (2**20, 0)


@pytest.fixture
def one_gib_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_memory, "free_memory", lambda: FreeMemory(GIB, "system"))
    monkeypatch.setattr(context_memory, "swap_memory", lambda: 0)


@pytest.mark.usefixtures("one_gib_free")
def test_a_context_that_cannot_fit(tiny_model, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1)
    with pytest.raises(SpiceBudgetError) as caught:
        open_model(Llama, path, n_ctx=10_000_000, logits_all=False)
    words = str(caught.value).split()
    largest = next(int(word.removeprefix("n_ctx=")) for word in words if word.startswith("n_ctx="))
    assert f"a context of {-(-10_000_000 // 256) * 256} tokens takes" in str(caught.value)
    assert "1.0 GiB of memory are free" in str(caught.value)
    size = cache_size(str(path), {"n_ctx": 10_000_000})
    assert size is not None and 0.5 * GIB < size(largest) < GIB
    with contextlib.closing(open_model(Llama, path, n_ctx=largest, logits_all=False)) as llm:
        assert llm.spice.plan.kv_cache_bytes == pytest.approx(size(largest), rel=1e-3)
    assert cli.main([str(path), "-p", "x", "-c", "10000000"]) == 6
    assert f"(-c {largest}) fits" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("one_gib_free")
def test_plain_models_too(tmp_path: Path) -> None:
    with pytest.raises(SpiceBudgetError, match="tokens takes"):
        open_model(Llama, make_dense(tmp_path / "dense.gguf"), n_ctx=10_000_000, logits_all=False)


def test_only_what_is_certain_is_refused(tiny_model, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tiny_model("qwen2moe", layers=3, expert_type="Q4_K", seed=1))
    monkeypatch.setattr(context_memory, "free_memory", lambda: FreeMemory(GIB, "system"))
    asked = {"n_ctx": 2**20}
    size = cache_size(path, asked)
    assert size is not None
    need = size(2**20)

    def refused(swap: int, beside: int = 0, **more: object) -> bool:
        monkeypatch.setattr(context_memory, "swap_memory", lambda: swap)
        try:
            context_memory.check(path, {**asked, **more}, layers=3, beside=beside)
        except SpiceBudgetError:
            return True
        return False

    assert need > GIB and refused(need - GIB - 1) and not refused(need - GIB)  # swap space counts
    assert refused(need - GIB, beside=1)
    assert not refused(0, n_gpu_layers=-1) and not refused(0, vocab_only=True)
    assert not refused(0, kv_overrides={"qwen2moe.block_count": 1})
    assert refused(0, kv_overrides={"qwen2moe.expert_used_count": 1})
    assert not refused(0, n_ctx="many") and not refused(0, n_ctx=4096)
    assert not refused(0, type_k=llama_cpp.GGML_TYPE_Q4_0, n_ctx=2**17)


def test_a_model_that_llama_cpp_refuses_is_left_to_the_load(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGUF no")
    assert cache_size(str(tmp_path / "no.gguf"), {}) is None


def test_free_swap(tmp_path: Path) -> None:
    assert swap_memory(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 8 kB\nSwapTotal: 9 kB\nSwapFree:  7 kB\n")
    assert swap_memory(tmp_path) == 7 * 1024
