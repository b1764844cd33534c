"""What the workers of several benchmarks do: decode a real text token by token, because routing decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import llama_cpp
import numpy as np

PROMPT = 16  #: tokens that are evaluated at once before the first decoded one


def read_text(llm: llama_cpp.Llama, path: str, needed: int) -> list[int]:
    """The token ids of a text, BOS first. Ends the process, saying so, when there are too few."""
    text = llm.tokenize(Path(path).read_bytes(), add_bos=True)
    if len(text) < needed:
        raise SystemExit(f"{path}: {len(text)} tokens, {needed} are needed; give a longer --text")
    return text


def warm_up(llm: llama_cpp.Llama, text: Sequence[int], warm: int) -> Sequence[int]:
    """Evaluate the prompt on an empty context and decode `warm` tokens; returns the rest of the text."""
    llm.reset()
    llm.eval(text[:PROMPT])
    for token in text[PROMPT : PROMPT + warm]:
        llm.eval([token])
    return text[PROMPT + warm :]


def decode_on(llm: llama_cpp.Llama, tokens: Sequence[int]) -> tuple[float, list[int]]:
    """Decode these tokens; returns the seconds it took, and the most likely token after each."""
    best: list[int] = []
    started = time.perf_counter()
    for token in tokens:
        llm.eval([token])
        logits = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
        best.append(int(np.argmax(np.ctypeslib.as_array(logits, shape=(llm.n_vocab(),)))))
    return time.perf_counter() - started, best


def decode(
    llm: llama_cpp.Llama,
    text: Sequence[int],
    warm: int,
    counted: int,
    *,
    start: Callable[[], object] = lambda: None,
) -> tuple[float, list[int]]:
    """Decode on an empty context: the prompt, `warm` tokens, `start()`, and the `counted` ones.

    Returns seconds of the counted ones, and the most likely token after each.
    """
    rest = warm_up(llm, text, warm)
    start()
    return decode_on(llm, rest[:counted])
