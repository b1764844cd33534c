"""The shipped spice-tiny: what the file is, and that it answers in chat."""

from __future__ import annotations

import random
from pathlib import Path

import llama_cpp
import pytest
from gguf import GGUFReader

from models.tiny import stories, tasks

FILE = Path(__file__).resolve().parents[2] / "python" / "spice_moe" / "data" / "spice-tiny.gguf"


@pytest.fixture(scope="module")
def llm() -> llama_cpp.Llama:
    return llama_cpp.Llama(str(FILE), n_ctx=512, n_threads=1, verbose=False, seed=0)


def ask(llm: llama_cpp.Llama, *said: str, limit: int = 60) -> str:
    """The greedy answer to the last of what user and assistant said in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    made = llm.create_chat_completion(messages, temperature=0.0, max_tokens=limit)
    return made["choices"][0]["message"]["content"]


def test_the_file_is_a_small_deepseek2_with_k_quants() -> None:
    assert FILE.stat().st_size <= 12_000_000
    reader = GGUFReader(FILE)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["general.architecture"] == "deepseek2"
    assert fields["deepseek2.leading_dense_block_count"] == 1
    assert fields["deepseek2.expert_count"] >= 16
    assert fields["deepseek2.expert_used_count"] == 4
    assert fields["deepseek2.expert_shared_count"] == 1
    assert "<|im_start|>" in fields["tokenizer.chat_template"]
    kinds = {t.tensor_type.name for t in reader.tensors if "_exps." in t.name}
    assert kinds <= {"Q5_K", "Q6_K"}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("What day comes after Monday?", "Tuesday comes after Monday."),
        ("Who are you?", "I am spice-tiny, a very small mixture-of-experts language model."),
    ],
)
def test_it_answers_in_chat(llm: llama_cpp.Llama, question: str, answer: str) -> None:
    assert ask(llm, question) == answer


def test_it_answers_a_second_question(llm: llama_cpp.Llama) -> None:
    first = "What is the capital of Italy?"
    answer = ask(llm, first, "The capital of Italy is Rome.", "What is the opposite of big?")
    assert answer == "The opposite of big is small."


def test_it_gets_most_held_out_lists_right(llm: llama_cpp.Llama) -> None:
    r = random.Random("shipped")
    kinds = (tasks.reverse_list, tasks.count_list, tasks.pick, tasks.repeat)
    right = 0
    for n in range(40):
        question, answer = tasks.draw(r, held_out=True, task=kinds[n % len(kinds)])
        right += ask(llm, question) == answer
    assert right >= 32


def test_it_tells_a_story(llm: llama_cpp.Llama) -> None:
    text = ask(llm, "Tell me a story about an owl.", limit=200)
    assert "owl" in text and text.endswith(".") and len(text.split()) > 40
    assert any(name in text for name in stories.NAMES)


def test_every_text_can_be_spelled(llm: llama_cpp.Llama) -> None:
    text = "na\u00efve caf\u00e9 \u2713 \u65e5\u672c \U0001f600 12345".encode()
    assert llm.detokenize(llm.tokenize(text, add_bos=False)) == text
