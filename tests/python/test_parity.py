"""What programs do with ``llama_cpp.Llama`` besides plain completion gives the same with SPICE's."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp.llama_cache import LlamaDiskCache, LlamaRAMCache
from spice_moe import Llama
from support import Stock, assert_same, both, open_model, prefill, prompt

MESSAGES = [{"role": "user", "content": "The time of the people"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["n"],
        },
    },
}


@pytest.fixture(scope="module")
def path(tiny_model) -> Path:
    return tiny_model("qwen2moe", layers=2, expert_type="Q4_K", seed=3)


def without_stamps(answer: Any) -> Any:
    """An answer without what differs from call to call: its id and its time."""
    if isinstance(answer, dict):
        return {k: without_stamps(v) for k, v in answer.items() if k not in ("id", "created")}
    if isinstance(answer, list):
        return [without_stamps(one) for one in answer]
    return "call" if isinstance(answer, str) and answer.startswith("call__") else answer


def test_tools(path: Path) -> None:
    options: dict[str, Any] = {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "look_up"}},
        "temperature": 0,
        "max_tokens": 24,
    }
    with both(path) as (stock, spice):
        whole = [without_stamps(m.create_chat_completion(MESSAGES, **options)) for m in (stock, spice)]
        assert whole[0] == whole[1]
        assert whole[1]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look_up"
        streams = [
            [without_stamps(c) for c in m.create_chat_completion(MESSAGES, stream=True, **options)]
            for m in (stock, spice)
        ]
        assert streams[0] == streams[1]
        assert any(c["choices"][0]["delta"].get("tool_calls") for c in streams[1])


def test_json_answers(path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    options = {"response_format": {"type": "json_object", "schema": schema}, "temperature": 0}
    with both(path) as (stock, spice):
        texts = [
            m.create_chat_completion(MESSAGES, max_tokens=32, **options)["choices"][0]["message"]["content"]
            for m in (stock, spice)
        ]
        assert texts[0] == texts[1] != ""


def test_processors_and_criteria(path: Path) -> None:
    seen: list[int] = []

    def only_even(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        seen.append(len(ids))
        scores[1::2] = -np.inf
        return scores

    options: dict[str, Any] = {
        "logits_processor": llama_cpp.LogitsProcessorList([only_even]),
        "stopping_criteria": llama_cpp.StoppingCriteriaList([lambda ids, _logits: len(ids) > 20]),
        "repeat_penalty": 1.3,
        "temperature": 0,
        "max_tokens": 40,
    }
    with both(path) as (stock, spice):
        answers = [without_stamps(m("The time", **options)) for m in (stock, spice)]
        assert answers[0] == answers[1]
        assert seen
        assert answers[1]["usage"]["completion_tokens"] < 40


def test_biases(path: Path) -> None:
    with both(path) as (stock, spice):
        options = {"temperature": 0, "max_tokens": 12}
        plain = spice("The time", **options)["choices"][0]["text"]
        texts = [
            m("The time", logit_bias={400: 50.0}, **options)["choices"][0]["text"] for m in (stock, spice)
        ]
        assert texts[0] == texts[1] != plain


@pytest.mark.parametrize("mirostat", [0, 1, 2])
def test_samplers_with_a_seed(path: Path, mirostat: int) -> None:
    options = {"mirostat_mode": mirostat, "seed": 11, "top_k": 20, "typical_p": 0.9, "max_tokens": 24}
    with both(path) as (stock, spice):
        left, right = (m("The time", **options)["choices"][0]["text"] for m in (stock, spice))
        assert left == right


def test_generate_sample_and_reset(path: Path) -> None:
    with both(path) as (stock, spice):
        runs = []
        for m in (stock, spice):
            m.reset()
            ids = []
            for token in m.generate(prompt(9), temp=0.0):
                ids.append(token)
                if len(ids) == 12:
                    break
            runs.append((ids, m.n_tokens, list(m.eval_tokens)))
        assert runs[0] == runs[1]
        for m in (stock, spice):  # from a prefix that is in the context
            again = list(zip(m.generate(prompt(9)[:5], temp=0.0), range(4), strict=False))
            runs.append(again)
        assert runs[2] == runs[3]
        for m in (stock, spice):
            m.reset()
            m.eval(prompt(9))
            runs.append(m.sample(temp=0.0))
        assert runs[4] == runs[5]


@pytest.mark.parametrize("kind", [LlamaRAMCache, LlamaDiskCache])
def test_caches_of_states(path: Path, kind: type, tmp_path: Path) -> None:
    texts = []
    for number, cls in enumerate((Stock, Llama)):
        with contextlib.closing(open_model(cls, path)) as llm:
            cache = kind(str(tmp_path / str(number))) if kind is LlamaDiskCache else kind()
            llm.set_cache(cache)
            for text in ("The time of the people", "Something else", "The time of the people and"):
                texts.append(llm(text, max_tokens=12, temperature=0)["choices"][0]["text"])
            with contextlib.suppress(AttributeError):
                cache.cache.close()
    assert texts[:3] == texts[3:]


def test_a_saved_state_goes_from_stock_to_spice_and_back(path: Path) -> None:
    with both(path) as (stock, spice):
        expected = prefill(stock, prompt(24))
        state = stock.save_state()
        spice.load_state(state)
        spice.eval([400])
        stock.eval([400])
        assert_same(spice.scores[24:25], stock.scores[24:25])
        back = spice.save_state()
        stock.reset()
        stock.load_state(back)
        assert stock.n_tokens == 25
        assert_same(stock.scores[:24], expected)


def test_models_in_threads(path: Path) -> None:
    with contextlib.closing(open_model(Stock, path)) as stock:
        expected = prefill(stock, prompt(33))
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        with contextlib.closing(open_model(Llama, path)) as llm:
            for _ in range(3):
                found[number] = prefill(llm, prompt(33))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3
    for logits in found.values():
        assert_same(logits, expected)


def test_closing_is_what_users_of_the_parent_write(path: Path) -> None:
    """llama_cpp.Llama is no context manager; ours is (test_llama.py), and contextlib.closing works, too."""
    with contextlib.closing(open_model(Llama, path)) as llm:
        llm.eval([1, 300])
    assert llm.spice.stats()["resident_experts"] == 0


def test_what_would_end_the_parents_process(path: Path) -> None:
    with contextlib.closing(open_model(Llama, path)) as llm:
        for token in (-1, 10**9, 2**40):
            with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary"):
                llm.detokenize([1, token])
        assert llm.detokenize(llm.tokenize(b"The time")).strip() == b"The time"
    for use in (
        lambda: llm("a"),
        lambda: llm.eval([1]),
        lambda: llm.tokenize(b"a"),
        lambda: llm.detokenize([1]),
        lambda: llm.embed("a"),
        lambda: llm.save_state(),
        lambda: llm.n_ctx(),
        lambda: next(llm.generate([1, 2])),
        lambda: llm.create_chat_completion(MESSAGES),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            use()


def test_from_pretrained(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The parent's downloader, with the hub played by a folder."""
    hub, utils = types.ModuleType("huggingface_hub"), types.ModuleType("huggingface_hub.utils")
    files = types.SimpleNamespace(ls=lambda *_, **__: [{"name": f"me/it/{path.name}"}])
    hub.HfFileSystem = lambda *_, **__: files  # type: ignore[attr-defined]
    hub.hf_hub_download = lambda **_: str(path)  # type: ignore[attr-defined]
    utils.validate_repo_id = lambda _: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    options: dict[str, Any] = {"local_dir": str(path.parent), "n_ctx": 64, "verbose": False}
    llm = Llama.from_pretrained("me/it", path.name, ram_budget="50%", io_threads=2, **options)
    with contextlib.closing(llm):
        assert isinstance(llm, Llama)
        assert llm.spice.plan.io_threads == 2
        assert llm.spice.plan.slots < llm.spice.plan.experts_total


def test_signatures(path: Path) -> None:
    """Every public method is the parent's, or takes what the parent's takes."""
    for name, method in inspect.getmembers(llama_cpp.Llama, callable):
        ours = getattr(Llama, name)
        if name.startswith("_") or ours is method:
            continue
        takes = inspect.signature(ours).parameters
        if not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
            assert list(takes) == list(inspect.signature(method).parameters), name


def test_the_server_runs_spice(path: Path) -> None:
    """llama_cpp.server takes `llama_cpp.Llama` when it loads: naming SPICE's there is all that it needs."""
    pytest.importorskip("fastapi")
    settings = pytest.importorskip("llama_cpp.server.settings")
    server = pytest.importorskip("llama_cpp.server.model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_cpp, "Llama", Llama)
        model = settings.ModelSettings(model=str(path), n_ctx=64, verbose=False)
        proxy = server.LlamaProxy([model])
        assert proxy().spice.plan.mode == "spice"
        proxy.free()
